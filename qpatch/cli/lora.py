"""``qpatch lora``: look at LoRA files, compare, convert and merge them. Each sub-verb is a module of its own."""

import argparse
import contextlib
import importlib
import signal
import sys

#: sub-verb -> (module, one line of help), as in ``cli.VERBS``.
VERBS = {
    "inspect": ("qpatch.cli.lora_inspect", "what is in LoRA files, what they cover, and how much each layer changes"),
    "diff": ("qpatch.cli.lora_diff", "what two LoRAs, or stacks of them, change relative to each other"),
    "convert": ("qpatch.cli.lora_convert", "write a LoRA in another format, or with a smaller rank"),
    "merge": ("qpatch.cli.lora_merge", "write a stack of LoRAs as one file"),
}

EXIT_CODES = """exit codes:
  0  done
  1  a file was refused, or holds something that composing would refuse; the output says what
  2  the command line was not understood
  3  qpatch itself failed (--debug shows where)
"""


def configure(parser) -> None:
    parser.epilog = EXIT_CODES
    verbs = parser.add_subparsers(dest="lora_verb", metavar="VERB", required=True)
    for verb, (module, summary) in VERBS.items():
        sub = verbs.add_parser(verb, help=summary, description=summary[0].upper() + summary[1:] + ".",
                               epilog=EXIT_CODES)
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS,
                         help="show the traceback of an error")
        importlib.import_module(module).configure(sub)


def run(arguments) -> int:
    from .on_demand import import_on_demand

    import_on_demand("torch")
    _end_in_order()
    from ..lora.errors import LoraError
    from .errors import CliError

    try:
        return importlib.import_module(VERBS[arguments.lora_verb][0]).run(arguments)
    except LoraError as error:
        raise CliError(one_line(error)) from error


def _end_in_order() -> None:
    """Being told to terminate unwinds as an interrupt does: an output that is half written is taken away."""
    with contextlib.suppress(ValueError):
        # ValueError: not in the main thread, where no signal arrives either.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def one_line(error) -> str:
    """The message of a refusal: file, key and what is wrong, in one line."""
    from ..lora.printable import printable

    return printable(" ".join(str(error).split()))
