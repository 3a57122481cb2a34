"""A real ComfyUI in this process, NVFP4 products on a CPU, and dynamic VRAM without its driver."""

import importlib
import os
import sys
import types

import pytest
import torch


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
