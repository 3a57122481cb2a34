"""``qpatch run``: a script with qpatch active, where the interpreter reads no start-up files."""

import argparse
import builtins
import os
import pkgutil
import sys
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from importlib.util import module_from_spec
from types import ModuleType

from .errors import CliError


def configure(parser) -> None:
    parser.usage = "qpatch run SCRIPT [ARGUMENT ...]"
    parser.add_argument("script", metavar="SCRIPT", help="for example ComfyUI's main.py")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="given to the script")


def run(arguments) -> int:
    import qpatch

    main = _main(arguments.script)
    qpatch.activate()
    sys.argv = [arguments.script, *arguments.arguments]
    # It stays there: what outlives the script (threads, atexit, pickles of its classes) looks for it.
    sys.modules["__main__"] = main
    main.__builtins__ = builtins
    try:
        main.__loader__.exec_module(main)
    except Exception as error:
        # The script's own error: the person expects what Python itself would show.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is not vars(main):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _main(script: str) -> ModuleType:
    """The module ``__main__`` of a file, or of a folder or archive with ``__main__.py``; ``sys.path`` made for it."""
    if not os.path.exists(script):
        raise CliError(f"{script}: there is no such file", code=2)
    path = os.path.abspath(script)
    importer = pkgutil.get_importer(path)
    safe = getattr(sys.flags, "safe_path", False)
    if importer is None:
        # As `python SCRIPT` does: the script's folder stands where python -m put the working directory.
        if not safe:
            sys.path[0] = os.path.dirname(os.path.realpath(path) if os.name == "posix" else path)
        return _of_file(path)
    spec = importer.find_spec("__main__")
    if spec is None:
        raise CliError(f"{script}: there is no __main__.py in it", code=2)
    sys.path[:0 if safe else 1] = [path]
    return module_from_spec(spec)


def _of_file(path: str) -> ModuleType:
    main = ModuleType("__main__")
    loader = SourcelessFileLoader if path.endswith(".pyc") else _Script
    main.__file__, main.__cached__, main.__loader__ = path, None, loader("__main__", path)
    return main


class _Script(SourceFileLoader):
    """Compiles the script anew, as Python does: nothing is read from ``__pycache__`` or left there."""

    def get_code(self, fullname):
        return self.source_to_code(self.get_data(self.path), self.path)
