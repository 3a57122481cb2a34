"""LoRA files that stop the workflow, or have no effect."""

from .signature import Signature

_OWN_NODE = "use ComfyUI's own LoRA loader node: with qpatch it works on Nunchaku models"

LORA = (
    Signature(
        "zimage-merge", r"^AssertionError: Unexpected key: (diffusion_model\.\S+)",
        "A Nunchaku Z-Image model was merged or subtracted; ComfyUI-nunchaku's patcher stops at the first weight that"
        " is no matrix.",
        hooks=("lora-loader",),
    ),
    Signature(
        "zimage-lora", r"^(?:Assertion|Value)Error\b(?:: )?(.*)",
        "ComfyUI-nunchaku's own LoRA code for Z-Image knows plain LoRA with all of q, k, v and w1, w3 only, and stops"
        " at every other file (LoKr, a part of them, norms, biases).",
        frames=r"model_patcher[\\/]zimage\.py", hooks=("lora-loader",),
    ),
    Signature(
        "flux-lora", r"^(?:Assertion|Key)Error\b(?:: )?(.*)",
        "nunchaku's own LoRA converter for FLUX stopped at a file that is not a plain, complete LoRA (LoKr, alpha for"
        " some layers only, text encoder keys among the others).",
        frames=r"nunchaku[\\/]lora[\\/]flux|in update_lora_params\b",
        remedy="qpatch does not mend LoRA on FLUX: use another export of the file, or a newer nunchaku",
    ),
    Signature(
        "fused-part", r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)",
        "A node added a LoRA for q, k or v ({1} rows) to the layer that holds all three ({0} rows).",
        frames=r"(?i)lora\w*[\\/]|lora\w*\.py", holds=lambda found: int(found.group(1)) == 3 * int(found.group(2)),
        remedy="update the node pack that the traceback names, or use ComfyUI's own LoRA node",
    ),
    Signature(
        "no-lora-method",
        r"'Nunchaku(?:QwenImage|ZImage)\w+' object has no attribute '(?:update_lora_params|set_lora\w+)'",
        "That release of nunchaku has no LoRA for this model in Python.",
        remedy="in Python: from qpatch.lora import compose; compose(model, [(path, 0.8)])",
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
        "lora-stops", r"^(?:Runtime|Index|Value)Error: (.*)",
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
        "lora-composed-nothing", r"(?i:applied lora compositions) to 0 modules?",
        "ComfyUI-QwenImageLoraLoader found no layer for any key of the file.",
        hooks=("lora-loader",), remedy=_OWN_NODE,
    ),
    Signature(
        "lora-pack-skips",
        r"\[MISS\] Module not found: \S+|Skipping (?:LoKr weights|unsupported LoRA)|Unsupported LoRA format detected"
        r"|LoRA format is unsupported|LoKR \w+ (?:mismatch|failed)|LoKR SVD decomposition failed",
        "ComfyUI-QwenImageLoraLoader leaves layers of a LoRA out, or the whole file, because its tables do not know"
        " their names or their kind.",
        hooks=("lora-loader",), remedy=_OWN_NODE,
    ),
    Signature(
        "lora-pack-wrapper", r"'ComfyQwenImageWrapper' object has no attribute '(\w+)'",
        "A node looks for {0} on a Nunchaku Qwen-Image model, and the wrapper of ComfyUI-QwenImageLoraLoader hides it.",
        hooks=("lora-loader",), remedy=_OWN_NODE,
    ),
    Signature(
        "lora-pack-outlived", r"'NoneType' object has no attribute '(?:to|parameters|_forward|forward)'",
        "The wrapper that ComfyUI-QwenImageLoraLoader puts around a Nunchaku model has outlived its model, which"
        " ComfyUI had unloaded.",
        frames=r"QwenImageLoraLoader", hooks=("lora-loader",), remedy=_OWN_NODE,
    ),
)
