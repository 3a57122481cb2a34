"""Thousands of switches between five stacks on one model: memory must not grow, and the base must be back at the end.

    OMP_NUM_THREADS=1 python tests/faults/long_run.py [--switches 10000]

Prints the memory in use, by tracemalloc (Python's objects) and RSS (the whole process), at the end of each tenth; the
exit code is 1 if that of the last third is above that of the first by more than the noise of one measurement.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tracemalloc
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:] = [str(HERE.parent), str(HERE.parent / "unit" / "lora"),
                   *(path for path in sys.path if path != str(HERE))]

from faults import stacks
from qpatch import lora

#: What may come on top: of Python's objects, and of the process (an allocator keeps what it has freed in arenas).
PYTHON, PROCESS = 64 * 1024, 8 * 2**20
KINDS = ("lora", "lokr", "loha", "dora", "diff", "diff_b", "lokr_full", "glora", "ia3_rows", "oft")


def five_stacks() -> list[list[tuple[lora.LoraFile, float]]]:
    """One to three files each, of every kind of adapter."""
    layers = (*stacks.FEW, "txt_mlp.net.2", "proj_out")
    files = [lora.open_lora(stacks.file(seed, kind, layers=layers)) for seed, kind in enumerate(KINDS)]
    cuts = [files[:1], files[1:4], files[4:6], files[6:8], files[8:]]
    return [[(file, 0.3 * (place + 1)) for place, file in enumerate(stack)] for stack in cuts]


def switch(root, stack, chance: random.Random) -> None:
    """One of the ways in which a stack comes after another."""
    what = chance.random()
    if what < 0.15:
        lora.reset(root)
    elif what < 0.3:
        lora.set_aside(root)
    lora.compose(root, stack, 16, log=False)
    if what > 0.8:
        try:
            lora.set_strengths(root, [chance.uniform(-2, 2) for _ in stack])
        except lora.PlanError:
            # Some of these kinds are worked out for one strength.
            lora.compose(root, [(file, chance.uniform(-2, 2)) for file, _ in stack], 16, log=False)


def run(switches: int, tell=lambda *_: None) -> tuple[list[int], list[int]]:
    """(Python's objects, RSS) in bytes, measured fifty times or so with the same stack in the model.

    Raises AssertionError if the model is not its base at the end, bit for bit and object for object.
    """
    root, chance = stacks.model(), random.Random(0)
    bare, all_stacks = stacks.State(root), five_stacks()
    python, process = [], []
    every = max(switches // 50, 1)
    tracemalloc.start()
    try:
        for number in range(switches):
            switch(root, all_stacks[chance.randrange(5)], chance)
            if number % every == every - 1:
                lora.reset(root)
                gc.collect()
                python.append(tracemalloc.get_traced_memory()[0])
                process.append(_resident())
                tell(number + 1, python[-1], process[-1])
    finally:
        tracemalloc.stop()
    lora.reset(root)
    bare.check_same_objects(root)
    return python, process


def growth(measured: list[int]) -> float:
    """Median of the last third less that of the first; what is made once at the beginning is not in it."""
    measured = measured[len(measured) // 10:]
    third = len(measured) // 3
    return statistics.median(measured[-third:]) - statistics.median(measured[:third])


def _resident() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    import resource

    return pages * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switches", type=int, default=10_000)
    switches = parser.parse_args().switches

    def tell(done, python, process):
        if done % max(switches // 10, 1) == 0:
            print(f"{done} switches: {python / 2**20:.2f} MiB of Python objects, {process / 2**20:.1f} MiB RSS",
                  flush=True)

    python, process = run(switches, tell)
    grown = growth(python), growth(process)
    print(f"growth from the first third to the last: {grown[0] / 1024:.1f} KiB of Python objects, "
          f"{grown[1] / 2**20:.2f} MiB RSS")
    print("the model is its base, bit for bit")
    return int(grown[0] > PYTHON or grown[1] > PROCESS)


if __name__ == "__main__":
    sys.exit(main())
