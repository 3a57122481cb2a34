"""Opening files: layers, what is left out and why, families."""

import torch
from safetensors.torch import save_file

from qpatch.lora.files import open_lora
from qpatch.lora.keys import Target


def pair(stem, out=6, inp=5, rank=2, down="lora_A", up="lora_B"):
    return {f"{stem}.{down}.weight": torch.randn(rank, inp), f"{stem}.{up}.weight": torch.randn(out, rank)}


def test_plain_lora_from_a_file_gives_its_product_times_alpha_over_rank(tmp_path):
    tensors = pair("transformer.transformer_blocks.0.attn.to_q")
    tensors["transformer.transformer_blocks.0.attn.to_q.alpha"] = torch.tensor(1.0)
    save_file(tensors, tmp_path / "a.safetensors")
    file = open_lora(tmp_path / "a.safetensors")
    adapter = file.layers[Target("transformer_blocks.0.attn.to_qkv", "q")]
    (term,) = adapter.delta().terms
    down, up, _ = (tensor.double() for tensor in tensors.values())
    assert torch.allclose(term.scale * term.up.double() @ term.down.double(), 0.5 * up @ down, rtol=1e-12)
    assert (adapter.shape, adapter.rank, adapter.alpha, file.family.name) == ((6, 5), 2, 1.0, "qwen-image")
