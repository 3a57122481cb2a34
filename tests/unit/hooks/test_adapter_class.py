"""Adapters of classes that other packs derive from ComfyUI's: their tensors do not say what they do."""

import pytest
import torch

from qpatch.hooks.adapter_class import is_comfyui_s
from qpatch.hooks.lora_loader.loose import as_file
from qpatch.hooks.quant_lora.splitting import split
from qpatch.lora.families import get


def made(name, base, module, **methods):
    return type(name, (base,), {"__module__": module, **methods})


class Base:
    name = "lora"

    def __init__(self):
        self.weights = torch.ones(8, 2), torch.ones(2, 4), None, None, None, None


#: ComfyUI's class, one of a pack that computes something else, and one that only adds to it.
Stock = made("LoRAAdapter", Base, "comfy.weight_adapter.lora", calculate_weight=lambda self: None)
Merged = made("MergedAdapter", Stock, "some_pack.lora", calculate_weight=lambda self: None)
Named = made("NamedAdapter", Stock, "some_pack.lora", title=lambda self: "")


@pytest.mark.parametrize(("cls", "comfyui_s"), ((Stock, True), (Named, True), (Merged, False), (Base, True)))
def test_the_class_that_computes_decides(cls, comfyui_s):
    assert is_comfyui_s(cls()) is comfyui_s


def test_a_function_that_a_pack_puts_into_comfyui_s_own_class_changes_nothing():
    patched = made("LoRAAdapter", Base, "comfy.weight_adapter.lora", calculate_weight=is_comfyui_s)
    assert is_comfyui_s(patched())


def test_what_another_pack_computes_is_baked_by_its_own_code_with_all_before_it():
    patches = [(1.0, one, 1.0, None, None) for one in (Stock(), Merged(), Named())]
    found = split(patches, (8, 4))
    assert found.rest == patches[:2] and found.patches == patches[2:]
    assert found.reasons[0] != found.reasons[1] and "MergedAdapter of another node pack" in found.reasons[1]


def test_what_another_pack_computes_is_not_written_as_the_lora_that_it_is_not():
    key = "diffusion_model.transformer_blocks.0.attn.to_q.weight"
    assert as_file(key, Stock(), get("qwen-image")) and as_file(key, Merged(), get("qwen-image")) is None


def test_what_another_pack_computes_is_not_added_in_the_rotated_basis():
    baking = pytest.importorskip("qpatch.hooks.convrot.baking", exc_type=ImportError)
    weight = torch.zeros(8, 4)
    assert baking.rotated_term((1.0, Merged(), 1.0, None, None), weight) is None
