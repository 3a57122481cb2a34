"""Which Python this is: the first thing to know, because a machine often has several."""

from .. import places
from . import packages
from .verdict import Verdict, note, ok, warn


def interpreter(context) -> Verdict:
    """The interpreter's path, kind and switches."""
    root = places.venv_root(context.executable)
    kind = f"virtual environment {root}" if root else _kind_without_venv(context)
    switches = context.flags.switches()
    found = (f"Python {packages.python_name(context.python)} at {context.executable} ({kind})"
             + (f", started with {' '.join(switches)}" if switches else ""))
    if context.python < (3, 10):
        return warn(found + "; qpatch is made for 3.10 and later", "use the Python that ComfyUI runs on")
    return ok(found)


def _kind_without_venv(context) -> str:
    if places.underscore_pth(context.executable) is not None:
        return "embedded, as in the portable ComfyUI"
    return "no virtual environment"


def variables(context) -> dict[str, str]:
    """The QPATCH variables of the environment; those of qpatch's own tests are left out."""
    return {key: value for key, value in sorted(context.environ.items())
            if key == "QPATCH" or key.startswith("QPATCH_") and not key.startswith("QPATCH_TEST_")}


def switches(context) -> Verdict:
    """The QPATCH variables that are set, and those that mean nothing."""
    from .. import toggles

    named = [f"{key}={value}" for key, value in variables(context).items()]
    complaints = toggles.complaints()
    if complaints:
        return warn("; ".join(complaints), "correct the variable, or remove it")
    if named:
        return note("set in the environment: " + ", ".join(named))
    return ok("no QPATCH variable is set: every hook is as it comes")
