"""``qpatch disable``: remove the start-up files of the running interpreter."""

import sys

from .. import places, startup
from . import enable
from .errors import CliError
from .text import wrap


def configure(parser) -> None:
    parser.add_argument("--user", action="store_true", help="from the user's own site-packages")


def run(arguments) -> int:
    folder = enable.target(arguments.user)
    try:
        removed = startup.remove(folder)
    except startup.StartupError as error:
        raise CliError(str(error)) from error
    for path in removed:
        print(f"removed: {path}")
    if not removed:
        print(f"there was no start-up file of qpatch in {folder}")
    elsewhere = list(startup.present(places.site_folders(), sys.version_info[:2]))
    if elsewhere:
        print(wrap(f"still active through {', '.join(map(str, elsewhere))}"
                   + ("" if arguments.user else " (qpatch disable --user, if that is the user's)")))
        return 1
    from ..doctor.context import Context
    from ..doctor.installation import reinstall

    print(wrap("qpatch stays installed but does nothing from the next start of this interpreter on. qpatch enable, or"
               f" {reinstall(Context.here())}, brings it back; pip uninstall qpatch removes the rest."
               " To switch it off for one start only, set QPATCH=0 instead"))
    return 0
