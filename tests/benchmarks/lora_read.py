"""Open a LoRA, hand out its changes, truncate what has no small rank: time at real shapes beside floors and peers.

    python tests/benchmarks/lora_read.py [--rounds 3] [--full-svd]

Times are CPU seconds of this process, the best of the rounds (other work on the machine does not count).
--full-svd also takes the full SVD of a 12288 x 3072 matrix, the exact answer, which takes a minute.
"""

import argparse
import json
import struct
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from qpatch.lora import header, lowrank
from qpatch.lora.files import open_lora
from qpatch.lora.structured import Hadamard, Kronecker

ATTENTION = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")
MLP = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")


def lightning(path, rank):
    """A Qwen-Image file of 720 pairs with alpha, bfloat16."""
    tensors = {}
    for block in range(60):
        for name in (*(f"attn.{name}" for name in ATTENTION), *MLP):
            out, inp = 12288 if "net.0" in name else 3072, 12288 if "net.2" in name else 3072
            stem = f"transformer_blocks.{block}.{name}"
            tensors[f"{stem}.lora_down.weight"] = torch.randn(rank, inp).bfloat16()
            tensors[f"{stem}.lora_up.weight"] = torch.randn(out, rank).bfloat16()
            tensors[f"{stem}.alpha"] = torch.tensor(8.0)
    save_file(tensors, path)
    return path


def many_keys(path, count):
    """A file of ``count`` keys with one element each."""
    table = {}
    for index in range(count):
        name = f"transformer_blocks.{index // 2}.attn.to_q.lora_{'AB'[index % 2]}.weight"
        table[name] = {"dtype": "F16", "shape": [1, 1], "data_offsets": [2 * index, 2 * index + 2]}
    text = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(2 * count))
    return path


def best(function, rounds):
    """(CPU seconds of the fastest call, its result)."""
    fastest, result = float("inf"), None
    for _ in range(rounds):
        start = time.process_time()
        result = function()
        fastest = min(fastest, time.process_time() - start)
    return fastest, result


def show(what, seconds, remark=""):
    print(f"{what:58} {seconds * 1000:9.1f} ms   {remark}")


def reading(folder, rounds):
    path = lightning(folder / "lightning.safetensors", 16)
    loaded = load_file(path)
    floor, _ = best(lambda: [tensor.clone() for tensor in loaded.values()], rounds)
    show("rank 16, 720 layers: copy of all factors (floor)", floor)
    show("  safetensors.load_file (mapping only)", best(lambda: load_file(path), rounds)[0])
    opened, file = best(lambda: open_lora(path), rounds)
    show("  open_lora (2160 keys)", opened)
    seconds, _ = best(lambda: [adapter.delta() for adapter in open_lora(path).layers.values()], rounds)
    show("  open_lora and every delta, checked to be finite", seconds, f"{seconds / floor:.1f} x the floor")
    path = many_keys(folder / "many.safetensors", 100_000)
    text = path.read_bytes()[8:8 + struct.unpack("<Q", path.read_bytes()[:8])[0]]
    floor, _ = best(lambda: json.loads(text), rounds)
    show("100,000 keys: json.loads of the header (floor)", floor)
    seconds, _ = best(lambda: header.read(path), rounds)
    show("  header.read", seconds, f"{seconds / floor:.1f} x the floor")
    seconds, _ = best(lambda: open_lora(path), rounds)
    show("  open_lora", seconds, f"{seconds / floor:.1f} x the floor")


def truncating(rounds, full_svd):
    torch.manual_seed(0)
    dense = (torch.randn(12288, 64) @ torch.randn(64, 3072) * 0.1 + torch.randn(12288, 3072)).bfloat16()
    changes = {
        "dense 12288 x 3072 to rank 128": dense,
        "dense 3072 x 12288 to rank 128": dense.T.contiguous(),
        "full LoKr 3072 x 3072 (48 x 48, 64 x 64) to rank 128": Kronecker(torch.randn(48, 48), torch.randn(64, 64)),
        "full LoKr 3072 x 3072 (8 x 8, 384 x 384) to rank 128": Kronecker(torch.randn(8, 8), torch.randn(384, 384)),
        "LoHa 3072 x 3072 of rank 32 to rank 128": Hadamard(torch.randn(3072, 32), torch.randn(32, 3072),
                                                            torch.randn(3072, 32), torch.randn(32, 3072)),
    }
    for what, change in changes.items():
        seconds, (_, error) = best(lambda: lowrank.truncate(change, 128), rounds)
        show(what, seconds, f"error {error:.4f}")
    seconds, (u, s, v) = best(lambda: torch.svd_lowrank(dense.float(), 144, niter=2), rounds)
    left = dense.float() - (u[:, :128] * s[:128]) @ v[:, :128].T
    show("  torch.svd_lowrank of the first (peer)", seconds, f"error {lowrank.norm(left) / lowrank.norm(dense):.4f}")
    if full_svd:
        seconds, values = best(lambda: torch.linalg.svdvals(dense.float()), 1)
        error = (values[128:].square().sum() / values.square().sum()).sqrt()
        show("  torch.linalg.svdvals of the first (the best error)", seconds, f"error {error:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--full-svd", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        reading(Path(folder), options.rounds)
    truncating(options.rounds, options.full_svd)


if __name__ == "__main__":
    main()
