"""Tiny models with every kind of module, LoRAs for them, and what of a model counts as its state."""

from __future__ import annotations

import producers
import torch
import trees

from qpatch import lora

#: Layers of one of each kind: SVDQ fused and whole, AWQ, Linear.
FEW = ("attn.to_q", "attn.to_out.0", "img_mod.1", "img_in")
NORM = "diffusion_model.transformer_blocks.0.attn.norm_q"
DIMS = {**trees.QWEN_DIMS, "h": 128, "m": 768, "n": 256}


def model(**how):
    torch.manual_seed(0)
    return trees.qwen(h=128, f=128, **how)


def file(seed=0, kind="lora", producer="simpletuner lycoris", layers=FEW, rank=2, **how) -> dict[str, torch.Tensor]:
    """Tensors of a LoRA for a few layers, one norm among them."""
    made = producers.make(producer, "qwen-image", kind, rank=rank, dims=DIMS, seed=seed, **how).tensors
    flat = [name.replace(".", "_") for name in layers]
    chosen = {key: value for key, value in made.items() if any(name in key.replace(".", "_") for name in flat)}
    generator = torch.Generator().manual_seed(seed)
    return {**chosen, f"{NORM}.w_norm": torch.randn(16, generator=generator) * 0.1}


def tensors(root) -> dict[str, torch.Tensor]:
    return dict([*root.named_parameters(), *root.named_buffers()])


class State:
    """What a model computes with, and how to tell whether it is in that state again."""

    def __init__(self, root):
        self.bits = {name: (value, value.detach().clone()) for name, value in tensors(root).items()}
        self.strengths = [entry.strength for entry in lora.composed(root)]

    def is_of(self, root) -> bool:
        """Whether ``root`` has the same values, and says that the same LoRAs are in it."""
        now = tensors(root)
        return (now.keys() == self.bits.keys() and all(_equal(now[name], copy) for name, (_, copy) in self.bits.items())
                and [entry.strength for entry in lora.composed(root)] == self.strengths)

    def check_same_objects(self, root) -> None:
        """For a bare model: the very objects of then, and nothing of ours beside them."""
        assert self.is_of(root)
        assert all(value is self.bits[name][0] for name, value in tensors(root).items())
        for module in root.modules():
            assert not [name for name in (*module.__dict__, *module._modules) if "qpatch" in name]
            assert not module._forward_hooks


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(
        one.detach().reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
