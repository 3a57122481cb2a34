"""Failures while a Nunchaku model is built, loaded or first run."""

from .signature import Signature

LOADING = (
    Signature(
        "lazy-linear", r"'NoneType' object has no attribute '(?:dtype|device)'",
        "With dynamic VRAM ComfyUI builds Linear layers whose weights come later, and nunchaku reads the weight's"
        " dtype while it replaces them.",
        frames=r"in from_linear\b|nunchaku[\\/]models[\\/](?:transformers|text_encoders|utils)", hooks=("lazy-linear",),
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
        "zimage-batch", r"(?i:assertion failed).*rotary_emb|rotary_emb\S*\s*\S*\s*==\s*M\b",
        "Z-Image with more than one image at a time: the table of positions has rows for one image, and the kernel"
        " wants them for the whole batch.",
        hooks=("comfy-compat-zimage-batch",),
    ),
    Signature(
        "zimage-cancelled", r"^AssertionError$",
        "A run of Nunchaku Z-Image was cancelled in the middle of a step, and the node pack's hooks stayed on the"
        " layers: every later run packs the table of positions twice.",
        frames=r"in pack_rotemb\b", hooks=("comfy-compat-zimage-batch",), remedy="to go on now, load the model again",
    ),
    Signature(
        "svdq-lowvram", r"'SVDQW4A4Linear' object has no attribute '(?:weight|bias)_function'",
        "ComfyUI unloads a part of a Nunchaku Z-Image model that has a LoRA, and its quantized layers lack what the"
        " low-VRAM path reads.",
        hooks=("comfy-compat-svdq-lowvram", "lora-loader"),
    ),
    Signature(
        "out-of-memory", r"OutOfMemoryError: (.*)|CUDA out of memory|Allocation on device \d* ?would exceed",
        "The graphics card's memory was full.",
        remedy="a smaller picture or batch, or start ComfyUI with --reserve-vram 2; if it worked before an update,"
               " update ComfyUI again: 0.4.0 counted the layers of Nunchaku models wrongly, and releases of January"
               " 2026 took too much for a LoRA on an FP8 model",
    ),
    Signature(
        "device-mismatch", r"Expected all tensors to be on the same device",
        "A sampler handed Nunchaku Qwen-Image tensors that are on another device than the model.",
        frames=r"(?i)nunchaku|QwenImageLoraLoader", remedy="update ComfyUI-nunchaku to 1.0.2 or later",
    ),
    Signature(
        "flux-wrapper", r"'ComfyFluxWrapper' object has no attribute '(\w+)'",
        "A node looks for {0} on a Nunchaku FLUX model, and ComfyUI-nunchaku's wrapper hides it.",
        hooks=("comfy-compat-flux-wrapper",),
    ),
)
