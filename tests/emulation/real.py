"""Tiny Qwen-Image and Z-Image of real ComfyUI, unquantized and as ComfyUI-nunchaku's classes, on a CPU.

The checkouts come from QPATCH_TEST_COMFYUI, QPATCH_TEST_NUNCHAKU and QPATCH_TEST_COMFYUI_NUNCHAKU.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path

import torch

from . import kernels, tiny

VARIABLES = ("QPATCH_TEST_COMFYUI", "QPATCH_TEST_NUNCHAKU", "QPATCH_TEST_COMFYUI_NUNCHAKU")
QWEN = dict(image_model="qwen_image", in_channels=64, num_layers=2, attention_head_dim=128, num_attention_heads=2,
            joint_attention_dim=96)
ZIMAGE = dict(image_model="lumina2", patch_size=2, in_channels=16, cap_feat_dim=96, n_layers=2, qk_norm=True, dim=256,
              n_heads=2, n_kv_heads=2, axes_dims=[32, 48, 48], axes_lens=[64, 64, 64], rope_theta=256.0,
              ffn_dim_multiplier=8.0 / 3.0, z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32)


def missing() -> str | None:
    """The variable that is not set, or None when the checkouts can be used."""
    return next((name for name in VARIABLES if not os.environ.get(name)), None)


def load() -> None:
    """Import ComfyUI (as a library, for the CPU), nunchaku with emulated kernels, and the node pack, once."""
    if "comfy.sd" not in sys.modules:
        comfyui, nunchaku, _ = (os.environ[name] for name in VARIABLES)
        sys.path[:0] = [comfyui, nunchaku]
        argv, sys.argv = sys.argv, [sys.argv[0], "--cpu"]
        try:
            importlib.import_module("comfy.options").enable_args_parsing()
            importlib.import_module("comfy.cli_args")
        finally:
            sys.argv = argv
        for name in ("folder_paths", "comfy.sd", "comfy.hooks", "comfy.lora"):
            importlib.import_module(name)
    ops = importlib.import_module("nunchaku._C").ops
    for name in ("quantize_w4a4_act_fuse_lora", "gemm_w4a4", "gemv_awq"):
        setattr(ops, name, getattr(kernels, name))
    _no_streams()


def _no_streams() -> None:
    """Qwen's forward asks for CUDA streams whatever the device."""
    torch.cuda.current_stream = lambda device=None: None
    torch.cuda.stream = lambda stream: contextlib.nullcontext()


def pack() -> str:
    """The module name of the node pack, loaded the way ComfyUI does it."""
    folder = Path(os.environ["QPATCH_TEST_COMFYUI_NUNCHAKU"]).absolute()
    name = str(folder).replace(".", "_x_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return name


def _patcher(cls, model):
    cpu = torch.device("cpu")
    return cls(model, load_device=cpu, offload_device=cpu)


def qwen_pair(precision: str = "int4"):
    """(patcher of the unquantized model, patcher of its Nunchaku twin)."""
    import comfy.model_patcher
    import comfy.supported_models

    plain_config = comfy.supported_models.QwenImage(dict(QWEN))
    plain_config.set_inference_dtype(torch.float32, None)
    plain = plain_config.get_model({}, "")
    config = importlib.import_module(pack() + ".model_configs.qwenimage").NunchakuQwenImage(
        {**QWEN, "scale_shift": 0, "rank": 32, "precision": precision, "transformer_offload_device": None})
    config.set_inference_dtype(torch.bfloat16, None)
    quantized = config.get_model({}, "")
    _match(plain, quantized)
    patchers = importlib.import_module(pack() + ".model_patcher.common")
    return _patcher(comfy.model_patcher.ModelPatcher, plain), _patcher(patchers.NunchakuModelPatcher, quantized)


def zimage_pair(precision: str = "int4", skip_refiners: bool = False):
    """(patcher of the unquantized model, patcher of its Nunchaku twin)."""
    import comfy.model_patcher
    import comfy.supported_models

    plain_config = comfy.supported_models.ZImage(dict(ZIMAGE))
    plain_config.set_inference_dtype(torch.float32, None)
    plain = plain_config.get_model({}, "")
    cls = importlib.import_module(pack() + ".model_configs.zimage").NunchakuZImage
    small = type("Small" + cls.__name__, (cls,), {"_DIT_CONFIG_": ZIMAGE})
    config = small(rank=32, precision=precision, skip_refiners=skip_refiners)
    config.set_inference_dtype(torch.float32, None)
    quantized = config.get_model({}, "", torch_dtype=torch.bfloat16)
    _match(plain, quantized)
    patchers = importlib.import_module(pack() + ".model_patcher.zimage")
    return _patcher(comfy.model_patcher.ModelPatcher, plain), _patcher(patchers.ZImageModelPatcher, quantized)


def _match(plain, quantized) -> None:
    tiny.randomize(plain.diffusion_model, seed=1)
    tiny.quantize(quantized.diffusion_model, plain.diffusion_model)


def inputs(family: str, seed: int = 5) -> dict:
    """Arguments of the diffusion model's forward for one step on an 8 x 8 latent."""
    generator = torch.Generator().manual_seed(seed)
    context = torch.randn(1, 7, 96, generator=generator)
    shape = (1, 16, 1, 8, 8) if family == "qwen-image" else (1, 16, 8, 8)
    steps = {"timestep" if family == "qwen-image" else "timesteps": torch.tensor([0.6])}
    more = {} if family == "qwen-image" else {"num_tokens": 7}
    return {"x": torch.randn(shape, generator=generator), **steps, "context": context, "transformer_options": {}, **more}


def run(patcher, arguments: dict) -> torch.Tensor:
    """Load ``patcher`` as a sampler does, and evaluate its diffusion model once."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([patcher])
    with torch.no_grad():
        return patcher.model.diffusion_model(**{**arguments, "transformer_options": {}})
