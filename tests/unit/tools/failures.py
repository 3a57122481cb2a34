"""Synthetic logs: for each signature what ComfyUI prints when it happens, written from the facts of each failure."""

import re


def traceback(error, *frames):
    """A traceback as Python prints it; a frame is (file, function)."""
    lines = ["Traceback (most recent call last):"]
    for number, (file, function) in enumerate(frames):
        lines += [f'  File "{file}", line {100 + number}, in {function}', f"    {function}(something)"]
    return "\n".join([*lines, error])


PACK = r"C:\ComfyUI\custom_nodes\ComfyUI-nunchaku"
EXECUTE = ("/opt/ComfyUI/execution.py", "execute")

#: Name of a signature -> a log in which it, and no other, is found.
LOGS = {
    "lazy-linear": traceback("AttributeError: 'NoneType' object has no attribute 'dtype'", EXECUTE,
                             ("/v/nunchaku/models/linear.py", "from_linear")),
    "zimage-fuse": traceback("AttributeError: 'NoneType' object has no attribute 'dtype'", EXECUTE,
                             (PACK + r"\models\zimage.py", "fuse_to_svdquant_linear")),
    "plain-dtype": traceback(
        "RuntimeError: mat1 and mat2 must have the same dtype, but got BFloat16 and Float", EXECUTE,
        ("/opt/ComfyUI/comfy/ldm/lumina/model.py", "forward")),
    "zimage-attention": traceback(
        "AttributeError: 'ComfyNunchakuZImageAttention' object has no attribute 'qk_norm'", EXECUTE),
    "zimage-batch": traceback(
        "RuntimeError: Assertion failed: rotary_emb.shape[0] * rotary_emb.shape[1] == M, file gemm_w4a4.cuh",
                              EXECUTE),
    "zimage-cancelled": traceback(
        "AssertionError", EXECUTE, (PACK + r"\models\zimage.py", "forward"),
        ("/v/nunchaku/models/embeddings.py", "pack_rotemb")),
    "svdq-lowvram": traceback("AttributeError: 'SVDQW4A4Linear' object has no attribute 'weight_function'", EXECUTE),
    "flux-wrapper": traceback("AttributeError: 'ComfyFluxWrapper' object has no attribute 'img_in'", EXECUTE),
    "rotary": traceback(
        "ImportError: cannot import name 'apply_rotary_emb' from 'comfy.ldm.qwen_image.model' (/opt/x.py)", EXECUTE),
    "patcher-calls": traceback(
        "TypeError: ZImageModelPatcher.clone() got an unexpected keyword argument 'disable_dynamic'", EXECUTE),
    "qwen-calls": traceback("TypeError: _forward() got multiple values for argument 'guidance'",
                            (PACK + r"\models\qwenimage.py", "forward")),
    "qwen-calls-named":
        "TypeError: NunchakuQwenImageTransformerBlock.forward() got an unexpected keyword argument"
        " 'transformer_options'",
    "config-copy": traceback(
        "TypeError: 'NoneType' object is not callable", EXECUTE, ("/usr/lib/python3.11/copy.py", "deepcopy")),
    "disabled-list": traceback(
        "AttributeError: 'list' object has no attribute 'add'", ("/opt/ComfyUI/comfy/ops.py", "mixed_precision_ops")),
    "original-weights": traceback(
        "TypeError: calculate_weight() got an unexpected keyword argument 'original_weights'", EXECUTE),
    "quant-copy": traceback("RuntimeError: Attempted to call copy_() on an invalid python storage.", EXECUTE),
    "quant-keys": traceback("AttributeError: 'Linear' object has no attribute 'weight_scale'",
                            ("/opt/ComfyUI/comfy/model_patcher.py", "get_key_patches")),
    "zimage-merge": traceback(
        "AssertionError: Unexpected key: diffusion_model.noise_refiner.1.adaLN_modulation.0.bias", EXECUTE,
        (PACK + r"\model_patcher\zimage.py", "patch_weight_to_device")),
    "zimage-lora": traceback(
        "AssertionError", EXECUTE, (PACK + r"\model_patcher\zimage.py", "patch_weight_to_device")),
    "lora-shape":
        "ERROR lora diffusion_model.layers.0.attention.out.weight shape '[3840, 3840]' is invalid for input of size"
        " 9437184",
    "lora-misfit":
        "WARNING SHAPE MISMATCH diffusion_model.x.weight WEIGHT NOT MERGED torch.Size([4, 4]) != torch.Size([8, 8])",
    "lora-stops": traceback("RuntimeError: start (0) + length (4) exceeds dimension size (2).", EXECUTE,
                            ("/opt/ComfyUI/comfy/lora.py", "calculate_weight")),
    "lora-not-loaded": "lora key not loaded: lora_unet_layers_0_attention_qkv.lora_down.weight",
    "lora-composed-nothing": "Applied LoRA compositions to 0 module(s).",
    "convrot-recognised": traceback("AttributeError: 'NoneType' object has no attribute 'quant_config'", EXECUTE),
    "nvfp4-without-configuration": traceback(
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4096x3840 and 1920x3840)", EXECUTE),
    "control-lora-quantized": traceback(
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4096x640 and 320x640)", EXECUTE,
        ("/opt/ComfyUI/comfy/controlnet.py", "get_control"), ("/opt/ComfyUI/comfy/controlnet.py", "forward")),
    "hswq-purge": "[HSWQ ZI NVFP4 LoRA] nvfp4_baked=0 other_qt_baked=83",
    "integer-parameters": traceback(
        "RuntimeError: Only Tensors of floating point and complex dtype can require gradients",
                                    ("/opt/ComfyUI/custom_nodes/pack/int8_loader.py", "load")),
    "fp8-arithmetic": traceback("""NotImplementedError: "addmm_cuda" not implemented for 'Float8_e4m3fn'""", EXECUTE),
    "nunchaku-missing": traceback("ModuleNotFoundError: No module named 'nunchaku'", EXECUTE),
    "nunchaku-of-pypi": traceback("ModuleNotFoundError: No module named 'nunchaku.models'", EXECUTE),
    "nunchaku-build": traceback(
        "ImportError: /v/nunchaku/_C.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c105Error", EXECUTE),
    "diffusers-old": traceback(
        "ModuleNotFoundError: No module named 'diffusers.models.transformers.transformer_z_image'", EXECUTE),
    "nunchaku-old":
        "ComfyUI-nunchaku 1.2.1 requires nunchaku >= v1.0.0, but found nunchaku 0.3.2. Please update nunchaku.",
    "node-missing": "Node `NunchakuQwenImageDiTLoader` import failed:",
    "out-of-memory": traceback(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8.00 GiB", EXECUTE),
    "device-mismatch": traceback(
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        EXECUTE, (PACK + r"\models\qwenimage.py", "_forward")),
    "qwen-calls-list": traceback(
        "AttributeError: 'list' object has no attribute 'to'", EXECUTE, (PACK + r"\models\qwenimage.py", "_forward")),
    "other-patcher": traceback(
        "TypeError: ModelPatcherAndInjector.unpatch_model() got an unexpected keyword argument 'unpatch_weights'",
        EXECUTE),
    "core-moved": traceback("AttributeError: 'Flux' object has no attribute 'diffusion_model'", EXECUTE,
                            (PACK + r"\nodes\models\flux.py", "load_model")),
    "node-arguments": traceback(
        "TypeError: NunchakuQwenImageDiTLoader.load_model() missing 1 required positional argument: 'cpu_offload'",
        EXECUTE),
    "core-module-missing": traceback("ModuleNotFoundError: No module named 'comfy.ldm.lumina.controlnet'",
                                     ("/opt/ComfyUI/custom_nodes/pack/nodes.py", "<module>")),
    "dynamic-hooks": traceback(
        "RuntimeError: Hooks not implemented in ModelPatcherDynamic. Please remove --fast arguments form ComfyUI"
        " startup",
        EXECUTE),
    "flux-lora": traceback("KeyError: 'lora_unet_double_blocks_0_img_attn_qkv.alpha'", EXECUTE,
                           ("/v/nunchaku/lora/flux/diffusers_converter.py", "to_diffusers")),
    "fused-part": traceback(
        "RuntimeError: The size of tensor a (11520) must match the size of tensor b (3840) at non-singleton dimension"
        " 0",
        EXECUTE, ("/opt/ComfyUI/custom_nodes/ComfyUI-Inspire-Pack/inspire/lora_block_weight.py", "doit")),
    "no-lora-method": traceback(
        "AttributeError: 'NunchakuQwenImageTransformer2DModel' object has no attribute 'update_lora_params'",
        ("script.py", "<module>")),
    "lora-pack-skips":
        "Skipping LoKr weights for QKV: LoKR support is currently experimental and disabled due to compatibility"
        " issues",
    "lora-pack-wrapper": traceback("AttributeError: 'ComfyQwenImageWrapper' object has no attribute 'img_in'", EXECUTE),
    "lora-pack-outlived": traceback(
        "AttributeError: 'NoneType' object has no attribute 'to'", EXECUTE,
        ("/opt/ComfyUI/custom_nodes/ComfyUI-QwenImageLoraLoader/wrappers/qwenimage.py", "to_safely")),
    "old-setuptools": traceback(
        "AttributeError: module 'pkgutil' has no attribute 'ImpImporter'. Did you mean: 'zipimporter'?",
        ("/v/pkg_resources/__init__.py", "<module>")),
    "start-up-file-alone":
        "Error processing line 1 of /v/lib/python3.12/site-packages/qpatch.pth:",
    "torch-early":
        "WARNING: Potential Error in code: Torch already imported, torch should never be imported before this point.",
}

#: Logs of other programs' failures, and of none: nothing is to be found in them.
STRANGERS = {
    "no failure": "got prompt\nmodel weight dtype torch.bfloat16\nPrompt executed in 3.2 seconds",
    "dtype of something else": traceback("AttributeError: 'NoneType' object has no attribute 'dtype'", EXECUTE,
                                         ("/opt/ComfyUI/custom_nodes/other/nodes.py", "encode")),
    "another assertion": traceback("AssertionError", EXECUTE, ("/opt/ComfyUI/custom_nodes/other/nodes.py", "run")),
    "another ValueError": "ValueError: bad input",
    "another multiplication": traceback(
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (77x2048 and 768x320)", EXECUTE),
    "another deepcopy": traceback(
        "TypeError: 'NoneType' object is not callable", EXECUTE, ("/opt/x/nodes.py", "call_me")),
    "another forward": traceback(
        "TypeError: forward() got an unexpected keyword argument 'mask'", ("/opt/x/unet.py", "forward")),
    "another list": traceback("AttributeError: 'list' object has no attribute 'add'", ("/opt/x/nodes.py", "tags")),
    "another size": traceback("RuntimeError: The size of tensor a (64) must match the size of tensor b (32)", EXECUTE,
                              ("/opt/x/lora_nodes.py", "add")),
    "another NoneType": traceback("AttributeError: 'NoneType' object has no attribute 'to'", EXECUTE,
                                  ("/opt/x/nodes.py", "move")),
    "another missing module": traceback("ModuleNotFoundError: No module named 'comfyui_tools'", EXECUTE),
    "another undefined symbol": traceback("ImportError: /v/flash_attn_2_cuda.so: undefined symbol: _ZN3c10", EXECUTE),
}


def prefixed(text, front):
    """``front`` before each line."""
    return "\n".join(front + line for line in text.split("\n"))


def first_only(text, front):
    """``front`` before the first line of each message, as logging puts it; a traceback is one message."""
    lines, inside = [], False
    for line in text.split("\n"):
        lines.append(line if inside else front + line)
        inside = line.startswith("Traceback") or (inside and line[:1].isspace())
    return "\n".join(lines)


def announced(text):
    """As ComfyUI's executor does it: the error, then the traceback that ends in it."""
    error = next((line for line in reversed(text.split("\n")) if re.match(r"[\w.]+Error\b", line)), "")
    message = error.partition(": ")[2]
    return text.replace("Traceback", f"!!! Exception during processing !!! {message}\nTraceback", 1)


def json_of(text):
    """As ComfyUI's server gives its log."""
    import json

    entries = [{"t": "2026-03-04T10:00:00", "m": line + "\n"} for line in text.split("\n")]
    return json.dumps({"entries": entries, "size": {}})


#: The ways in which a log reaches the doctor.
FORMATS = {
    "plain": lambda text: text,
    "crlf": lambda text: text.replace("\n", "\r\n"),
    "coloured": lambda text: first_only(text, "\x1b[1m\x1b[31m[ERROR]\x1b[0m "),
    "file": lambda text: first_only(text, "[2026-03-04 10:00:01,123] [ERROR] "),
    "manager": lambda text: prefixed(text, "[2026-03-04 10:00:01.123] "),
    "desktop": lambda text: prefixed(text, "[2026-03-04 10:00:01.123] [error] "),
    "basicConfig": lambda text: first_only(text, "2026-03-04 10:00:01,123 - ERROR - "),
    "docker": lambda text: prefixed(text, "comfyui-1  | "),
    "docker with time": lambda text: prefixed(text, "2026-03-04T10:00:01.123456789Z "),
    "journald": lambda text: prefixed(text, "Mar  4 10:00:01 box python[123]: "),
    "quoted": lambda text: prefixed(text, "> "),
    "announced": announced,
    "json": json_of,
}
