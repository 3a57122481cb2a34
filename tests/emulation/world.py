"""Tiny Qwen-Image and Z-Image of ComfyUI, unquantized and as ComfyUI-nunchaku's classes, on a CPU.

A world is three folders: ComfyUI, the place where ``nunchaku`` can be imported from, and the node pack.
The stand-ins are one, the checkouts that environment variables name are another; both are driven
through the same calls.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch

from . import kernels, tiny


class Tensors(NamedTuple):
    """A LoRA's tensors, as a file was read."""

    tensors: dict


class Folders(NamedTuple):
    comfyui: Path
    nunchaku: Path
    pack: Path


_STANDINS = Path(__file__).parent.parent / "standins"
STANDINS = Folders(_STANDINS / "ComfyUI", _STANDINS / "packages", _STANDINS / "custom_nodes" / "ComfyUI-nunchaku")
VARIABLES = ("QPATCH_TEST_COMFYUI", "QPATCH_TEST_NUNCHAKU", "QPATCH_TEST_COMFYUI_NUNCHAKU")
QWEN = dict(image_model="qwen_image", in_channels=64, num_layers=2, attention_head_dim=128, num_attention_heads=2,
            joint_attention_dim=96)
ZIMAGE = dict(image_model="lumina2", patch_size=2, in_channels=16, cap_feat_dim=96, n_layers=2, qk_norm=True, dim=256,
              n_heads=2, n_kv_heads=2, axes_dims=[32, 48, 48], axes_lens=[64, 64, 64], rope_theta=256.0,
              ffn_dim_multiplier=8.0 / 3.0, z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32)


def missing() -> str | None:
    """The variable that is not set, or None when the checkouts can be used."""
    return next((name for name in VARIABLES if not os.environ.get(name)), None)


def checkouts() -> Folders:
    """The folders that the environment names."""
    return Folders(*(Path(os.environ[name]).absolute() for name in VARIABLES))


def enter(folders: Folders) -> None:
    """Import ComfyUI as a library for the CPU, nunchaku with emulated kernels, and the node pack; once per process."""
    if "comfy.sd" not in sys.modules:
        sys.path[:0] = [str(folders.comfyui), str(folders.nunchaku)]
        argv, sys.argv = sys.argv, [sys.argv[0], "--cpu"]
        try:
            importlib.import_module("comfy.options").enable_args_parsing()
            importlib.import_module("comfy.sd")
        finally:
            sys.argv = argv
        for name in ("folder_paths", "comfy.hooks", "comfy.lora", "comfy.supported_models"):
            importlib.import_module(name)
    ops = importlib.import_module("nunchaku._C").ops
    for name in ("quantize_w4a4_act_fuse_lora", "gemm_w4a4", "gemv_awq"):
        setattr(ops, name, getattr(kernels, name))
    # Qwen's forward asks for CUDA streams whatever the device.
    torch.cuda.current_stream = lambda device=None: None
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    _load_pack(folders.pack)


def _name(pack: Path) -> str:
    return str(pack).replace(".", "_x_")


def _load_pack(pack: Path) -> None:
    """As ComfyUI does it: no finder is asked for the pack itself, only for its submodules."""
    if _name(pack) not in sys.modules:
        spec = importlib.util.spec_from_file_location(_name(pack), pack / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[_name(pack)] = module
        spec.loader.exec_module(module)


def of_pack(tail: str):
    """The submodule ``tail`` of the node pack of this process."""
    for folders in (STANDINS, *([] if missing() else [checkouts()])):
        if _name(folders.pack) in sys.modules:
            return importlib.import_module(f"{_name(folders.pack)}.{tail}")
    raise LookupError("no world was entered")


@contextlib.contextmanager
def standins():
    """Enter the stand-ins, and leave nothing of them (or of what they replaced) behind."""
    before, path = {name: sys.modules.pop(name) for name in list(sys.modules) if _foreign(name)}, list(sys.path)
    try:
        enter(STANDINS)
        yield
    finally:
        for name in [name for name in sys.modules if _foreign(name)]:
            del sys.modules[name]
        sys.modules.update(before)
        sys.path[:] = path


def _foreign(name: str) -> bool:
    return name.partition(".")[0] in ("comfy", "nunchaku", "folder_paths") or name.startswith(_name(STANDINS.pack))


def _patcher(cls, model):
    cpu = torch.device("cpu")
    return cls(model, load_device=cpu, offload_device=cpu)


def qwen_pair(precision: str = "int4", blocks: int = 2):
    """(patcher of the unquantized model, patcher of its Nunchaku twin)."""
    import comfy.model_patcher
    import comfy.supported_models

    shape = {**QWEN, "num_layers": blocks}
    plain_config = comfy.supported_models.QwenImage(dict(shape))
    plain_config.set_inference_dtype(torch.float32, None)
    plain = plain_config.get_model({}, "")
    config = of_pack("model_configs.qwenimage").NunchakuQwenImage(
        {**shape, "scale_shift": 0, "rank": 32, "precision": precision, "transformer_offload_device": None})
    config.set_inference_dtype(torch.bfloat16, None)
    quantized = config.get_model({}, "")
    _match(plain, quantized)
    patchers = of_pack("model_patcher.common")
    return _patcher(comfy.model_patcher.ModelPatcher, plain), _patcher(patchers.NunchakuModelPatcher, quantized)


def zimage_pair(precision: str = "int4", skip_refiners: bool = False):
    """(patcher of the unquantized model, patcher of its Nunchaku twin)."""
    import comfy.model_patcher
    import comfy.supported_models

    plain_config = comfy.supported_models.ZImage(dict(ZIMAGE))
    plain_config.set_inference_dtype(torch.float32, None)
    plain = plain_config.get_model({}, "")
    cls = of_pack("model_configs.zimage").NunchakuZImage
    small = type("Small" + cls.__name__, (cls,), {"_DIT_CONFIG_": ZIMAGE})
    config = small(rank=32, precision=precision, skip_refiners=skip_refiners)
    config.set_inference_dtype(torch.float32, None)
    quantized = config.get_model({}, "", torch_dtype=torch.bfloat16)
    _match(plain, quantized)
    patchers = of_pack("model_patcher.zimage")
    return _patcher(comfy.model_patcher.ModelPatcher, plain), _patcher(patchers.ZImageModelPatcher, quantized)


def _match(plain, quantized) -> None:
    tiny.randomize(plain.diffusion_model, seed=1)
    tiny.quantize(quantized.diffusion_model, plain.diffusion_model)
    # The plain layers are float32 now, and that is what ComfyUI is to send in.
    quantized.diffusion_model.dtype = torch.float32


@contextlib.contextmanager
def dynamic_vram():
    """ComfyUI's Linears are lazy in here; up to 0.28 that needs Windows as well."""
    import comfy.memory_management as memory
    import comfy.model_management as management

    before = memory.aimdo_enabled, management.WINDOWS
    memory.aimdo_enabled = management.WINDOWS = True
    try:
        yield
    finally:
        memory.aimdo_enabled, management.WINDOWS = before


def from_file(pair, path):
    """The quantized model of ``pair`` once more, made under dynamic VRAM from the file ``path`` it is written to."""
    model, config = pair.model, pair.quantized.model.model_config
    safetensors.torch.save_file({key: value.contiguous() for key, value in model.state_dict().items()}, path)
    with dynamic_vram():
        fresh = config.get_model({}, "", **({"torch_dtype": torch.bfloat16} if pair.family == "z-image" else {}))
        fresh.load_model_weights(safetensors.torch.load_file(path), "")
    fresh.diffusion_model.dtype = torch.float32
    for key, parameter in fresh.diffusion_model.named_parameters():
        # Qwen-Image declares one dtype for all; what qpatch cast to it is float32 again.
        if parameter.dtype != model.get_parameter(key).dtype:
            parameter.data = model.get_parameter(key).detach().clone()
    return _patcher(type(pair.quantized), fresh)


def inputs(family: str, seed: int = 5) -> dict:
    """Arguments of the diffusion model's forward for one step on an 8 x 8 latent."""
    generator = torch.Generator().manual_seed(seed)
    context = torch.randn(1, 7, 96, generator=generator)
    shape = (1, 16, 1, 8, 8) if family == "qwen-image" else (1, 16, 8, 8)
    steps = {"timestep" if family == "qwen-image" else "timesteps": torch.tensor([0.6])}
    more = {} if family == "qwen-image" else {"num_tokens": 7}
    noise = torch.randn(shape, generator=generator)
    return {"x": noise, **steps, "context": context, "transformer_options": {}, **more}


def run(patcher, arguments: dict) -> torch.Tensor:
    """Load ``patcher`` as a sampler does, and evaluate its diffusion model once."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([patcher])
    return evaluate(patcher, arguments)


def evaluate(patcher, arguments: dict) -> torch.Tensor:
    """One call of the diffusion model under ``patcher`` as it stands."""
    options = arguments.get("transformer_options", {})
    with torch.no_grad():
        return patcher.model.diffusion_model(**{**arguments, "transformer_options": dict(options)})


def offload(model, monkeypatch) -> None:
    """Let a Qwen-Image keep its blocks but the first on the CPU, and run them in two buffers; here all is one CPU."""
    manager = importlib.import_module("nunchaku.models.utils").CPUOffloadManager
    nothing = type("Event", (), {"record": lambda self, stream=None: None, "wait_event": lambda self, event: None})
    monkeypatch.setattr(torch.cuda, "Event", lambda *_, **__: nothing())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: nothing())
    no_move = lambda self, device, force=False: setattr(self, "memory_stream", nothing())
    monkeypatch.setattr(manager, "set_device", no_move, raising=False)
    model.set_offload(True, use_pin_memory=False, num_blocks_on_gpu=1)
