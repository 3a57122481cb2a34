"""A real ComfyUI in this process, NVFP4 products on a CPU, dynamic VRAM without its driver, and a small model.

Run once for each ComfyUI and comfy_kitchen of interest, with QPATCH_TEST_COMFYUI naming the former's folder
and PYTHONPATH the latter's.
"""

import importlib
import os
import sys
import types

import pytest
import torch
from convrot_reference import int8_layer, nvfp4_layer

from qpatch import states


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def comfy():
    """The package ``comfy`` of the checkout that QPATCH_TEST_COMFYUI names, imported with qpatch active."""
    folder = os.environ.get("QPATCH_TEST_COMFYUI")
    if not folder:
        pytest.skip("QPATCH_TEST_COMFYUI names no ComfyUI folder")
    if "comfy" not in sys.modules:
        sys.path.insert(0, folder)
        argv, sys.argv = sys.argv, ["main.py", "--cpu"]
        try:
            importlib.import_module("comfy.options").enable_args_parsing()
            importlib.import_module("comfy.cli_args")
        finally:
            sys.argv = argv
    for name in ("ops", "model_patcher", "model_management", "lora", "weight_adapter", "quant_ops", "sd"):
        importlib.import_module(f"comfy.{name}")
    return sys.modules["comfy"]


@pytest.fixture(scope="session")
def hook_states(comfy):
    """State of each hook on comfy.ops, as ``qpatch status`` has it."""
    return {row["hook"]: row["state"] for row in states.snapshot()}


@pytest.fixture(scope="session")
def formats(comfy, hook_states):
    """What this ComfyUI can load of "nvfp4", "int8" (Linear) and "kernel" (INT8 Conv2d)."""
    found = ["nvfp4"]
    if "int8_tensorwise" in comfy.ops.QUANT_ALGOS:
        found += ["int8"] + (["kernel"] if hook_states["convrot-conv2d"] == "applied" else [])
    return found


class Block(torch.nn.Module):
    """What a mixed pack holds: one layer of each kind, run one after the other."""

    def __init__(self, ops, kinds):
        super().__init__()
        self.kinds = kinds
        for kind in kinds:
            made = ops.Conv2d(64, 64, 3, padding=1) if kind == "kernel" else ops.Linear(256, 256)
            setattr(self, kind, made)

    def forward(self, x):
        for kind in self.kinds:
            if kind == "kernel":
                x = torch.nn.functional.silu(self.kernel(x.reshape(-1, 64, 16, 16))).reshape(-1, 256)
            else:
                x = torch.nn.functional.silu(getattr(self, kind)(x))
        return x


class Pack:
    """A file of a mixed pack, the float weights it was made of, and models that load it.

    ``model()`` is what a ModelPatcher takes; ``reference(x, deltas)`` the float model with the same weights
    plus ``deltas`` (kind -> delta).
    """

    def __init__(self, comfy, formats):
        self.comfy, self.kinds = comfy, [*formats, "plain"]
        self.weights = {kind: torch.randn(64, 64, 3, 3) / 24 if kind == "kernel" else torch.randn(256, 256) / 16
                        for kind in self.kinds}
        self.entries = {}
        for kind, weight in self.weights.items():
            layer = {"nvfp4": lambda: nvfp4_layer(weight, 64), "int8": lambda: int8_layer(weight, 256),
                     "kernel": lambda: int8_layer(weight, 16), "plain": lambda: {"weight": weight}}[kind]()
            bias = torch.randn(weight.shape[0]) / 16
            self.entries.update({f"{kind}.{key}": value for key, value in {**layer, "bias": bias}.items()})

    def block(self, disabled=("nvfp4",), dtype=torch.float32):
        block = Block(self.comfy.ops.mixed_precision_ops({}, dtype, disabled=set(disabled)), self.kinds)
        block.load_state_dict(dict(self.entries))
        return block

    def model(self, **options):
        model = torch.nn.Module()
        model.diffusion_model = self.block(**options)
        return model

    def reference(self, x, deltas=None):
        block, deltas = Block(torch.nn, self.kinds), deltas or {}
        block.load_state_dict({f"{kind}.weight": self.weights[kind] + deltas.get(kind, 0) for kind in self.kinds}
                              | {f"{kind}.bias": self.entries[f"{kind}.bias"] for kind in self.kinds})
        with torch.no_grad():
            return block(x)

    def lora(self, kinds, rank=8):
        """(patches for ModelPatcher.add_patches, kind -> delta at strength 1) of a LoRA on ``kinds``."""
        patches, deltas = {}, {}
        for kind in kinds:
            shape = self.weights[kind].shape
            up = torch.randn(shape[0], rank, *([1, 1] if len(shape) == 4 else [])) / 4
            down = torch.randn(rank, *shape[1:]) / 12
            adapter = self.comfy.weight_adapter.LoRAAdapter(set(), (up, down, float(rank), None, None, None))
            patches[f"diffusion_model.{kind}.weight"] = adapter
            deltas[kind] = (up.flatten(1) @ down.flatten(1)).reshape(shape)
        return patches, deltas


@pytest.fixture
def pack(comfy, formats):
    return Pack(comfy, formats)


@pytest.fixture
def nvfp4_product(comfy, monkeypatch):
    """comfy_kitchen's NVFP4 product, in float: the CPU has none (torch refuses its swizzled scales)."""
    import comfy_kitchen

    def scaled_mm_nvfp4(a, b, tensor_scale_a, tensor_scale_b, block_scale_a, block_scale_b, bias=None,
                        out_dtype=torch.bfloat16, **options):
        left = comfy_kitchen.dequantize_nvfp4(a, tensor_scale_a, block_scale_a, torch.float32)
        right = comfy_kitchen.dequantize_nvfp4(b, tensor_scale_b, block_scale_b, torch.float32)
        product = left @ right.t()
        return (product if bias is None else product + bias).to(out_dtype)

    monkeypatch.setattr(comfy_kitchen, "scaled_mm_nvfp4", scaled_mm_nvfp4)


class Vram:
    """Stand-in for comfy_aimdo's driver: the "device" is cpu:0, its memory ordinary tensors."""

    #: Equal to no tensor's device, as a GPU would be, and still memory that torch can reach.
    device = torch.device("cpu", 0)

    def __init__(self):
        self.memory, self.faults, self.room = {}, 0, True

    def evict(self):
        """What another model's load does: everything has to be brought in anew."""
        self.memory.clear()

    def fault(self, handle):
        if not self.room:
            return None
        if handle not in self.memory:
            self.faults += 1
            self.memory[handle] = (self.faults, torch.empty(handle[2], dtype=torch.uint8))
        return self.memory[handle][0]

    def tensor(self, handle, device):
        return self.memory[handle][1]


class Vbar:
    def __init__(self, size, device_index):
        self.offset = 0

    def alloc(self, size):
        self.offset += size
        return id(self), self.offset - size, size

    def prioritize(self):
        pass

    def free_memory(self, size):
        return 0

    def loaded_size(self):
        return 0


class HostBuffer:
    def __init__(self, *sizes):
        self.size = 0


@pytest.fixture
def vram(comfy, monkeypatch):
    """ComfyUI's dynamic VRAM in use, on a machine that has none."""
    if not hasattr(comfy.model_patcher, "ModelPatcherDynamic"):
        pytest.skip("this ComfyUI has no dynamic VRAM")
    found = Vram()
    parts = {name: types.ModuleType(f"comfy_aimdo.{name}") for name in ("model_vbar", "torch", "host_buffer")}
    parts["model_vbar"].ModelVBAR = Vbar
    parts["model_vbar"].vbar_fault = found.fault
    parts["model_vbar"].vbar_signature_compare = lambda new, old: new is not None and new == old
    parts["model_vbar"].vbar_unpin = lambda handle: None
    parts["torch"].aimdo_to_tensor = found.tensor
    parts["host_buffer"].HostBuffer = HostBuffer
    package = types.ModuleType("comfy_aimdo")
    vars(package).update(parts)
    management = comfy.model_management
    for module in (comfy.ops, comfy.model_patcher, management):
        monkeypatch.setattr(module, "comfy_aimdo", package, raising=False)
    monkeypatch.setattr(management, "is_device_cpu", lambda device: device == torch.device("cpu"))
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    return found
