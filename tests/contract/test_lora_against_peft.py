"""The LoRA reader against real PEFT: adapters made, saved and merged by PEFT itself."""

import json

import pytest
import torch
from safetensors.torch import save_file

from qpatch.lora import lowrank
from qpatch.lora.files import open_lora

peft = pytest.importorskip("peft", reason="peft is not installed")

LAYERS = ["to_q", "to_k", "to_add_out"]
RAW, SAVED = "as the model's own state dict names it", "as PEFT saves it"


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k = torch.nn.Linear(12, 16), torch.nn.Linear(12, 12)
        self.to_add_out = torch.nn.Linear(20, 8)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer_blocks = torch.nn.ModuleList([Block()])

    def forward(self, x):
        return x


TARGETS = {"to_q": "attn.to_qkv[q]", "to_k": "attn.to_qkv[k]", "to_add_out": "attn.to_add_out"}
CONFIGS = {
    "lora": (peft.LoraConfig, {"r": 4, "lora_alpha": 4}),
    "lora with biases": (peft.LoraConfig, {"r": 4, "lora_alpha": 4, "lora_bias": True}),
    "lora with patterns": (peft.LoraConfig, {"r": 4, "lora_alpha": 2, "rank_pattern": {"to_k": 3},
                                             "alpha_pattern": {"attn.to_k": 6}}),
    "rslora": (peft.LoraConfig, {"r": 4, "lora_alpha": 2, "use_rslora": True}),
    "dora": (peft.LoraConfig, {"r": 4, "lora_alpha": 4, "use_dora": True}),
    "loha": (peft.LoHaConfig, {"r": 4, "alpha": 2}),
    "lokr": (peft.LoKrConfig, {"r": 2, "alpha": 1}),
    "lokr, both factors in two": (peft.LoKrConfig, {"r": 2, "alpha": 3, "decompose_both": True}),
    "lokr, both factors whole": (peft.LoKrConfig, {"r": 8, "alpha": 4}),
    "oft": (peft.OFTConfig, {"oft_block_size": 4}),
    "oft, one block for all": (peft.OFTConfig, {"oft_block_size": 4, "block_share": True}),
    "ia3": (peft.IA3Config, {"feedforward_modules": ["to_k"]}),
}


def trained(config_class, options):
    """(PEFT model with random adapters, weights and biases before, weights and biases after merging)."""
    torch.manual_seed(0)
    model = Model().double()
    before = read(model)
    config = config_class(target_modules=LAYERS, **options)
    adapted = peft.get_peft_model(model, config).double()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            near_one = "magnitude" in name or "ia3" in name
            parameter.data = parameter.data * near_one + 0.2 * torch.randn_like(parameter)
    saved = {key: value.detach().clone() for key, value in peft.get_peft_model_state_dict(adapted).items()}
    raw = {key: value.detach().clone() for key, value in adapted.state_dict().items()
           if "base_layer" not in key and "default" in key}
    return config, saved, raw, before, read(adapted.merge_and_unload())


def read(model):
    layers = {name: getattr(model.transformer_blocks[0].attn, name) for name in LAYERS}
    return {name: (layer.weight.detach().clone(), layer.bias.detach().clone()) for name, layer in layers.items()}


def metadata(config):
    plain = {key: value for key, value in config.to_dict().items() if isinstance(value, (int, float, dict))}
    return {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in plain.items()})}


@pytest.mark.parametrize("spelling", [SAVED, RAW])
@pytest.mark.parametrize("name", CONFIGS)
def test_adapter_made_by_peft_changes_weight_and_bias_as_its_merge_does(name, spelling, tmp_path):
    config, saved, raw, before, after = trained(*CONFIGS[name])
    tensors = {key: tensor.contiguous() for key, tensor in (saved if spelling == SAVED else raw).items()}
    save_file(tensors, tmp_path / "adapter.safetensors", metadata(config))
    file = open_lora(tmp_path / "adapter.safetensors", convention="trainer", metadata_alpha=True)
    assert not file.unknown and not file.skipped
    adapters = {str(target): adapter for target, adapter in file.layers.items()}
    for layer, target in TARGETS.items():
        (weight, bias), (merged, merged_bias) = before[layer], after[layer]
        delta = adapters[f"transformer_blocks.0.{target}"].delta()
        change = lowrank.to_dense(delta.rebase(weight.float(), 1.0) if delta.rebase else delta.terms).double()
        assert torch.linalg.vector_norm(weight + change - merged) <= 1e-6 * torch.linalg.vector_norm(merged), layer
        if delta.bias is not None:
            bias = bias + delta.bias
        if delta.rebias is not None:
            bias = bias + delta.rebias(bias.float(), 1.0)
        assert torch.allclose(bias.double(), merged_bias, atol=1e-6), layer
