"""Stand-ins of comfy.ops, fresh for each test, and the product that a CPU lacks."""

import importlib.util
from pathlib import Path

import pytest
import torch

kitchen = pytest.importorskip("comfy_kitchen")
from comfy_kitchen.tensor import get_layout_class

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def has_int8():
    try:
        get_layout_class("TensorWiseINT8Layout")
    except KeyError:
        pytest.skip("this comfy_kitchen has no INT8 layout")


@pytest.fixture
def nvfp4_product(monkeypatch):
    """comfy_kitchen's NVFP4 product, in float: torch has none on a CPU."""
    def scaled_mm_nvfp4(a, b, tensor_scale_a, tensor_scale_b, block_scale_a, block_scale_b, bias=None,
                        out_dtype=torch.bfloat16, **options):
        left = kitchen.dequantize_nvfp4(a, tensor_scale_a, block_scale_a, torch.float32)
        right = kitchen.dequantize_nvfp4(b, tensor_scale_b, block_scale_b, torch.float32)
        product = left @ right.t()
        return (product if bias is None else product + bias).to(out_dtype)

    monkeypatch.setattr(kitchen, "scaled_mm_nvfp4", scaled_mm_nvfp4)


def standin(name):
    """A fresh copy of the stand-in module ``name``."""
    spec = importlib.util.spec_from_file_location(f"convrot_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def comfy_ops():
    """A stand-in of comfy.ops, without any patch."""
    return standin("standin_ops")


@pytest.fixture
def old_comfy_ops():
    """A stand-in of comfy.ops before 0.24, without any patch."""
    return standin("standin_old_ops")
