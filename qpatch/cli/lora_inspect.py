"""``qpatch lora inspect``."""

import contextlib
import sys

from .errors import CliError, as_data
from .lora import one_line
from .text import print_json

FAMILIES = ("auto", "qwen-image", "z-image")


def configure(parser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", help="a .safetensors file")
    parser.add_argument("--model", choices=FAMILIES, default="auto",
                        help="the family that the file must be for (default: told from its keys)")
    parser.add_argument("--no-norms", dest="norms", action="store_false",
                        help="read the header only: which layers, not how much they change")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="OUT",
                        help="also draw the map of layers: OUT ends in .png, .svg, .html or .txt")
    parser.add_argument("--theme", choices=("light", "dark"), default="light",
                        help="colours of a .png or .svg (an .html follows the browser)")
    parser.add_argument("--force", action="store_true", help="let --plot replace a file that exists")
    parser.epilog = """A map has one cell for each component of each block: how much the LoRA changes an element of that
weight at strength 1 (root mean square), as 0 to 9 of the strongest cell. "." is a layer that the file
leaves as it is, "?" one whose change cannot be told without the model's own weight, "+" one of a few
that are far beyond all others.

""" + parser.epilog


def run(arguments) -> int:
    from ..lora import picture
    from ..lora.errors import LoraError

    if arguments.plot:
        if len(arguments.files) > 1:
            raise CliError("--plot draws one file at a time", code=2)
        with _plotting(arguments):
            picture.check(arguments.plot, arguments.files, arguments.force)
    found, refused = [], []
    for path in arguments.files:
        survey = _survey(path, arguments)
        if isinstance(survey, LoraError):
            refused.append({"file": path, "error": as_data(survey, one_line(survey))})
            continue
        found.append(survey)
        if arguments.plot:
            with _plotting(arguments):
                picture.draw(survey, arguments.plot, theme=arguments.theme, force=arguments.force)
        if not arguments.json:
            _show(survey, first=len(found) == 1)
    if arguments.json:
        _print_json(found, refused)
    return 1 if refused or any(survey.problems for survey in found) else 0


def _survey(path, arguments):
    """The survey of one file, or the error that refuses it, which is said; the next file is looked at."""
    from ..lora.errors import LoraError
    from ..lora.inspection import measure, survey

    try:
        found = survey(path, None if arguments.model == "auto" else arguments.model)
        with found.reader:
            return measure(found) if arguments.norms else found
    except LoraError as error:
        if arguments.debug:
            raise
        print(f"qpatch: error: {one_line(error)}", file=sys.stderr)
        return error


@contextlib.contextmanager
def _plotting(arguments):
    """What keeps the picture from being drawn, as one line."""
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise CliError(f"--plot {arguments.plot}: {error}") from error


def _print_json(found, refused) -> None:
    from .lora_json import described

    print_json([described(survey) for survey in found] + refused)


def _show(survey, first: bool) -> None:
    from .lora_text import described

    print("\n".join([*([] if first else [""]), *described(survey)]))
