"""What each hook has come to, worked out when asked.

An :class:`Attempt` keeps what was found when a target was met. Whether a patch is still in
effect is not kept but read from the patched objects (``Patch.lost``).
"""

import sys
from dataclasses import dataclass, field

from . import finder, targets, toggles
from .catalogue import HOOKS, Hook, Target
from .finding import INCOMPATIBLE, NOT_NEEDED

WAITING, APPLIED, DISABLED, FAILED, LOST = "waiting", "applied", "disabled", "failed", "lost"


@dataclass
class Attempt:
    """One meeting of a hook and a module of its target pattern."""

    hook: Hook
    target: Target
    module_name: str
    module: object
    outcome: str
    reason: str
    error: str | None = None
    patches: list = field(default_factory=list)

    @property
    def state(self) -> str:
        return LOST if self.outcome == APPLIED and self.losses() else self.outcome

    def losses(self) -> list[str]:
        """For each patch that is no longer in effect, who stands there now."""
        return [text for text in (patch.lost() for patch in self.patches) if text]

    @property
    def explanation(self) -> str:
        if self.outcome != APPLIED:
            return self.reason
        fronts = [text for text in (patch.in_front() for patch in self.patches) if text]
        return "; ".join(self.losses() or [self.reason, *fronts, *self.details()])

    def details(self) -> list[str]:
        """What the implementation has to say of the objects that live now, if it has a function ``details``."""
        details = getattr(sys.modules.get(self.target.implementation), "details", None)
        text = None if details is None else details()
        return [] if text is None else [text]


_attempts: dict[tuple[str, str, str], Attempt] = {}


def record(hook, target, name, module, outcome, reason, *, error=None, patches=()) -> None:
    """Keep the outcome of one meeting; a later meeting with a module of the name replaces it."""
    _attempts[hook.name, target.pattern, name] = Attempt(
        hook, target, name, module, outcome, reason, error, list(patches)
    )


def last(hook, target, name) -> Attempt | None:
    """The last meeting of ``hook`` with a module called ``name``."""
    return _attempts.get((hook.name, target.pattern, name))


def met(name: str, module) -> bool:
    """Whether this very module object has been offered to the hooks."""
    return any(a.module is module for key, a in list(_attempts.items()) if key[2] == name)


def attempts(hook: Hook) -> list[Attempt]:
    """The meetings of ``hook`` in the order they happened, then the targets that it never met."""
    return [a for key, a in list(_attempts.items()) if key[0] == hook.name] + _missed(hook) + _unwatched(hook)


def details(name: str) -> list[str]:
    """What the implementation of the hook ``name`` has to say of the objects that live now."""
    return [text for key, a in list(_attempts.items()) if key[0] == name and a.state == APPLIED for text in a.details()]


def lost() -> list[Attempt]:
    """The meetings whose patches somebody has replaced since."""
    return [attempt for attempt in list(_attempts.values()) if attempt.state == LOST]


def _missed(hook: Hook) -> list[Attempt]:
    """Targets of ``hook`` that were imported without qpatch being asked."""
    found = []
    for name, module in targets.in_sys_modules():
        if met(name, module) or targets.asleep(module) or targets.running(module):
            continue
        for wanter, target in targets.wanting(name):
            if wanter is hook and (target.exact or not targets.missing(target, module)):
                found.append(_not_met(hook, target, name, module, _why_missed(name, module)))
    return found


def _not_met(hook, target, name, module, reason) -> Attempt:
    off = toggles.why_disabled(hook)
    return Attempt(hook, target, name, module, DISABLED if off else INCOMPATIBLE, off or reason)


def _why_missed(name: str, module) -> str:
    loader = targets.loader_of(module)
    if name in finder.unwatched:
        cause = f"loaded by {loader}, and only plain source files are patched as they load"
    elif standing() is None:
        cause = f"loaded by {loader} while qpatch was not active"
    else:
        ahead = ", ".join(finders_ahead())
        cause = f"loaded by {loader} without qpatch being asked" + (f"; before it are asked: {ahead}" if ahead else "")
    return f"{cause}; qpatch.activate() mends it now, but not what others have copied out of it"


def _unwatched(hook: Hook) -> list[Attempt]:
    """Targets of ``hook`` that were found with a loader which qpatch does not touch, and are not imported."""
    found = []
    for name, loader in list(finder.unwatched.items()):
        for wanter, target in targets.wanting(name):
            # Whether a tail pattern fits is known only once the module has run.
            if wanter is hook and target.exact and name not in sys.modules:
                reason = f"found by {loader}, and only plain source files are patched as they load"
                found.append(_not_met(hook, target, name, None, reason))
    return found


def overall(hook: Hook) -> tuple[str, str]:
    """(state, explanation) of ``hook`` as a whole: the one of its attempts that most wants a look."""
    if toggles.off():
        return DISABLED, "QPATCH=0 turns everything off"
    found = attempts(hook)
    if not found:
        reason = toggles.why_disabled(hook)
        if reason is not None:
            return DISABLED, reason
        return WAITING, "not imported in this process: " + ", ".join(t.pattern for t in hook.targets)
    order = (FAILED, LOST, INCOMPATIBLE, APPLIED, NOT_NEEDED, DISABLED)
    worst = min(found, key=lambda attempt: order.index(attempt.state))
    return worst.state, worst.explanation


def standing() -> str | None:
    """The version of the qpatch whose finder stands on ``sys.meta_path``; None if none does.

    Another version than ``qpatch.__version__`` is that of a second copy, which came first and
    does the work in this process.
    """
    return next((version for version in map(finder.is_ours, sys.meta_path) if version is not None), None)


def finders_ahead() -> list[str]:
    """The finders that are asked before qpatch's: what one of them answers does not come past us."""
    ahead = []
    for other in sys.meta_path:
        if finder.is_ours(other) is not None:
            return ahead
        kind = other if isinstance(other, type) else type(other)
        ahead.append(f"{kind.__module__}.{kind.__qualname__}")
    return []


def live() -> bool:
    """Whether the import hook works in this process: proved by a fresh import, not by a flag."""
    sys.modules.pop("qpatch.smoke", None)
    import qpatch.smoke

    return qpatch.smoke.mended()


def snapshot() -> list[dict]:
    """All hooks as plain data, for ``qpatch status --json``."""
    rows = []
    for hook in HOOKS:
        if hook.internal:
            continue
        state, explanation = overall(hook)
        rows.append({
            "hook": hook.name, "state": state, "explanation": explanation, "mends": hook.mends,
            "targets": [
                {"module": a.module_name, "file": targets.contents(a.module).get("__file__"), "state": a.state,
                 "explanation": a.explanation, "error": a.error}
                for a in attempts(hook)
            ],
        })
    return rows
