"""The stand-in patcher with the hook in it, and a small model of quantized layers under it."""

import pytest
import torch
from quant_lora_model import IN, Model

from qpatch.hooks.quant_lora import options, patchers
from qpatch.patching import put


@pytest.fixture
def comfy(standin, monkeypatch):
    monkeypatch.setenv(options.VARIABLE, options.SIDE)
    torch.manual_seed(0)
    module = standin("quant_lora/model_patcher.py", "comfy.model_patcher")
    put(list(patchers.patches(module)))
    return module


@pytest.fixture
def world(comfy):
    """(model, patcher without LoRA, x, its output)"""
    model, x = Model(comfy), torch.randn(7, IN)
    patcher = comfy.ModelPatcher(model)
    patcher.partially_load(patcher.load_device, 1e32)
    return model, patcher, x, model(x)
