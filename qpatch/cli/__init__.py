"""The command line: ``qpatch VERB``. Each verb is a module of its own, imported when it is asked for."""

import argparse
import importlib

from .. import __version__

#: verb -> (module, one line of help). A module has ``configure(parser)`` and ``run(arguments) -> int``.
VERBS = {
    "status": ("qpatch.cli.status", "each hook: is it applied, to what, and if not why"),
}


def run(argv) -> int:
    """Parse ``argv`` (without the program's name) and run the verb; returns its exit code."""
    parser = argparse.ArgumentParser(prog="qpatch", description="Mends quantized image models in ComfyUI.")
    parser.add_argument("--version", action="version", version=f"qpatch {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, (module, summary) in VERBS.items():
        sub = verbs.add_parser(verb, help=summary, description=summary)
        if argv and argv[0] == verb:
            importlib.import_module(module).configure(sub)
    arguments = parser.parse_args(argv)
    return importlib.import_module(VERBS[arguments.verb][0]).run(arguments)
