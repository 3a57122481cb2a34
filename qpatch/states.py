"""What each hook has come to, worked out when asked.

An :class:`Attempt` keeps what was found when a target was met. Whether a patch is still in
effect is not kept but read from the patched objects (``Patch.lost``).
"""

import sys
from dataclasses import dataclass, field

from .catalogue import HOOKS, Hook, Target
from .finding import INCOMPATIBLE, NOT_NEEDED
from . import toggles

WAITING, APPLIED, DISABLED, FAILED, LOST = "waiting", "applied", "disabled", "failed", "lost"
ALL = (WAITING, APPLIED, NOT_NEEDED, DISABLED, INCOMPATIBLE, FAILED, LOST)


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
        losses = self.losses() if self.outcome == APPLIED else []
        return "; ".join(losses) if losses else self.reason


_attempts: dict[tuple[str, str, str], Attempt] = {}


def record(hook, target, name, module, outcome, reason, *, error=None, patches=()) -> None:
    """Keep the outcome of one meeting; a later meeting with a module of the name replaces it."""
    attempt = Attempt(hook, target, name, module, outcome, reason, error, list(patches))
    _attempts[hook.name, target.pattern, name] = attempt


def met(name: str, module) -> bool:
    """Whether this very module object has been offered to the hooks."""
    return any(a.module is module for key, a in list(_attempts.items()) if key[2] == name)


def attempts(hook: Hook) -> list[Attempt]:
    """The meetings of ``hook``, in the order they happened."""
    return [a for key, a in list(_attempts.items()) if key[0] == hook.name]


def overall(hook: Hook) -> tuple[str, str]:
    """(state, explanation) of ``hook`` as a whole: the one of its attempts that most wants a look."""
    found = attempts(hook)
    if not found:
        reason = toggles.why_disabled(hook)
        if toggles.off():
            return DISABLED, "QPATCH=0 turns everything off"
        if reason is not None:
            return DISABLED, reason
        return WAITING, "not imported in this process: " + ", ".join(t.pattern for t in hook.targets)
    order = (FAILED, LOST, INCOMPATIBLE, APPLIED, NOT_NEEDED, DISABLED)
    worst = min(found, key=lambda attempt: order.index(attempt.state))
    return worst.state, worst.explanation


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
                {"module": a.module_name, "file": getattr(a.module, "__file__", None), "state": a.state,
                 "explanation": a.explanation, "error": a.error}
                for a in attempts(hook)
            ],
        })
    return rows
