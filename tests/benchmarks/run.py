"""Runs the benchmarks: each is a script of this folder that measures one thing and prints what it found.

    python tests/benchmarks/run.py             all of them
    python tests/benchmarks/run.py finder      this one; what follows its name is given to it
    python tests/benchmarks/run.py --list      their names and what they measure

Adding one: a script here whose docstring says on its first line what it measures. Scripts whose name
begins with an underscore are helpers of others.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def benchmarks() -> dict[str, Path]:
    """Name -> script."""
    found = (path for path in sorted(HERE.glob("*.py")) if not path.name.startswith("_") and path.name != "run.py")
    return {path.stem: path for path in found}


def summary(script: Path) -> str:
    """The first line of the script's docstring."""
    return (ast.get_docstring(ast.parse(script.read_text("utf-8"))) or "").partition("\n")[0]


def run(name: str, arguments=()) -> int:
    """Run one benchmark in a process of its own; its exit code."""
    script = benchmarks()[name]
    print(f"\n== {name}: {summary(script)}", flush=True)
    # One thread: torch's parallel regions wait for each other on a machine that others use too.
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run([sys.executable, script, *arguments], env=env).returncode


def main(arguments) -> int:
    known = benchmarks()
    if arguments == ["--list"]:
        for name, script in known.items():
            print(f"{name:20} {summary(script)}")
        return 0
    if arguments and arguments[0] not in known:
        print(f"there is no benchmark '{arguments[0]}'; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    if arguments:
        return run(arguments[0], arguments[1:])
    return max(run(name) for name in known)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
