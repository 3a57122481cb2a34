"""Very many generated LoRA files, one after the other.

    OMP_NUM_THREADS=1 python tests/fuzz/nightly.py --inputs 100000 --seed 0 [--jobs 2] [--out fuzz-failures]

Files come in batches of 1,000; batch B of seed S is always the same, whatever runs beside it (``--first B
--inputs 1000`` runs it alone). A failure is said once for each place it comes from, and its file is kept in --out. The
exit code is 1 if there was one. The work is done by child processes: one that crashes is such a failure.
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "unit" / "lora")]
# The script's own folder would hide packages that are named like its modules.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]

BATCH = 1000


def batch(harness, number: int, seed: int, count: int, failed) -> None:
    """Try ``count`` files; ``failed(case, error)`` is told of each that breaks the property."""
    import hypothesis

    from fuzz.cases import cases

    @hypothesis.seed(seed * 1_000_003 + number)
    @hypothesis.settings(max_examples=count, deadline=None, database=None, phases=[hypothesis.Phase.generate],
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=cases())
    def run(case):
        try:
            harness.check(case)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failed(case, error)

    run()


def place(error: BaseException) -> str:
    """Where an error comes from, for telling one kind of failure from another."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "fuzz" not in Path(frame.filename).parts]
    last = (ours or frames)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno} {last.name}"


def worker(arguments) -> int:
    """Run batches, saying at the end of each what was seen in it."""
    from fuzz.harness import Harness

    places, out = set(), Path(arguments.out)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        harness = Harness(Path(folder))

        def failed(case, error):
            where = place(error)
            if where in places:
                return
            places.add(where)
            out.mkdir(parents=True, exist_ok=True)
            kept = out / f"{number}-{len(places)}.safetensors"
            kept.write_bytes(case.content)
            text = "".join(traceback.format_exception(error))
            said = f"{where}\nbatch {number} of seed {arguments.seed}\n{case!r:.2000}\n\n{text}"
            kept.with_suffix(".txt").write_text(said, "utf-8", "backslashreplace")
            print(f"FAILED {where}: {kept}: {str(error)[:200]!r}", flush=True)

        for number in arguments.batches:
            harness.seen.clear()
            batch(harness, number, arguments.seed, min(BATCH, arguments.inputs - (number - arguments.first) * BATCH),
                  failed)
            print(f"DONE {number} " + " ".join(f"{kind}={count}" for kind, count in sorted(harness.seen.items())),
                  flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first batch")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", default="fuzz-failures", help="folder for the files that failed")
    parser.add_argument("--batches", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return worker(arguments) if arguments.batches is not None else supervise(arguments)


def supervise(arguments) -> int:
    numbers = list(range(arguments.first, arguments.first + -(-arguments.inputs // BATCH)))
    print(f"{arguments.inputs} files, seed {arguments.seed}, batches {numbers[0]} to {numbers[-1]}, "
          f"{arguments.jobs} at a time",
          flush=True)
    began, tried, failures, seen = time.monotonic(), 0, 0, collections.Counter()
    with tempfile.TemporaryDirectory() as work:
        running = [_start(arguments, numbers[job::arguments.jobs], work) for job in range(arguments.jobs)]
        for job in running:
            for line in job.stdout:
                if line.startswith("DONE"):
                    counts = dict(pair.split("=") for pair in line.split()[2:])
                    seen.update({kind: int(count) for kind, count in counts.items()})
                    tried = min(tried + BATCH, arguments.inputs)
                    seconds = time.monotonic() - began
                    print(f"{tried} of {arguments.inputs} files, {tried / seconds:.0f} a second, {failures} failures",
                          flush=True)
                else:
                    failures += line.startswith("FAILED")
                    print(line, end="", flush=True)
            if job.wait():
                failures += 1
                print(f"CRASHED with exit code {job.returncode}: {_rescue(work, arguments.out)}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in seen.most_common()))
    print(f"{tried} files tried in {time.monotonic() - began:.0f} s, {failures} failures")
    return 1 if failures or tried < arguments.inputs else 0


def _start(arguments, numbers, work) -> subprocess.Popen:
    command = [sys.executable, __file__, "--seed", str(arguments.seed), "--first", str(arguments.first),
               "--out", arguments.out, "--inputs", str(arguments.inputs),
               "--work", work, "--batches", *map(str, numbers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"OMP_NUM_THREADS": "1", **os.environ})


def _rescue(work, out) -> str:
    """Keep the files that were being tried when a process ended."""
    Path(out).mkdir(parents=True, exist_ok=True)
    kept = []
    for number, path in enumerate(Path(work).rglob("*.safetensors")):
        kept.append(shutil.copy(path, Path(out) / f"crash-{number}-{os.getpid()}.safetensors"))
    return ", ".join(map(str, kept)) or "no file was left"


if __name__ == "__main__":
    sys.exit(main())
