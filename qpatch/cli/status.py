"""``qpatch status``."""

import sys
import traceback

from .errors import existing_folders
from .text import count, print_json, row, wrap

#: States that mean that somebody should look.
BAD = ("failed", "lost", "incompatible")


def configure(parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--comfyui", metavar="PATH", action="append",
                        help="ComfyUI's folder, to look for node packs in (may be given twice)")
    parser.add_argument("--import", action="store_true", dest="import_targets",
                        help="import the targets that are here, on the CPU, and show what each hook makes of them")
    parser.epilog = """states:
  waiting       the target has not been imported in this process
  applied       patched, and the patch is in effect
  not-needed    upstream behaves by itself
  disabled      by a QPATCH variable
  incompatible  not of a shape that the hook knows: left alone
  failed        the hook had an error, and left the target as it was
  lost          was patched; something else stands there now

Exit code 0 means: the import hook is live, and no hook failed, was lost or is incompatible.

""" + parser.epilog


def run(arguments) -> int:
    report = collect(existing_folders(arguments.comfyui), arguments.import_targets)
    if arguments.json:
        print_json(report)
    else:
        _show(report)
        if arguments.debug:
            _show_errors(report)
    return 0 if report["live"] and not any(hook["state"] in BAD for hook in report["hooks"]) else 1


def collect(comfyui=(), import_targets: bool = False) -> dict:
    """The whole report as plain data."""
    import qpatch

    from .. import catalogue, states, toggles
    from ..doctor import activation, interpreter, targets
    from ..doctor.context import Context

    context = Context.here(comfyui)
    live, activity = states.live(), activation.activation(context)
    places = {hook.name: targets.find(hook, context) for hook in catalogue.HOOKS if not hook.internal}
    errors = _import(places, context) if import_targets else {}
    error = qpatch.activation_error
    return {
        "qpatch": qpatch.__version__, "python": str(context.executable), "live": live,
        "verdict": activity.verdict, "explanation": activity.found,
        "activation_error": None if error is None else f"{type(error).__name__}: {error}",
        "variables": interpreter.variables(context),
        "complaints": toggles.complaints(),
        "hooks": [_with_places(hook, places.get(hook["hook"], []), errors, live) for hook in states.snapshot()],
    }


def _import(places: dict, context) -> dict[str, str]:
    from ..doctor import comfyui, dynamic_vram
    from .importing import import_targets

    lazy = dynamic_vram.decide(context)[0] == "yes"
    return import_targets([place for found in places.values() for place in found], comfyui.program(context), lazy)


def _with_places(hook: dict, places, errors: dict, live: bool) -> dict:
    """A row of the snapshot, with what is on disk, and an explanation that knows of it."""
    from .. import states

    found = [place for place in places if place.file is not None]
    failed = [f"{place.package} could not be imported: {errors[str(place.file)]}"
              for place in found if str(place.file) in errors]
    if hook["targets"]:
        said = _of_met(hook, found[0].package if found else "")
        # Where several modules are patched, the row names none of them, but what lives now is the hook's.
        now = [text for text in states.details(hook["hook"]) if text not in said]
        hook["explanation"] = "; ".join([said, *now, *failed])
    if hook["state"] == "waiting":
        said = failed or [place.sentence(live) for place in found or places]
        hook["explanation"] = "; ".join(dict.fromkeys(said))
    hook["installed"] = [{"module": place.pattern, "package": place.package, "file": str(place.file)}
                         for place in found]
    return hook


def _of_met(hook: dict, package: str) -> str:
    """The explanation of a hook that has met its target, with the version of what it met."""
    applied = sum(target["state"] == "applied" for target in hook["targets"])
    if hook["state"] != "applied":
        return f"{package}: {hook['explanation']}" if package else hook["explanation"]
    where = "mended" + (f" in {package}" if package else "")
    return f"{where}, {applied} modules" if applied > 1 else f"{where}; before: {hook['explanation']}"


def _show(report: dict) -> None:
    print(f"{report['python']}\nqpatch {report['qpatch']}")
    print(wrap("import hook: " + ("live" if report["verdict"] == "ok" else report["explanation"])))
    for name, value in report["variables"].items():
        print(f"{name}={value}")
    for complaint in report["complaints"]:
        print(wrap("? " + complaint, indent="  "))
    print()
    _show_hooks(report["hooks"])
    print("\n" + _summary(report["hooks"]))
    if not report["live"]:
        print("qpatch doctor says what to do")


#: Width of the column of states.
STATE = 14


def _show_hooks(hooks) -> None:
    """A row for each hook whose target is here, then the others by the reason why nothing happens."""
    absent: dict[str, list[str]] = {}
    for hook in hooks:
        if hook["state"] == "waiting" and not hook["installed"]:
            absent.setdefault(hook["explanation"], []).append(hook["hook"])
        else:
            _show_hook(hook)
    for reason, names in absent.items():
        print(row(("waiting",), (STATE,), f"{', '.join(names)}: {reason}"))


def _show_hook(hook: dict) -> None:
    print(row((hook["state"],), (STATE,), f"{hook['hook']}: {hook['explanation']}"))
    met = [target for target in hook["targets"] if target["file"]]
    differ = len({target["state"] for target in met}) > 1
    for target in met:
        print(f"{' ' * STATE}{target['file']}" + (f" ({target['state']})" if differ else ""))
    for place in hook["installed"] if not met else ():
        print(f"{' ' * STATE}{place['file']}")


def _summary(hooks) -> str:
    numbers = {}
    for hook in hooks:
        numbers[hook["state"]] = numbers.get(hook["state"], 0) + 1
    return wrap(f"{count(len(hooks), 'hook')}: " + ", ".join(f"{number} {state}" for state, number in numbers.items()))


def _show_errors(report: dict) -> None:
    """Tracebacks of start-up and of the hooks, on standard error."""
    import qpatch

    if qpatch.activation_error is not None:
        traceback.print_exception(qpatch.activation_error)
    for hook in report["hooks"]:
        for target in hook["targets"]:
            if target["error"]:
                print(f"\n{hook['hook']} on {target['module']}:\n{target['error']}", file=sys.stderr)
