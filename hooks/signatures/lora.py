"""LoRA files that stop the workflow, or have no effect."""

from .signature import Signature

LORA = (
    Signature(
        "zimage-lora", r"^(?:AssertionError|ValueError)\b(?:: )?(.*)",
        "ComfyUI-nunchaku's own LoRA code for Z-Image knows plain LoRA with all of q, k, v and w1, w3 only, and stops"
        " at every other file (LoKr, a part of them, norms, biases).",
        frames=r"model_patcher[\\/]zimage\.py", hooks=("lora-loader",),
    ),
    Signature(
        "lora-shape", r"ERROR lora \S+ (shape '.*' is invalid for input of size \d+|.*size of tensor.*)",
        "A tensor of a LoRA does not fit the weight that it is for ({0}): the file is for another model or variant.",
        hooks=("comfy-compat-lora-shape",), remedy="look at the file: qpatch lora inspect FILE",
    ),
    Signature(
        "lora-misfit", r"WARNING SHAPE MISMATCH (\S+) WEIGHT NOT MERGED",
        "A tensor of a LoRA does not fit the weight {0} and was left out: the file is for another model or variant.",
        remedy="look at the file: qpatch lora inspect FILE",
    ),
    Signature(
        "lora-stops", r"^(?:RuntimeError|IndexError|ValueError): (.*)",
        "A tensor of a LoRA does not fit its weight ({0}), and ComfyUI stops the workflow instead of skipping it.",
        frames=r"in calculate_weight\b", hooks=("comfy-compat-lora-shape",),
        remedy="look at the file: qpatch lora inspect FILE",
    ),
    Signature(
        "lora-not-loaded", r"lora key not loaded: (\S+)|\bNOT LOADED:? (\S+)",
        "ComfyUI has no layer for keys of a LoRA. On Nunchaku models its own list of names lacks all quantized"
        " layers; on others the file is for another model, or spelled in a way that ComfyUI does not know.",
        hooks=("lora-loader",),
        remedy="for a model that is not from Nunchaku: qpatch lora convert FILE -o OUT.safetensors --to comfyui",
    ),
    Signature(
        "lora-composed-nothing", r"(?i)applied lora compositions to 0 modules?",
        "ComfyUI-QwenImageLoraLoader found no layer for any key of the file.",
        hooks=("lora-loader",), remedy="use ComfyUI's own LoRA loader node: with qpatch it works on Nunchaku models",
    ),
)
