"""Is qpatch active in this process, and if not, why not."""

import os

from .. import places, startup
from . import installation
from .verdict import Verdict, ok, problem, warn

BY_HAND = "start ComfyUI by: python -m qpatch run main.py"


def activation(context) -> Verdict:
    """Proof that the import hook works, or the first reason that explains why it does not."""
    from .. import __version__, states

    standing = states.standing()
    if states.live():
        if standing != __version__:
            return warn(f"the import hook is live, but that of another copy, qpatch {standing}; this one is "
                        f"{__version__}", "see the check 'copies'")
        return ok("the import hook is live in this process: a module imported just now was patched")
    for reason in (_switched_off, _error, _no_site, _outside, _no_file, _unread, _foreign):
        verdict = reason(context)
        if verdict is not None:
            return verdict
    if standing is None:
        return problem("not active: the start-up file is in place, but no finder of qpatch is on sys.meta_path",
                       "run the interpreter with -v and look for qpatch.pth; something may have removed the finder")
    return problem("not active, though the finder is in place; asked before it: "
                   + (", ".join(states.finders_ahead()) or "none"), "report it, with qpatch status --debug")


def _enable(context) -> str:
    return f"run: {context.python_command} -m qpatch enable"


def _switched_off(context):
    value = context.environ.get("QPATCH", "").strip().lower()
    if value in ("0", "off", "false", "no"):
        return warn(f"not active: QPATCH={value} in the environment turns everything off", "unset QPATCH")
    return None


def _error(context):
    import qpatch

    error = qpatch.activation_error
    if error is None:
        return None
    return problem(f"not active: start-up failed with {type(error).__name__}: {error}",
                   f"{installation.reinstall(context)}; if it stays, report it with qpatch status --debug")


def _no_site(context):
    if not context.flags.no_site:
        return None
    embedded = places.underscore_pth(context.executable)
    if embedded is not None and not embedded.imports_site:
        return problem(f"not active: {embedded.path} has no line 'import site', so this Python reads no .pth files",
                       f"add the line 'import site' to {embedded.path.name} (the portable ComfyUI ships with it), or "
                       + BY_HAND)
    return problem("not active: this Python was started with -S, which leaves out all start-up files",
                   f"start it without -S, or {BY_HAND}")


def _outside(context):
    parent = context.package.parent
    if any(places.same(parent, folder) for folder in context.site_folders):
        return None
    if _startup_files(context) or any(map(startup.editable, context.site_folders)):
        return None
    where = "on PYTHONPATH" if _on_pythonpath(parent, context) else "on sys.path"
    return problem(f"not active: qpatch lies in {parent}, which is {where} but no site-packages folder of this "
                   "interpreter, and .pth files are read in those only (a --target install, or PYTHONPATH)",
                   _enable(context))


def _no_file(context):
    if _startup_files(context):
        return None
    folders = " or ".join(map(str, context.site_folders))
    return problem(f"not active: there is no qpatch.pth in {folders}", _enable(context))


def _unread(context):
    for path in _startup_files(context):
        if startup.hidden(path.lstat()):
            return problem(f"not active: {path} carries the hidden flag, and Python skips hidden .pth files",
                           f"remove the flag (macOS: chflags nohidden; Windows: attrib -h), or {_enable(context)}")
    return None


def _foreign(context):
    for path in _startup_files(context):
        text = startup.read(path)
        if not startup.ours(text):
            return problem(f"not active: {path} does not hold the line '{startup.IMPORT_LINE}'",
                           ("remove that file, then " if text.strip() else "") + _enable(context))
    return None


def _startup_files(context):
    return startup.present(context.site_folders, context.python)


def _on_pythonpath(parent, context) -> bool:
    entries = context.environ.get("PYTHONPATH", "").split(os.pathsep)
    return any(entry and places.same(entry, parent) for entry in entries)
