"""The finder's ``find_spec`` on names that are no targets, against wrapt's ``ImportHookFinder``.

    python tests/benchmarks/finder.py [--rounds 25] [--all-pythons]

Both finders are used as importlib uses them: fetched from the object and called with three arguments.
They take turns within each round, in CPU time, and the loop without a call is taken off. The floor is a
finder that returns None; "alike" are names that end as a target does; the control compares wrapt's
finder with itself.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from _environments import conftest, copy_distribution, environment, ratios, spread, wheel

CHILD = """
import json, sys, time
from wrapt.importer import ImportHookFinder
from qpatch.finder import Finder

class Floor:
    def find_spec(self, name, path=None, target=None):
        return None

NAMES = ["os", "json.decoder", "torch", "numpy.core._multiarray_umath", "comfy.ldm.modules.attention",
         "transformers.models.llama.modeling_llama", "collections.abc", "a.b.c.d", "torch._C", "nunchaku.models"]
# No target either, but a target ends in the same word: these go one step further.
ALIKE = ["email.utils", "torch.ops", "a.linear", "x.model", "y.lora", "z.base"]
RUNS = {"wrapt": (ImportHookFinder(), NAMES), "qpatch": (Finder(), NAMES), "alike": (Finder(), ALIKE),
        "floor": (Floor(), NAMES), "again": (ImportHookFinder(), NAMES)}
REPEAT = range(3000)

def loop(finder, names):
    began = time.thread_time()
    for _ in REPEAT:
        for name in names:
            find_spec = finder.find_spec
            find_spec(name, None, None)
    return (time.thread_time() - began) / len(names)

def empty(names):
    began = time.thread_time()
    for _ in REPEAT:
        for name in names:
            pass
    return (time.thread_time() - began) / len(names)

for finder, names in RUNS.values():
    loop(finder, names)
rounds = []
for _ in range(int(sys.argv[1])):
    nothing = empty(NAMES)
    rounds.append({key: (loop(*run) - nothing) / len(REPEAT) * 1e9 for key, run in RUNS.items()})
print(json.dumps(rounds))
"""


def measure(python: str, folder: Path, built: Path, rounds: int) -> None:
    env = environment(folder, python, built)
    # Where its C extension does not fit this Python, wrapt runs without; its finder is plain Python in any case.
    copy_distribution("wrapt", env.site)
    told = json.loads(env.command("-c", CHILD, rounds).stdout)
    taken = {key: [one[key] for one in told] for key in told[0]}
    print(f"Python {env.version}:", ", ".join(f"{key} {statistics.median(taken[key]):.0f} ns"
                                               for key in ("wrapt", "qpatch", "alike", "floor")))
    print(f"  qpatch / wrapt {spread(ratios(taken['qpatch'], taken['wrapt']))};"
          f" alike / wrapt {spread(ratios(taken['alike'], taken['wrapt']))};"
          f" floor / wrapt {spread(ratios(taken['floor'], taken['wrapt']))};"
          f" control {spread(ratios(taken['again'], taken['wrapt']))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--all-pythons", action="store_true", help="each Python of this machine, not only this one")
    arguments = parser.parse_args()
    pythons = sorted(conftest.interpreters().items()) if arguments.all_pythons else [("", sys.executable)]
    with tempfile.TemporaryDirectory() as folder:
        built = wheel(Path(folder))
        for version, python in pythons:
            measure(python, Path(folder) / f"python{version}", built, arguments.rounds)


if __name__ == "__main__":
    main()
