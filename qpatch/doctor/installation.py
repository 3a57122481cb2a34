"""Is qpatch installed once, whole, and where the running interpreter takes it from."""

import csv
import json
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from .. import places, startup
from . import packages
from .verdict import Verdict, note, ok, problem, warn


def reinstall(context, switches: str = "") -> str:
    """The command that installs qpatch again, from where it came from.

    Never by name: on PyPI another project is called qpatch.
    """
    installed = packages.distribution("qpatch", context)
    url = _direct_url(installed).get("url", "") if installed else ""
    source = url2pathname(urlparse(url).path) if url.startswith("file:") else url or "PATH_TO_QPATCH"
    option = " -e" if _is_editable(_direct_url(installed) if installed else {}) else ""
    return f'{context.python_command}{switches} -m pip install --force-reinstall --no-deps{option} "{source}"'


def copies(context) -> Verdict:
    """More than one qpatch on the import path: the first one wins, whatever its version."""
    folders = [context.package, *(folder / "qpatch" for folder in context.search_path)]
    found = [folder for folder in places.unique(folders) if (folder / "__init__.py").is_file()]
    if len(found) <= 1:
        return ok(f"one copy of qpatch: {context.package}")
    listed = ", ".join(f"{folder} ({_version(folder)})" for folder in found)
    return warn(f"{len(found)} copies of qpatch: {listed}; in use: {context.package}",
                "uninstall all but the one in ComfyUI's own environment")


def _version(package: Path) -> str:
    return packages.assigned(packages.text(package / "__init__.py"), "__version__") or "version unknown"


def origin(context) -> Verdict:
    """Whether the imported package is the installed one, and whole."""
    if not context.package.is_dir():
        return note(f"qpatch runs from inside an archive, {context.package}: no files to compare with pip's record")
    installed = packages.distribution("qpatch", context)
    if installed is None:
        return note(f"qpatch {_version(context.package)} runs from {context.package}, not installed by pip")
    expected = _editable_source(installed) or Path(installed.locate_file("qpatch"))
    if not places.same(expected, context.package):
        return problem(f"imported from {context.package}, but pip installed qpatch {installed.version} in {expected}: "
                       "the other folder comes first on sys.path (PYTHONPATH?)",
                       "take that folder off PYTHONPATH, or uninstall the copy in it")
    if installed.version != _version(context.package):
        return problem(f"the files are of {_version(context.package)}, pip's record is of {installed.version}: "
                       "an update was interrupted", reinstall(context))
    missing = _missing_files(installed)
    if missing:
        return problem(f"{len(missing)} of the installed files are gone, among them {missing[0]}", reinstall(context))
    return ok(f"qpatch {installed.version}, all files that pip recorded are there")


def _editable_source(installed) -> Path | None:
    """The package's folder of an editable install."""
    record = _direct_url(installed)
    if not _is_editable(record):
        return None
    return Path(url2pathname(urlparse(record["url"]).path)) / "qpatch"


def _direct_url(installed) -> dict:
    """What pip recorded of an install from a path or an address (PEP 610); {} of one from an index."""
    try:
        return json.loads(installed.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}


def _is_editable(record: dict) -> bool:
    return bool(record.get("dir_info", {}).get("editable"))


def _missing_files(installed) -> list[str]:
    # Not installed.files, which leaves out what is gone. `qpatch disable` removes the start-up files
    # on purpose; the activation check speaks of them.
    recorded = [row[0] for row in csv.reader((installed.read_text("RECORD") or "").splitlines()) if row]
    return [name for name in recorded
            if name.endswith(".py") and not Path(installed.locate_file(name)).is_file()]


def leftovers(context) -> Verdict:
    """Start-up files whose package is gone, and package folders that are empty."""
    found = []
    for folder in places.unique([*context.site_folders, *context.path]):
        package = folder / "qpatch"
        if package.is_dir() and not (package / "__init__.py").is_file():
            found.append(f"{package} (a folder without __init__.py)")
        found += [str(path) for name in startup.NAMES if _orphan(path := folder / name, context)]
    if not found:
        return ok("no start-up file or empty folder of an earlier install is left")
    return problem("left over from an earlier install: " + ", ".join(found) + "; Python may print an error at every "
                   "start because of it", "delete what is named here; to have qpatch again: " + reinstall(context))


def _orphan(path: Path, context) -> bool:
    text = startup.read(path)
    if text is None or not startup.ours(text):
        return False
    lines = startup.read(path.with_name("qpatch.pth")) or ""
    homes = [path.parent, *startup.path_lines(lines)]
    if any((home / "qpatch" / "__init__.py").is_file() for home in homes):
        return False
    return not startup.editable(path.parent)


def user_site(context) -> Verdict:
    """An install for the user only is not seen by ``python -s``, which the portable ComfyUI uses."""
    if context.user_site is None or not places.same(context.package.parent, context.user_site):
        return ok("qpatch is not in the user's own site-packages, so python -s sees it")
    return warn(f"qpatch is installed for the user, in {context.user_site}; Python leaves that folder out when started "
                "with -s (the portable ComfyUI is) and in a virtual environment",
                "install it for this interpreter: " + reinstall(context, " -s"))
