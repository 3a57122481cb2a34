"""The LoRA reader against real LyCORIS: adapters made by it, compared with its training forward."""

import pytest
import torch

from qpatch.lora import lowrank
from qpatch.lora.files import open_lora

lycoris = pytest.importorskip("lycoris", reason="lycoris-lora is not installed")

TARGETS = {"to_q": "attn.to_qkv[q]", "to_k": "attn.to_qkv[k]", "to_add_out": "attn.to_add_out"}
ALGORITHMS = {
    "lora": {"algo": "lora"},
    "dora": {"algo": "lora", "dora_wd": True},
    "dora on columns": {"algo": "lora", "dora_wd": True, "wd_on_output": False},
    "rslora": {"algo": "lora", "rs_lora": True},
    "loha": {"algo": "loha"},
    "lokr": {"algo": "lokr"},
    "lokr, both factors in two": {"algo": "lokr", "decompose_both": True, "linear_dim": 1},
    "lokr, factor 2": {"algo": "lokr", "factor": 2},
    "lokr, both factors whole": {"algo": "lokr", "full_matrix": True},
    "lokr with dora": {"algo": "lokr", "dora_wd": True},
    "glora": {"algo": "glora"},
    "oft": {"algo": "diag-oft"},
    "oft, rescaled": {"algo": "diag-oft", "rescaled": True},
    "oft, bounded": {"algo": "diag-oft", "constraint": 0.01},
    "boft": {"algo": "boft"},
    "boft, rescaled": {"algo": "boft", "rescaled": True},
    "boft, bounded": {"algo": "boft", "constraint": 0.01},
    "ia3": {"algo": "ia3"},
    "full": {"algo": "full"},
}


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k = torch.nn.Linear(12, 16), torch.nn.Linear(16, 16)
        self.to_add_out = torch.nn.Linear(20, 8)


def model():
    torch.manual_seed(0)
    block = torch.nn.Module()
    block.attn = Attention()
    outer = torch.nn.Module()
    outer.transformer_blocks = torch.nn.ModuleList([block])
    return outer


def acting(layer):
    """(weight, bias) that the layer's forward acts with, whatever is in it."""
    bias = layer(torch.zeros(1, layer.in_features))
    return (layer(torch.eye(layer.in_features)) - bias).T, bias[0]


@pytest.mark.parametrize("name", ALGORITHMS)
@torch.no_grad()
def test_adapter_made_by_lycoris_changes_the_layer_as_in_training(name):
    outer = model()
    layers = {layer: getattr(outer.transformer_blocks[0].attn, layer) for layer in TARGETS}
    before = {layer: acting(module) for layer, module in layers.items()}
    options = {"linear_dim": 2, "linear_alpha": 1.0, **ALGORITHMS[name]}
    network = lycoris.create_lycoris(outer, 1.0, preset="full", **options)
    network.apply_to()
    for parameter in network.parameters():
        if parameter.is_floating_point():
            parameter.add_(0.2 * torch.randn_like(parameter))
    tensors = {key: value.detach().clone() for key, value in network.state_dict().items() if not key.endswith("scalar")}
    file = open_lora(tensors, convention="trainer")
    assert not file.unknown and not file.skipped
    adapters = {str(target): adapter for target, adapter in file.layers.items()}
    for layer, target in TARGETS.items():
        (weight, bias), (changed, changed_bias) = before[layer], acting(layers[layer])
        delta = adapters[f"transformer_blocks.0.{target}"].delta()
        if delta.rebase is not None:
            change = lowrank.to_dense(delta.rebase(layers[layer].weight, 1.0))
        else:
            change = lowrank.to_dense(delta.terms if delta.dense is None else delta.dense)
        assert torch.linalg.vector_norm(weight + change - changed) <= 3e-6 * torch.linalg.vector_norm(changed), layer
        assert torch.allclose(bias + (0 if delta.bias is None else delta.bias), changed_bias, atol=1e-5), layer
