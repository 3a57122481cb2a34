"""Inspect a large LoRA: time against reading its bytes, and the most memory that the process ever had.

    python tests/benchmarks/lora_inspect.py [--gigabytes 1.5] [--rank 16] [--dtype bfloat16] [--rounds 3]

A Qwen-Image LoRA of all 840 layers is written to a temporary folder; its rank makes the size. Each round is a
process of its own, as the command is. The floor is reading the file's bytes in pieces of 1 MB, in the same process,
once before and once after the measurement. "cold" takes the file out of the page cache first, where the system lets
us. The norms take multiplications that grow with the square of the rank; the floor takes none, so the ratio of a file
that is in the cache is that of arithmetic to copying. "bare" is what torch cannot do them without: to read,
convert and multiply the factors, in the same threads and products, and nothing else; the file is in the cache then.
Memory is ru_maxrss of the whole process: Python and torch are in it, and so would be mapped pages.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHILD = """
import json, os, resource, sys, threading, time
from qpatch.cli.on_demand import import_on_demand
import_on_demand("torch")
from qpatch.lora.inspection import measure, survey

def evict(path, cold):
    if cold and hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

def floor(path):
    began, cpu, piece = time.perf_counter(), time.process_time(), bytearray(1 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(piece):
            pass
    return time.perf_counter() - began, time.process_time() - cpu

def bare(path, found, dtype):
    from qpatch.lora.inspection import measuring

    memory, descriptor, start = threading.local(), os.open(path, os.O_RDONLY), found.reader._start
    (group, products), = [(group, products) for group, products in measuring._groups(found) if group]
    layers = [(start + layer.begin, layer.adapter.rank, *layer.adapter.shape) for layer in group]
    most = max(rank * (out + inp) for _, rank, out, inp in layers)

    def multiply(layer):
        if not hasattr(memory, "raw"):
            memory.raw, memory.numbers = bytearray(most * dtype.itemsize), torch.empty(most)
        begin, rank, out, inp = layer
        count = rank * (out + inp)
        os.preadv(descriptor, [memoryview(memory.raw)[:count * dtype.itemsize]], begin)
        numbers = torch.frombuffer(memory.raw, dtype=dtype, count=count)
        numbers = numbers if dtype == torch.float32 else memory.numbers[:count].copy_(numbers)
        down, up = numbers[:rank * inp].view(rank, inp), numbers[rank * inp:].view(out, rank)
        down @ down.T, up.T @ up

    began = time.perf_counter()
    with measuring.workers() as spread, products():
        list(spread(lambda run: [multiply(layer) for layer in run], [layers[i:i + 8] for i in range(0, 840, 8)]))
    return time.perf_counter() - began

def rss():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 if sys.platform == "darwin" else 1024)

path, cold = sys.argv[1], sys.argv[2] == "cold"
began = time.perf_counter()
found = survey(path)
listing, listed = time.perf_counter() - began, rss()
import torch
torch.ones(1)
with_torch = rss()
evict(path, cold)
first = floor(path)
evict(path, cold)
began, cpu = time.perf_counter(), time.process_time()
measure(found)
took, cpu = time.perf_counter() - began, time.process_time() - cpu
evict(path, cold)
second = floor(path)
peak = rss()
print(json.dumps(dict(listing=listing, listed=listed, with_torch=with_torch, took=took, cpu=cpu, peak=peak,
                      bare=bare(path, found, getattr(torch, sys.argv[3])),
                      floor=(first[0] + second[0]) / 2, floor_cpu=(first[1] + second[1]) / 2)))
"""

HIDDEN, FFN, MODULATION = 3072, 12288, 18432
SQUARE = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")
LAYERS = {**{f"attn.{name}": (HIDDEN, HIDDEN) for name in SQUARE},
          **{f"{stream}_mlp.net.0.proj": (FFN, HIDDEN) for stream in ("img", "txt")},
          **{f"{stream}_mlp.net.2": (HIDDEN, FFN) for stream in ("img", "txt")},
          **{f"{stream}_mod.1": (MODULATION, HIDDEN) for stream in ("img", "txt")}}
NUMBERS_PER_RANK = 60 * sum(out + inp for out, inp in LAYERS.values())


def write(path: str, rank: int, dtype: str) -> None:
    """Run in a process of its own: a child is born with its parent's ru_maxrss."""
    import torch
    from safetensors.torch import save_file

    tensors, dtype = {}, getattr(torch, dtype)
    for block in range(60):
        for name, (out, inp) in LAYERS.items():
            key = f"diffusion_model.transformer_blocks.{block}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, inp).mul_(0.02).to(dtype)
            tensors[f"{key}.lora_B.weight"] = torch.randn(out, rank).mul_(0.02).to(dtype)
    save_file(tensors, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--rank", type=int, help="rank of the file, instead of its size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    width = {"bfloat16": 2, "float32": 4}[options.dtype]
    rank = options.rank or max(1, round(options.gigabytes * 1e9 / NUMBERS_PER_RANK / width))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.safetensors"
        writing = multiprocessing.get_context("spawn").Process(target=write, args=(str(path), rank, options.dtype))
        writing.start()
        writing.join()
        print(f"{os.path.getsize(path) / 1e9:.2f} GB, {options.dtype}, rank {rank}, {60 * len(LAYERS)} layers,"
              f" {options.rounds} rounds")
        for kind in ("cold", "cached"):
            print(f"{kind:6}: {measured(path, kind, options.rounds, options.dtype)}", flush=True)


def measured(path: Path, kind: str, count: int, dtype: str) -> str:
    command = [sys.executable, "-c", CHILD, path, kind, dtype]
    runs = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(count))
    rounds = [json.loads(run.stdout) for run in runs]
    middle = {name: statistics.median(values[name] for values in rounds) for name in rounds[0]}
    ratios = sorted(values["took"] / values["floor"] for values in rounds)
    peak = max(values["peak"] for values in rounds)
    return (f"listing {middle['listing']:.2f} s, {middle['listed']:.0f} MB | norms {middle['took']:.2f} s, reading"
            f" alone {middle['floor']:.2f} s, ratio {statistics.median(ratios):.2f}"
            f" ({ratios[0]:.2f} to {ratios[-1]:.2f}), bare (cached) {middle['bare']:.2f} s"
            f" | CPU {middle['cpu']:.2f} and {middle['floor_cpu']:.2f} s"
            f" | peak {peak:.0f} MB, of which torch {middle['with_torch']:.0f} MB")


if __name__ == "__main__":
    main()
