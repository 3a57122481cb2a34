"""What to do about a failure of a log: is the hook that mends it active here, was it in that run, and if not why."""

from dataclasses import dataclass

from .. import catalogue, toggles
from .log_findings import Finding, Reading
from .verdict import OK


@dataclass(frozen=True)
class Advice:
    """``mended``: which hook mends it and how it stands; "" where none does. ``todo``: the one thing to do."""

    mended: str
    todo: str


def advise(finding: Finding, reading: Reading, activity) -> Advice:
    """``activity``: the doctor's verdict on the import hook of this Python."""
    signature = finding.signature
    names = [name for name in signature.hooks if name in _known()]
    if not names:
        return Advice("no hook of qpatch mends this", signature.remedy)
    said = " and ".join(names)
    state, todo = _standing(names, reading, activity)
    if signature.remedy and todo:
        todo = f"{todo}; {signature.remedy}"
    return Advice(f"{said} {'mends' if len(names) == 1 else 'mend'} this: {state}", todo or signature.remedy)


def _known() -> dict:
    return {hook.name: hook for hook in catalogue.HOOKS if not hook.internal}


def _standing(names, reading: Reading, activity) -> tuple[str, str]:
    """How the hooks stand, here and in the log, and what to do."""
    for name in names:
        state, line = reading.states.get(name, (None, ""))
        if state in ("incompatible", "failed"):
            return f"in that run it was {state} ({line.partition('qpatch: ')[2]})", \
                "update qpatch; if it is the newest, report it with this log"
    off = [(name, reason) for name in names if (reason := toggles.why_disabled(_known()[name]))]
    if off:
        name, reason = off[0]
        return f"{name} is off here: {reason}", _switch_on(name, reason)
    if activity.verdict != OK:
        return f"not active here ({activity.found})", activity.todo
    applied = [name for name in names if reading.states.get(name, ("",))[0] == "applied"]
    if applied:
        return (f"{' and '.join(applied)} was applied in that run all the same",
                "this is something new: report it with this log")
    if reading.active:
        return ("active here; qpatch was at work in that run, but the log has no line of its applying it",
                "qpatch status --import --comfyui PATH shows what the hook makes of your installation")
    return ("active here, but the log has no line of qpatch: that run was without it",
            "start ComfyUI again with this Python, and look for lines that begin with 'qpatch:'")


def _switch_on(name: str, reason: str) -> str:
    if reason.startswith("QPATCH_DISABLE"):
        return f"take {name} out of QPATCH_DISABLE, and start ComfyUI again"
    return f"set QPATCH_ENABLE={name}, and start ComfyUI again"
