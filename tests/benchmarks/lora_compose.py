"""Compose, change a strength, reset: time and memory at real shapes, as multiples of the memcpy floor.

    python tests/benchmarks/lora_compose.py [--models qwen z] [--ranks 16 32 128] [--files 1 3 8] [--rounds 5]

Floor of a composition: bytes of LoRA factors read + bytes of proj_* written, over the copy bandwidth (a 256 MiB
torch copy, read + write, taken just before and after each round). Floor of a strength change: bytes of up factors
read + bytes of the appended part of proj_up written. Each line is measured in a process of its own. Its first round
also pays for memory that the system has never handed out before, and is shown apart; after it the allocator keeps what
is freed, because a page of new memory costs more than to fill it, and copies into memory that is there are what the
floor is.
"""

import argparse
import ctypes
import itertools
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from qpatch import lora

DTYPE = torch.bfloat16
BASE_RANK = 32

QWEN = {"transformer_blocks": (60, {
    "attn.to_qkv": (3072, 9216, ("attn.to_q", "attn.to_k", "attn.to_v")),
    "attn.add_qkv_proj": (3072, 9216, ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")),
    "attn.to_out.0": (3072, 3072, None), "attn.to_add_out": (3072, 3072, None),
    "img_mlp.net.0.proj": (3072, 12288, None), "img_mlp.net.2": (12288, 3072, None),
    "txt_mlp.net.0.proj": (3072, 12288, None), "txt_mlp.net.2": (12288, 3072, None),
})}
Z_IMAGE = {"layers": (30, {
    "attention.qkv": (3840, 11520, ("attention.to_q", "attention.to_k", "attention.to_v")),
    "attention.out": (3840, 3840, None),
    "feed_forward.w13": (3840, 20480, ("feed_forward.w3", "feed_forward.w1")),
    "feed_forward.w2": (10240, 3840, None),
})}
MODELS = {"qwen": QWEN, "z": Z_IMAGE}


class Quantized(nn.Module):
    """What a composer sees of an SVDQW4A4Linear. The quantized weight itself is not needed, and not allocated."""

    def __init__(self, inp, out):
        super().__init__()
        self.rank = BASE_RANK
        self.qweight = nn.Parameter(torch.empty(out, inp // 2, dtype=torch.int8, device="meta"), requires_grad=False)
        self.proj_down = nn.Parameter(torch.full((inp, BASE_RANK), 0.01, dtype=DTYPE))
        self.proj_up = nn.Parameter(torch.full((out, BASE_RANK), 0.01, dtype=DTYPE))
        self.bias = None


def build(description) -> nn.Module:
    root = nn.Module()
    for name, (count, layers) in description.items():
        blocks = nn.ModuleList()
        for _ in range(count):
            block = nn.Module()
            for path, (inp, out, _) in layers.items():
                _put(block, path, Quantized(inp, out))
            if description is Z_IMAGE:
                # What tells Z-Image from Lumina 2, whose blocks have the other names too.
                _put(block, "adaLN_modulation.0", nn.Linear(256, 15360, device="meta", dtype=DTYPE))
            blocks.append(block)
        root.add_module(name, blocks)
    return root


def _put(block, path, module):
    *inner, last = path.split(".")
    for name in inner:
        if name not in block._modules:
            block.add_module(name, nn.Module())
        block = block._modules[name]
    block.add_module(last, module)


def write_file(description, rank, seed, path):
    """A LoRA of every layer, as ai-toolkit writes it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (count, layers) in description.items():
        for index in range(count):
            for target, (inp, out, parts) in layers.items():
                for source in parts or (target,):
                    key = f"diffusion_model.{name}.{index}.{source}"
                    rows = out // len(parts or (1,))
                    tensors[f"{key}.lora_A.weight"] = _noise(rank, inp, generator)
                    tensors[f"{key}.lora_B.weight"] = _noise(rows, rank, generator)
    save_file(tensors, path)


def _noise(rows, columns, generator):
    return torch.empty(rows, columns).uniform_(-0.02, 0.02, generator=generator).to(DTYPE)


def bytes_of(description, rank, files):
    """(factors read, proj_* written, up factors read, appended proj_up written)."""
    read = written = up_read = up_written = 0
    for count, layers in description.values():
        for inp, out, parts in layers.values():
            number = len(parts or (1,))
            appended = min(rank * number * files, 1024 - BASE_RANK)
            read += 2 * count * files * rank * (number * inp + out)
            written += 2 * count * (inp + out) * (BASE_RANK + appended)
            up_read += 2 * count * files * rank * out
            up_written += 2 * count * out * appended
    return read, written, up_read, up_written


class Bandwidth:
    """Bytes a second of a large copy, read and written bytes counted; the best of a few."""

    def __init__(self):
        self.source, self.target = torch.ones(256 << 20, dtype=torch.uint8), torch.empty(256 << 20, dtype=torch.uint8)
        self.target.copy_(self.source)

    def __call__(self):
        best = min(_timed(lambda: self.target.copy_(self.source)) for _ in range(4))
        return 2 * self.source.nbytes / best


def _timed(function):
    began = time.thread_time()
    function()
    return time.thread_time() - began


class PeakMemory:
    """The most anonymous memory above the start, sampled; mapped files are not counted."""

    def __enter__(self):
        self.start = self.peak = _anonymous()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self):
        while not self.stop.wait(0.002):
            self.peak = max(self.peak, _anonymous())

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        self.extra = max(self.peak, _anonymous()) - self.start


def _anonymous():
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def one_round(model, paths, bandwidth, sizes):
    read, written, up_read, up_written = sizes
    before = bandwidth()
    composing = _timed(lambda: lora.compose(model, [(path, 0.8) for path in paths]))
    changing = _timed(lambda: lora.set_strengths(model, [0.5] * len(paths)))
    resetting = _timed(lambda: lora.reset(model))
    speed = (before + bandwidth()) / 2
    return (speed / 1e9, composing, composing / ((read + written) / speed), changing,
            changing / ((up_read + up_written) / speed), resetting)


def run(name, rank, files, rounds, bandwidth, folder):
    description = MODELS[name]
    paths = [folder / f"{name}_{rank}_{number}.safetensors" for number in range(files)]
    for number, path in enumerate(paths):
        if not path.exists():
            write_file(description, rank, number, path)
    model, sizes = build(description), bytes_of(description, rank, files)
    # In a process that has not freed such memory yet, or the allocator hands out what it kept.
    with PeakMemory() as memory:
        first = _timed(lambda: lora.compose(model, [(path, 0.8) for path in paths]))
    lora.reset(model)
    keep_freed_memory()
    one_round(model, paths, bandwidth, sizes)
    results = [one_round(model, paths, bandwidth, sizes) for _ in range(rounds)]
    speed, composing, ratio, changing, change_ratio, resetting = (statistics.median(column) for column in zip(*results))
    ratios = [row[2] for row in results]
    print(f"{name:5} rank {rank:3} x {files}: {speed:5.1f} GB/s | compose {composing * 1e3:7.0f} ms = {ratio:5.2f}x "
          f"({min(ratios):.2f} to {max(ratios):.2f}; first {first * 1e3:.0f} ms) | "
          f"strengths {changing * 1e3:6.1f} ms = {change_ratio:4.2f}x | reset {resetting * 1e3:5.1f} ms | "
          f"peak {memory.extra / sizes[1]:4.2f}x of {sizes[1] / 2**20:.0f} MiB", flush=True)


def keep_freed_memory():
    """Let glibc's malloc give nothing back to the system; other allocators stay as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(trim_threshold, -1)
        mallopt(mmap_threshold, 32 << 20)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 32, 128])
    parser.add_argument("--files", nargs="+", type=int, default=[1, 3, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the LoRA files are kept; default: a temporary one")
    options = parser.parse_args()
    combinations = list(itertools.product(options.models, options.ranks, options.files))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if len(combinations) > 1:
            for name, rank, files in combinations:
                subprocess.run([sys.executable, __file__, "--models", name, "--ranks", str(rank), "--files", str(files),
                                "--rounds", str(options.rounds), "--folder", folder], check=True)
            return
        torch.set_num_threads(1)
        run(*combinations[0], options.rounds, Bandwidth(), folder)


if __name__ == "__main__":
    sys.exit(main())
