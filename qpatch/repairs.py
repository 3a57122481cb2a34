"""The compatibility repairs, as data: what each one mends, where, and the versions the break was seen in.

The hook ``comfy-compat-<thing>`` is implemented by ``hooks/compat/<thing>.py``.
"""

PREFIX = "comfy-compat-"

#: name -> mends; targets {pattern: names that the module defines}; seen ((what, first version, last version), ...).
#: A last version that is the newest one of the matrix in docs/compatibility.md means: not mended so far.
REPAIRS = {
    "config-copy": dict(
        mends="copying a model configuration, which answers None for every name it lacks",
        targets={"comfy.supported_models_base": ("BASE",)},
        seen=(("ComfyUI", "0.15.0", "0.33.0"),),
    ),
    "control-lora": dict(
        mends="a Control-LoRA on a model with quantized weights, which borrows their integers",
        targets={"comfy.controlnet": ("ControlLora",)},
        seen=(("ComfyUI", "0.15.0", "0.33.0"),),
    ),
    "disabled-list": dict(
        mends="mixed_precision_ops where its argument disabled has to be a set",
        targets={"comfy.ops": ()},
        seen=(),
    ),
    "flux-wrapper": dict(
        mends="attributes of a Nunchaku FLUX model that its wrapper hides",
        targets={"*.wrappers.flux": ("ComfyFluxWrapper",)},
        seen=(("ComfyUI-nunchaku", "1.0.0", "1.2.1"),),
    ),
    "lora-key-map": dict(
        mends="LoRA keys of one model leaking into those of the next",
        targets={"comfy.lora": ("model_lora_keys_unet", "model_lora_keys_clip")},
        seen=(("ComfyUI", "0.15.0", "0.33.0"),),
    ),
    "lora-shape": dict(
        mends="LoRA tensors of a wrong shape that stop the workflow",
        targets={"comfy.lora": ("calculate_weight",)},
        seen=(("ComfyUI", "0.15.0", "0.33.0"),),
    ),
    "original-weights": dict(
        mends="LoRA functions called with original_weights that do not know it",
        targets={"comfy.lora": ("calculate_weight",), "comfy.model_patcher": ("LowVramPatch",)},
        seen=(("ComfyUI", "0.15.0", "0.33.0"),),
    ),
    "other-packs": dict(
        mends="patches of qpatch that another node pack replaces while it loads",
        targets={"nodes": ()},
        seen=(("ComfyUI-QwenImageLoraLoader", "2.5.7", "2.5.7"),),
    ),
    "patcher-calls": dict(
        mends="arguments of ComfyUI's callers that ComfyUI-nunchaku's patchers do not know",
        targets={"*.model_patcher.zimage": ("ZImageModelPatcher",), "*.model_patcher.common": ("NunchakuModelPatcher",),
                 "*.model_patcher": ("NunchakuModelPatcher",)},
        seen=(("ComfyUI", "0.15.0", "0.33.0"),),
    ),
    "plain-dtype": dict(
        mends="unquantized layers of Nunchaku models that keep the file's dtype under dynamic VRAM",
        targets={"*.model_configs.zimage": ("NunchakuZImage",), "*.model_configs.qwenimage": ("NunchakuQwenImage",)},
        seen=(("ComfyUI", "0.15.0", "0.33.0"),),
    ),
    "quant-copy": dict(
        mends="deepcopy of layers with quantized weights",
        targets={"comfy_kitchen.tensor.base": ("QuantizedTensor",)},
        seen=(("comfy-kitchen", "0.2.10", "0.2.40"),),
    ),
    "quant-keys": dict(
        mends="merging, LoRA hooks and LoRA extraction of models with quantized weights",
        targets={"comfy.model_patcher": ("ModelPatcher",)},
        seen=(("ComfyUI", "0.15.0", "0.33.0"),),
    ),
    "quant-parameter": dict(
        mends="quantized weights that a Parameter hides",
        targets={"comfy.model_patcher": ("get_key_weight",)},
        seen=(),
    ),
    "qwen-calls": dict(
        mends="arguments of Nunchaku Qwen-Image that arrive under another's name, or unknown",
        targets={"*.models.qwenimage": ("NunchakuQwenImageTransformer2DModel", "QwenImageTransformer2DModel")},
        seen=(("ComfyUI-nunchaku", "1.0.0", "1.2.1"),),
    ),
    "qwen-moves": dict(
        mends="Nunchaku Qwen-Image going to the CPU and back at each sampling, uncounted",
        targets={"*.model_patcher.common": ("NunchakuModelPatcher",), "*.model_patcher": ("NunchakuModelPatcher",)},
        seen=(("ComfyUI", "0.15.0", "0.33.0"),),
    ),
    "rotary": dict(
        mends="apply_rotary_emb of Qwen-Image, while ComfyUI lacks it",
        targets={"comfy.ldm.qwen_image.model": ()},
        seen=(("ComfyUI", "0.23.0", "0.24.0"),),
    ),
    "svdq-lowvram": dict(
        mends="quantized Z-Image layers that lack what the low-VRAM path reads",
        targets={"*.models.zimage": ("fuse_to_svdquant_linear", "patch_model")},
        seen=(("ComfyUI-nunchaku", "1.2.1", "1.2.1"),),
    ),
    "zimage-attention": dict(
        mends="settings of ComfyUI's attention that ComfyUI-nunchaku 1.1 does not copy",
        targets={"*.models.zimage": ("fuse_to_svdquant_linear", "patch_model")},
        seen=(("ComfyUI", "0.29.0", "0.33.0"),),
    ),
    "zimage-batch": dict(
        mends="positions of Nunchaku Z-Image: in a batch, and after a cancelled run",
        targets={"*.models.zimage": ("fuse_to_svdquant_linear", "patch_model")},
        seen=(("ComfyUI-nunchaku", "1.2.0", "1.2.1"),),
    ),
}
