"""``qpatch run``: a script with qpatch active, where the interpreter reads no start-up files."""

import argparse
import os
import runpy
import sys

from .errors import CliError


def configure(parser) -> None:
    parser.usage = "qpatch run SCRIPT [ARGUMENT ...]"
    parser.add_argument("script", metavar="SCRIPT", help="for example ComfyUI's main.py")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="given to the script")


def run(arguments) -> int:
    import qpatch

    if not os.path.isfile(arguments.script):
        raise CliError(f"{arguments.script}: there is no such file", code=2)
    qpatch.activate()
    sys.argv = [arguments.script, *arguments.arguments]
    # As `python SCRIPT` does: the script's folder stands where python -m put the working directory.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(arguments.script))
    try:
        runpy.run_path(arguments.script, run_name="__main__")
    except Exception:
        # The script's own error: the person expects what Python itself would show.
        sys.excepthook(*sys.exc_info())
        return 1
    return 0
