"""Failures while a Nunchaku model is built, loaded or first run."""

from .signature import Signature

LOADING = (
    Signature(
        "lazy-linear", r"'NoneType' object has no attribute '(?:dtype|device)'",
        "With dynamic VRAM ComfyUI builds Linear layers whose weights come later, and nunchaku reads the weight's"
        " dtype while it replaces them.",
        frames=r"in from_linear\b", hooks=("lazy-linear",),
    ),
    Signature(
        "zimage-fuse", r"'NoneType' object has no attribute '(?:dtype|device)'",
        "With dynamic VRAM ComfyUI builds Linear layers whose weights come later, and ComfyUI-nunchaku's Z-Image"
        " reads the weight's dtype while it fuses two of them.",
        frames=r"in fuse_to_svdquant_linear\b", hooks=("zimage-fuse",),
    ),
    Signature(
        "plain-dtype",
        r"mat1 and mat2 (?:must|to) have the same dtype|expected m(?:at)?1 and m(?:at)?2 to have the same dtype",
        "The unquantized layers of a Nunchaku model kept the dtype of the file (float32 or float16), which dynamic"
        " VRAM does not cast for these models.",
        frames=r"(?i)nunchaku|lumina|zimage|qwen_?image", hooks=("comfy-compat-plain-dtype",),
    ),
    Signature(
        "zimage-attention", r"'ComfyNunchakuZImageAttention' object has no attribute '(\w+)'",
        "ComfyUI's attention of Z-Image got a new setting ({0}), which ComfyUI-nunchaku 1.1 does not copy.",
        hooks=("comfy-compat-zimage-attention",), remedy="or update ComfyUI-nunchaku to 1.2",
    ),
    Signature(
        "zimage-batch", r"(?i)assertion failed.*rotary_emb|rotary_emb\S*\s*\S*\s*==\s*M\b",
        "Z-Image with more than one image at a time: the table of positions has rows for one image, and the kernel"
        " wants them for the whole batch.",
        hooks=("comfy-compat-zimage-batch",),
    ),
    Signature(
        "svdq-lowvram", r"'SVDQW4A4Linear' object has no attribute '(?:weight|bias)_function'",
        "ComfyUI unloads a part of a Nunchaku Z-Image model that has a LoRA, and its quantized layers lack what the"
        " low-VRAM path reads.",
        hooks=("comfy-compat-svdq-lowvram", "lora-loader"),
    ),
    Signature(
        "flux-wrapper", r"'ComfyFluxWrapper' object has no attribute '(\w+)'",
        "A node looks for {0} on a Nunchaku FLUX model, and ComfyUI-nunchaku's wrapper hides it.",
        hooks=("comfy-compat-flux-wrapper",),
    ),
)
