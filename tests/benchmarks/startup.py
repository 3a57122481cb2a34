"""Interpreter start with qpatch installed and no target imported, against autowrapt's one inactive module.

    python tests/benchmarks/startup.py [--rounds 100] [--all-pythons]

Three environments of the same Python, one start of each per round: nothing but a .pth file that does
nothing, qpatch, autowrapt 2. "self" is what `-X importtime` gives for the modules of the package itself;
"start" is the wall time of a whole process. Ratios and differences are taken within each round. The
control compares qpatch with a second run of qpatch in the same round: what it shows beyond 1.00 is noise.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _environments import conftest, copy_distribution, environment, ratios, spread, wheel

PACKAGES = ("qpatch", "autowrapt")


def self_time(env) -> int:
    """Microseconds that `-X importtime` counts for the modules of the package that ``env`` has."""
    told = env.run("pass", flags=["-X", "importtime"]).stderr
    rows = [line.split("|") for line in told.splitlines() if line.count("|") == 2]
    return sum(int(row[0].rpartition(":")[2]) for row in rows if row[2].strip().partition(".")[0] in PACKAGES)


def start(env) -> float:
    """Milliseconds of wall time for a process that does nothing."""
    began = time.perf_counter()
    subprocess.run([env.python, "-c", "pass"], check=True, stdin=subprocess.DEVNULL)
    return (time.perf_counter() - began) * 1e3


def modules(env) -> set:
    return set(env.run("import sys; print(*sys.modules)").stdout.split())


def measure(python: str, folder: Path, built: Path, rounds: int) -> None:
    bare, ours, theirs = (environment(folder / name, python, *wheels)
                          for name, wheels in (("bare", ()), ("ours", (built,)), ("theirs", ())))
    copy_distribution("autowrapt", theirs.site)
    # Some Pythons load a codec as soon as there is any .pth file.
    (bare.site / "nothing.pth").write_text("# nothing\n")
    for env in (bare, ours, theirs):
        env.run("import qpatch.finder" if env is ours else "import autowrapt" if env is theirs else "pass")
    selfs = [[self_time(env) for env in (ours, theirs, ours)] for _ in range(rounds)]
    starts = [[start(env) for env in (bare, ours, theirs, ours)] for _ in range(rounds)]
    report(ours.version, selfs, starts, modules(ours) - modules(bare), modules(theirs) - modules(bare))


def report(version, selfs, starts, ours, theirs) -> None:
    first, other, again = zip(*selfs)
    print(f"Python {version}: modules: qpatch {sorted(ours)}, autowrapt {sorted(theirs)}")
    print(f"  self   qpatch {statistics.median(first):.0f} us, autowrapt {statistics.median(other):.0f} us;"
          f" ratio {spread(ratios(first, other))}; control {spread(ratios(first, again))}")
    bare, first, other, again = zip(*starts)
    extra, extra_other = ([with_ - without for with_, without in zip(values, bare)] for values in (first, other))
    print(f"  start  bare {statistics.median(bare):.1f} ms; qpatch adds {spread(extra)} ms,"
          f" autowrapt {spread(extra_other)} ms; control {spread(ratios(first, again))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--all-pythons", action="store_true", help="each Python of this machine, not only this one")
    arguments = parser.parse_args()
    pythons = sorted(conftest.interpreters().items()) if arguments.all_pythons else [("", sys.executable)]
    with tempfile.TemporaryDirectory() as folder:
        built = wheel(Path(folder))
        for version, python in pythons:
            measure(python, Path(folder) / f"python{version}", built, arguments.rounds)


if __name__ == "__main__":
    main()
