"""Quantized weights that ComfyUI keeps itself: NVFP4, INT8, FP8, ConvRot."""

from .signature import Signature

QUANTIZED = (
    Signature(
        "convrot-recognised", r"'NoneType' object has no attribute 'quant_config'",
        "ComfyUI took a model with NVFP4 layers for another architecture, because their stored shapes are half as"
        " wide.",
        hooks=("convrot",),
    ),
    # Before the next one, which knows the same message without a traceback.
    Signature(
        "control-lora-quantized", r"mat1 and mat2 shapes cannot be multiplied",
        "A Control-LoRA borrowed the weights of a quantized model, and got their stored integers.",
        frames=r"controlnet\.py\"?, line \d+, in forward", hooks=("comfy-compat-control-lora",),
    ),
    Signature(
        "nvfp4-without-configuration", r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x(\d+)\)",
        "A layer expects {1} inputs and gets {0}, twice as many: an NVFP4 file (two numbers a byte) was loaded as"
        " plain weights, because its configuration is missing or has other names.",
        remedy="use the original file of the model, with its comfy_quant tensors or metadata; re-saving can lose them",
        holds=lambda found: int(found.group(1)) in (2 * int(found.group(2)), 2 * int(found.group(3))),
    ),
    Signature(
        "hswq-purge", r"nvfp4_baked=0\b|NVFP4_LORA_BAKE_N/A",
        "ComfyUI-HSWQ-Loader-and-Tools added a LoRA to NVFP4 layers without undoing their rotation: its purge had"
        " taken its own patches off, and a cached model does not put them back. The pictures are noise.",
        remedy="load the model with ComfyUI's own loader, which hook convrot of qpatch mends, or update that pack",
    ),
    Signature(
        "integer-parameters", r"Only Tensors of floating point and complex dtype can require gradients",
        "Something wraps an integer weight in a Parameter that wants gradients.",
        frames=r"(?i)convrot|int8|quant|comfy[\\/]ops", remedy="update the node pack that the traceback names",
    ),
    Signature(
        "fp8-arithmetic", r"\"?addmm\w*\"? not implemented for '?Float8",
        "A LoRA is being added to an FP8 weight in FP8 arithmetic.",
        remedy="update ComfyUI: later releases add it in float32",
    ),
)
