"""What happens when a target has been imported: each hook that wants it gets its turn.

Imported when the first target is met, never at start-up. All errors of hooks end here: they
become the state ``failed`` with a traceback, and the import goes on (``QPATCH_STRICT=1`` lets
them through).
"""

import importlib
import sys
import traceback

from . import finding, log, patching, states, toggles
from .catalogue import HOOKS, wanting
from .finder import matches

_complained = False


def loaded(name: str, module) -> None:
    """Offer ``module``, whose body has just run, to the hooks that want a module of this name."""
    _complain_once()
    for hook, target in wanting(name):
        try:
            _attempt(hook, target, name, module)
        except Exception:
            if toggles.strict():
                raise
            text = traceback.format_exc()
            states.record(hook, target, name, module, states.FAILED, _last_line(text), error=text)
            log.warning(f"{hook.name} failed on {name} and left it as it was: {_last_line(text)}"
                        " (traceback: qpatch status, or QPATCH_LOG=debug)")
            log.debug(text)


def _attempt(hook, target, name, module) -> None:
    missing = [wanted for wanted in target.defines if wanted not in vars(module)]
    if missing and not target.exact:
        return
    reason = toggles.why_disabled(hook)
    if reason is not None:
        states.record(hook, target, name, module, states.DISABLED, reason)
        return
    if missing:
        found = finding.incompatible(f"{name} does not define {', '.join(missing)}")
    else:
        implementation = importlib.import_module(target.implementation)
        found = implementation.examine(module)
    if found.verdict != finding.NEEDED:
        states.record(hook, target, name, module, found.verdict, found.reason)
        say = log.warning if found.verdict == finding.INCOMPATIBLE else log.debug
        say(f"{hook.name} {found.verdict} for {name}: {found.reason}")
        return
    patches = list(implementation.patches(module))
    for patch in patches:
        patch.by = hook.name
    patching.put(patches)
    states.record(hook, target, name, module, states.APPLIED, found.reason, patches=patches)
    (log.debug if hook.internal else log.info)(f"{hook.name} applied to {name}")


def unwatched(name: str, loader) -> None:
    """Note that a target was found by a loader that qpatch does not touch."""
    if loader is None:
        return
    for hook, target in wanting(name):
        if target.exact:
            kind = loader.__name__ if isinstance(loader, type) else type(loader).__name__
            states.record(hook, target, name, None, states.INCOMPATIBLE,
                          f"loaded by {kind}, and only plain source files are patched")


def catch_up() -> None:
    """Offer every target that is in ``sys.modules`` already and that no hook has met."""
    for name, module in list(sys.modules.items()):
        if module is None or not any(matches(name, (t.pattern,)) for h in HOOKS for t in h.targets):
            continue
        # A module whose body is still running is offered when it is done, or next time.
        spec = getattr(module, "__dict__", {}).get("__spec__")
        if getattr(spec, "_initializing", False) or states.met(name, module):
            continue
        loaded(name, module)


def _complain_once() -> None:
    global _complained
    if not _complained:
        _complained = True
        for text in toggles.complaints():
            log.warning(text)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
