"""Hook ``quant-lora``: the LoRAs of stock nodes, beside the product of a coarse quantized weight.

ComfyUI bakes a LoRA into a quantized weight: it dequantizes, adds, and rounds again, and a small delta
drowns in the rounding. Here the same patches run as one low-rank pair beside the product,
``y = quantized(x) + (x @ down^T) @ up^T``, and the weight stays the object it is.

splitting   which patches of a weight have a small exact low-rank form (terms of adapters.py), which not
steps       the step sizes of a format;  kept: how much of a delta would survive them
planning    for one patcher: what runs beside, what ComfyUI bakes
branch      the pair on its module;  svdq: appended to a branch that the layout has already
running     plan -> modules, and back;  carrying: another plan on a model that stays loaded
memory      the bytes of the factors, for ComfyUI's choice of what fits
patchers, saving, schedule, fused, bypass: where ComfyUI is met; switching, standin: what schedule puts in and takes out
"""
