"""Child interpreters for the selftest, started with the switches that this one was started with."""

import json
import os
import subprocess
import sys
from pathlib import Path

from ..doctor.context import Flags
from . import standins

TIMEOUT_SECONDS = 300


class ChildFailed(Exception):
    """A child ended otherwise than its program means to; the message has its last line of output."""


def write_standins(folder: Path) -> Path:
    """Lay the stand-ins into ``folder``; the program that plays ComfyUI."""
    for name, text in standins.FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "main.py"


def run(*arguments, cwd: Path, **variables) -> dict:
    """Run the interpreter with ``arguments`` and read the JSON of its last line of output.

    The caller's QPATCH variables are left out, so that the result is that of the plain install;
    ``variables`` are added.
    """
    environ = {key: value for key, value in os.environ.items() if key.split("_")[0] != "QPATCH"}
    command = [sys.executable, *Flags.of_this_process().switches(), *map(str, arguments)]
    done = subprocess.run(command, env={**environ, **variables}, cwd=cwd, capture_output=True, text=True,
                          encoding="utf-8", errors="replace", timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL)
    try:
        return json.loads(done.stdout.strip().rpartition("\n")[2])
    except ValueError:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").rpartition("\n")[2]
        raise ChildFailed(f"a child interpreter ended with code {done.returncode}: {last}") from None
