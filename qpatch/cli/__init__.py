"""The command line: ``qpatch VERB``. Each verb is a module of its own, imported when it is asked for."""

import argparse
import importlib
import os
import sys
import traceback

from .. import __version__
from .errors import CliError

#: verb -> (module, one line of help). A module has ``configure(parser)`` and ``run(arguments) -> int``.
VERBS = {
    "status": ("qpatch.cli.status", "each hook: is it applied, to what, and if not why"),
    "doctor": ("qpatch.cli.doctor", "look for what keeps qpatch or nunchaku from working here"),
    "selftest": ("qpatch.cli.selftest", "prove the installed copy, without GPU or ComfyUI"),
    "enable": ("qpatch.cli.enable", "write the start-up files for this interpreter"),
    "disable": ("qpatch.cli.disable", "remove the start-up files of this interpreter"),
    "lora": ("qpatch.cli.lora", "look at LoRA files, compare, convert and merge them"),
    "run": ("qpatch.cli.run", "run a script with qpatch active, where start-up files are not read"),
}

EXIT_CODES = """exit codes:
  0  all is well, or the thing asked for was done
  1  something is wrong, or the thing asked for could not be done; the output says what
  2  the command line was not understood
  3  qpatch itself failed (--debug shows where)
"""


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, and paragraphs kept in the help's end."""

    def __init__(self, **options):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists what there is)\n")


def parser(argv) -> Parser:
    """The parser, with the options of the verb in ``argv`` (importing all verbs would be slow)."""
    top = Parser(prog="qpatch", description="Mends quantized image models in ComfyUI as they are imported.",
                 epilog=EXIT_CODES)
    top.add_argument("--version", action="version", version=f"qpatch {__version__}")
    _debug(top, default=False)
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    asked = next((word for word in argv if not word.startswith("-")), None)
    for verb, (module, summary) in VERBS.items():
        sub = verbs.add_parser(verb, help=summary, description=summary[0].upper() + summary[1:] + ".",
                               epilog=EXIT_CODES)
        _debug(sub, default=argparse.SUPPRESS)
        if verb == asked:
            importlib.import_module(module).configure(sub)
    return top


def _debug(to, default) -> None:
    to.add_argument("--debug", action="store_true", default=default, help="show tracebacks of qpatch's own errors")


def main(argv) -> int:
    """Parse ``argv`` (without the program's name) and run the verb; returns its exit code."""
    _never_fail_to_print()
    arguments = parser(argv).parse_args(argv)
    try:
        code = importlib.import_module(VERBS[arguments.verb][0]).run(arguments)
        if not getattr(sys.stdout, "closed", True):
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; what Python flushes at exit must not complain of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except CliError as error:
        return _say(error, str(error), error.code, arguments)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return _say(error, f"qpatch failed: {text}", 3, arguments)


def _say(error, text: str, code: int, arguments) -> int:
    """One line on standard error, and with ``--json`` the same as data, so that the output is JSON whatever happens."""
    if arguments.debug:
        traceback.print_exception(type(error), error, error.__traceback__)
    from ..lora.printable import printable

    print(f"qpatch: error: {printable(text)}", file=sys.stderr)
    if getattr(arguments, "json", False):
        from .errors import as_data
        from .text import print_json

        print_json({"error": as_data(error, text), "exit_code": code})
    return code


def _never_fail_to_print() -> None:
    """A path that the console's encoding lacks is shown with escapes; it does not end the program."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
