"""``qpatch doctor``."""


from ..doctor.verdict import SKIPPED
from .errors import existing_folders
from .text import count, print_json, row, wrap


def configure(parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--comfyui", metavar="PATH", action="append",
                        help="ComfyUI's folder (or a base folder with custom_nodes in it; may be given twice)."
                             " It is read only; nothing of it is imported or started")
    parser.add_argument("--log", metavar="FILE",
                        help="look for known failures in a log of ComfyUI instead, or in a traceback (- reads standard"
                             " input): exit code 1 if an error is in it")
    parser.epilog = """verdicts:
  ok       as it should be
  note     nothing is wrong, but good to know
  warn     may do harm
  problem  something does not work because of it: exit code 1
  skipped  what the check is about is not here

""" + parser.epilog


def run(arguments) -> int:
    from .. import __version__, doctor
    from ..doctor.context import Context
    from ..doctor.known_breaks import rows

    context = Context.here(existing_folders(arguments.comfyui))
    if arguments.log is not None:
        from . import doctor_log

        return doctor_log.run(arguments, context)
    checks = doctor.examine(context)
    worst = doctor.worst(checks.values())
    if arguments.json:
        print_json({
            "qpatch": __version__, "python": str(context.executable), "verdict": worst,
            "checks": [{"name": name, **vars(verdict)} for name, verdict in checks.items()],
            "breaks": [vars(found) for found in rows(context)],
        })
    else:
        print(f"{context.executable}\nqpatch {__version__}\n")
        _show(checks)
        _show_breaks(rows(context))
    return 1 if worst == "problem" else 0


SIZES = (9, 16)


def _show(checks) -> None:
    skipped: dict[str, list[str]] = {}
    for name, verdict in checks.items():
        if verdict.verdict == SKIPPED:
            skipped.setdefault(verdict.found, []).append(name)
        else:
            print(_shown(name, verdict))
    for why, names in skipped.items():
        print(row((SKIPPED, ""), (SIZES[0], 0), f"{', '.join(names)}: {why}"))
    print("\n" + _summary(checks.values()))


def _show_breaks(found) -> None:
    """The table of known breaks, those that are not here left to ``--json``."""
    here = [entry for entry in found if entry.state != "not needed"]
    if here:
        print("\nknown breaks between the versions that are installed:")
    for entry in here:
        print(row((entry.state,), (13,), f"{entry.what}: {entry.why}"))


def _shown(name: str, verdict) -> str:
    lines = row((verdict.verdict, name), SIZES, verdict.found)
    if verdict.todo:
        indent = " " * sum(SIZES)
        lines += "\n" + wrap(verdict.todo, first=indent + "-> ", indent=indent + "   ")
    return lines


def _summary(verdicts) -> str:
    numbers = {kind: sum(v.verdict == kind for v in verdicts) for kind in ("problem", "warn", "note")}
    said = [count(number, {"warn": "warning"}.get(kind, kind)) for kind, number in numbers.items() if number]
    return ", ".join(said) if said else "nothing wrong was found"
