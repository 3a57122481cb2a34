"""The speed table of the README: ours, the floor and public peers, in paired rounds of one run.

    python tests/benchmarks/run.py table [--rounds 15] [--write README.md]

Each row is a median of rounds; in each round ours, the floor and the peer take turns. Ratios are medians of the
ratios within the rounds, with quartiles. CPU time of one thread; wall time for the start of Python.
The floor is the least that the task can cost: a finder that returns None, a .pth file that does nothing, the copy of
as many bytes as are read and written (lora_compose.py says which), reading a file. The other benchmarks of this
folder say more about each.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from _environments import copy_distribution, environment, ratios, wheel

BEGIN, END = "<!-- speed table -->", "<!-- end of the speed table -->"


@dataclass
class Row:
    """Times of one task in seconds, one for each round."""

    task: str
    ours: list[float]
    floor: list[float] | None = None
    floor_is: str = ""
    peer: list[float] | None = None
    peer_is: str = ""

    def cells(self) -> list[str]:
        return [self.task, f"{_time(self.ours)}", *_beside(self.ours, self.floor, self.floor_is),
                *_beside(self.ours, self.peer, self.peer_is)]


def _beside(ours, theirs, name) -> tuple[str, str]:
    if theirs is None:
        return ("", "")
    low, middle, high = statistics.quantiles(ratios(ours, theirs), n=4)
    return f"{_time(theirs)}, {name}", f"{middle:.2f} [{low:.2f} {high:.2f}]"


def _time(values) -> str:
    seconds = statistics.median(values)
    scale, unit = next((scale, unit) for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "us"), (1e9, "ns"))
                       if abs(seconds) * scale >= 1 or unit == "ns")
    return f"{seconds * scale:.3g} {unit}"


def rounds_of(count: int, clock=time.thread_time, **variants) -> dict[str, list[float]]:
    """Seconds of each variant, by round; one round before them does not count."""
    times = {name: [] for name in variants}
    for index in range(count + 1):
        for name, run in variants.items():
            began = clock()
            run()
            if index:
                times[name].append(clock() - began)
    return times


def engine(folder: Path, rounds: int):
    """Interpreter start and the finder, in environments made for it."""
    import finder
    import startup

    built = wheel(folder)
    bare, ours, theirs = (environment(folder / name, sys.executable, *wheels)
                          for name, wheels in (("bare", ()), ("ours", (built,)), ("theirs", ())))
    copy_distribution("autowrapt", theirs.site)
    copy_distribution("wrapt", ours.site)
    (bare.site / "nothing.pth").write_text("# nothing\n")
    for env in (bare, ours, theirs):
        startup.start(env)
    starts = [[startup.start(env) / 1e3 for env in (ours, bare, theirs)] for _ in range(4 * rounds)]
    yield Row("start of Python", *_columns(starts, "a .pth file that does nothing", "autowrapt, inactive"))
    selfs = [[startup.self_time(env) / 1e6 for env in (ours, theirs)] for _ in range(2 * rounds)]
    yield Row("of that, own modules", *_columns([[a, None, b] for a, b in selfs], "", "autowrapt's one"))
    told = json.loads(ours.command("-c", finder.CHILD, rounds).stdout)
    found = [[one[name] / 1e9 for name in ("qpatch", "floor", "wrapt")] for one in told]
    yield Row("finder, an import that is not ours", *_columns(found, "returns None", "wrapt"))


def _columns(rounds, floor_is, peer_is):
    ours, floor, peer = (list(column) for column in zip(*rounds))
    return ours, None if floor[0] is None else floor, floor_is, peer, peer_is


def composer(folder: Path, rounds: int):
    """A rank-16 LoRA of all layers on Qwen-Image of 60 blocks, and on Z-Image of 30 layers."""
    import lora_compose as bench

    from qpatch import lora

    bandwidth = bench.Bandwidth()
    for title, name in (("Qwen-Image", "qwen"), ("Z-Image", "z")):
        description, path = bench.MODELS[name], folder / f"{name}.safetensors"
        bench.write_file(description, 16, 0, path)
        model, sizes = bench.build(description), bench.bytes_of(description, 16, 1)
        found = [bench.one_round(model, [path], bandwidth, sizes) for _ in range(rounds + 1)][1:]
        _, composing, compose_ratio, changing, change_ratio, resetting = (list(column) for column in zip(*found))
        floors = [[seconds / ratio for seconds, ratio in zip(*pair)]
                  for pair in ((composing, compose_ratio), (changing, change_ratio))]
        yield Row(f"compose, rank 16 on {title}", composing, floors[0], "copy of the bytes")
        yield Row("another strength", changing, floors[1], "copy of the bytes")
        yield Row("reset", resetting)
        lora.reset(model)


def rotation(folder: Path, rounds: int):
    """ConvRot: rotating an activation and a weight, and a LoRA baked into a rotated weight."""
    from comfy_kitchen.tensor import QuantizedTensor
    from comfy_kitchen.tensor.int8_utils import _build_hadamard, _rotate_weight

    from qpatch.hooks.convrot import config, layouts
    from qpatch.hooks.convrot.basis import stored_values, with_stored_values
    from qpatch.hooks.convrot.rotation import rotate

    x = torch.randn(3840, 3840).bfloat16()
    times = rounds_of(rounds, ours=lambda: rotate(x, 256), floor=x.clone,
                      peer=lambda: _rotate_weight(x, _build_hadamard(256, device=x.device, dtype=x.dtype), 256))
    yield Row("rotate 3840 x 3840, bfloat16", times["ours"], times["floor"], "copy", times["peer"], "comfy-kitchen")
    up, down = torch.randn(3840, 32) * 0.05, torch.randn(32, 3840) * 0.05
    layout = layouts.rotated(config.INT8_LAYOUT, 256)
    weight = QuantizedTensor.from_float(torch.randn(3840, 3840), layout).to(torch.bfloat16)

    def ours():
        with_stored_values(weight, stored_values(weight).addmm_(up, rotate(down, 256)))

    def around():
        QuantizedTensor.from_float(weight.dequantize() + (up @ down).bfloat16(), layout)

    times = rounds_of(max(3, rounds // 3), ours=ours, peer=around)
    yield Row("bake rank 32 into INT8 ConvRot", times["ours"], None, "", times["peer"], "un-rotate, add, requantize")


def inspection(folder: Path, rounds: int):
    """A Qwen-Image LoRA of rank 16: names, shapes, and the norm of every layer."""
    from safetensors import safe_open

    from qpatch.lora.inspection import measure, survey

    path = folder / "qwen.safetensors"

    def read():
        piece = bytearray(1 << 20)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass

    def peer():
        with safe_open(path, "pt") as file:
            for key in file.keys():
                file.get_tensor(key).float().norm()

    times = rounds_of(rounds, ours=lambda: measure(survey(path)), floor=read, peer=peer)
    yield Row("inspect, with the norm of each layer", times["ours"], times["floor"], "reading the file", times["peer"],
              "safetensors, norm of each tensor")


def markdown(rows) -> str:
    head = ["task", "qpatch", "floor", "qpatch / floor", "peer", "qpatch / peer"]
    lines = [head, ["---"] * len(head), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", type=Path, help=f"put the table between '{BEGIN}' and '{END}' of this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for part in (engine, composer, rotation, inspection):
            for row in part(Path(folder), options.rounds):
                rows.append(row)
                print("  ".join(row.cells()), file=sys.stderr, flush=True)
    table = markdown(rows)
    print(table)
    if options.write:
        text = options.write.read_text("utf-8")
        before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
        options.write.write_text(f"{text[:before]}\n{table}\n{text[after:]}", "utf-8")


if __name__ == "__main__":
    main()
