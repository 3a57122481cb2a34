"""Nunchaku layers in float on a CPU, tiny models made of them, and the same models unquantized.

For tests only. ``kernels`` stands in for nunchaku's compiled functions; ``tiny`` fills a model's
quantized layers from the weights of its unquantized twin; ``world`` builds both from the stand-ins
or from checkouts of ComfyUI, ComfyUI-nunchaku and nunchaku.
"""
