"""Nunchaku layers in float on a CPU, tiny models made of them, and the same models unquantized.

For tests only. ``kernels`` stands in for nunchaku's compiled functions; ``tiny`` fills a model's
quantized layers from the weights of its unquantized twin; ``real`` builds both from checkouts of
ComfyUI, ComfyUI-nunchaku and nunchaku, ``standin`` from small classes of our own that keep their
contracts.
"""
