"""``qpatch enable``: write the start-up files for the running interpreter."""

import sys
import sysconfig
from pathlib import Path

from .. import places, startup
from .errors import CliError
from .text import wrap


def configure(parser) -> None:
    parser.add_argument("--user", action="store_true",
                        help="into the user's own site-packages (python -s does not read it)")


def run(arguments) -> int:
    folder = target(arguments.user)
    package_parent = _package_parent()
    line = None if found_without_help(folder, package_parent) else package_parent
    try:
        done = startup.write(folder, line)
    except startup.StartupError as error:
        raise CliError(str(error)) from error
    for path, what in done:
        print(f"{'wrote' if what == 'written' else 'was there already'}: {path}")
    if line is not None:
        print(f"qpatch.pth also puts {line} on sys.path, where qpatch lies")
    embedded = places.underscore_pth(Path(sys.executable))
    if embedded is not None and not embedded.imports_site:
        print(wrap(f"but this Python reads no .pth files: add the line 'import site' to {embedded.path}"))
        return 1
    print(wrap("qpatch is active from the next start of this interpreter on. To switch it off for one start: QPATCH=0."
               " To remove the files: qpatch disable"))
    return 0


def target(user: bool) -> Path:
    """The folder that the start-up files go to: where qpatch lies if ``site`` reads it, else purelib."""
    if user:
        folder = places.user_site()
        if folder is None or not any(places.same(folder, known) for known in places.site_folders()):
            raise CliError("this interpreter does not use a user site-packages (a virtual environment, or python -s):"
                           " run it without --user")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    parent = _package_parent()
    known = places.site_folders()
    if any(places.same(parent, folder) for folder in known):
        return parent
    usual = Path(sysconfig.get_path("purelib"))
    # Under -S purelib is that of the interpreter, not of its virtual environment.
    return usual if any(places.same(usual, folder) for folder in known) else known[0]


def found_without_help(folder: Path, package_parent: Path) -> bool:
    """Whether a start-up file in ``folder`` can import qpatch without a path line."""
    return places.same(folder, package_parent) or startup.editable(folder)


def _package_parent() -> Path:
    import qpatch

    return Path(qpatch.__file__).resolve().parent.parent
