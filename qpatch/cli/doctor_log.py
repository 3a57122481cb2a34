"""``qpatch doctor --log``: a log of ComfyUI, or a traceback, read for known failures."""

import contextlib
import os
import sys

from ..lora.printable import printable
from .errors import CliError
from .text import count, print_json, wrap

#: Errors that are shown where no signature knows them, the last ones.
SHOWN = 3


def run(arguments, context) -> int:
    from .. import __version__
    from ..doctor.activation import activation
    from ..doctor.log_advice import advise
    from ..hooks.signatures import SIGNATURES

    reading = _read(arguments.log, SIGNATURES)
    activity = activation(context)
    advised = [(finding, advise(finding, reading, activity)) for finding in reading.findings]
    if arguments.json:
        print_json(_as_data(arguments.log, reading, advised, __version__))
    else:
        print("\n\n".join(_described(arguments.log, reading, advised)))
    return 1 if reading.findings or reading.unknown else 0


def _read(name: str, signatures):
    """The log, read a piece at a time, with a bar where that takes long."""
    from ..doctor.log_findings import read
    from ..doctor.log_stream import CHUNK, texts
    from ..lora.progress import Steps

    try:
        with contextlib.nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as stream:
            pieces = 0 if name == "-" else -(-os.fstat(stream.fileno()).st_size // CHUNK)
            with Steps(f"reading {printable(name)}", pieces) as steps:
                return read(texts(stream, steps.step), signatures)
    except OSError as error:
        raise CliError(f"--log {name}: {error.strerror or error}", code=2) from error


def _described(name: str, reading, advised) -> list[str]:
    where = "standard input" if name == "-" else name
    speaks = "qpatch speaks in it" if reading.active else "it has no line of qpatch"
    parts = [wrap(f"{where}: {count(reading.lines, 'line')}, {speaks}")]
    parts += [_finding(finding, advice) for finding, advice in advised]
    if reading.unknown:
        parts.append(_unknown(reading))
    if len(parts) == 1:
        parts.append(wrap("No known failure and no traceback is in it. If something is wrong all the same: qpatch"
                          " doctor, and docs/troubleshooting.md for faults that leave no message"))
    return parts


def _finding(finding, advice) -> str:
    times = f", {count(finding.count, 'time')}" if finding.count > 1 else ""
    doubt = "" if finding.certain else "probably, as far as a message without its traceback tells: "
    lines = [f"line {finding.line.number}{times}: {printable(finding.line.text.strip()[:200])}",
             wrap(doubt + printable(finding.happened), first="  ", indent="  "),
             wrap(advice.mended, first="  ", indent="  ")]
    if advice.todo:
        lines.append(wrap(advice.todo, first="  -> ", indent="     "))
    return "\n".join(lines)


def _unknown(reading) -> str:
    lines = [wrap(f"{count(reading.unknowns, 'error')} that qpatch knows nothing about"
                  + (f", the last {SHOWN} of them:" if reading.unknowns > SHOWN else ":"))]
    last = list(reading.unknown)[-SHOWN:]
    return "\n".join(lines + [f"  line {line.number}: {printable(line.text[:200])}" for line in last])


def _as_data(name, reading, advised, version) -> dict:
    return {
        "qpatch": version, "log": name, "lines": reading.lines, "qpatch_in_log": reading.active,
        "hooks_in_log": {hook: state for hook, (state, _) in reading.states.items()},
        "found": [
            {"name": finding.signature.name, "line": finding.line.number, "text": finding.line.text,
             "count": finding.count, "certain": finding.certain, "happened": finding.happened,
             "hooks": list(finding.signature.hooks), "mended": advice.mended, "todo": advice.todo}
            for finding, advice in advised
        ],
        "unknown_errors": reading.unknowns,
        "unknown": [{"line": line.number, "text": line.text} for line in reading.unknown],
    }
