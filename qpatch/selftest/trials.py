"""What the selftest tries, in order. Each trial yields proofs."""

import tempfile
from pathlib import Path

from ..doctor import packages
from . import FAILED, NOT_TRIED, PROVED, Proof, children

STARTUP = """
import sys
ours = sorted(name for name in sys.modules if name.partition(".")[0] == "qpatch")
heavy = sorted({"torch", "comfy", "nunchaku"} & set(sys.modules))
live = False
if ours:
    import qpatch.states
    live = qpatch.states.live()
import json
print(json.dumps({"ours": ours, "heavy": heavy, "live": live}))
"""

#: What from_linear and the fuse must make of the stand-ins' Linears.
EXPECTED = {
    "qkv": {"in": 128, "out": 384, "dtype": "torch.bfloat16", "device": "cpu", "bias": False},
    "out": {"in": 128, "out": 128, "dtype": "torch.bfloat16", "device": "cpu", "bias": True},
    "w13": {"in": 128, "out": 512, "dtype": "torch.float16", "device": "cpu", "bias": False},
}


def all_trials(context):
    """Every proof, as it comes out; ends early where nothing further can be shown."""
    with tempfile.TemporaryDirectory(prefix="qpatch-selftest-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        active = True
        for proof in _startup(folder):
            active = active and proof.outcome == PROVED
            yield proof
        if not active:
            yield Proof("loading", NOT_TRIED, "without the import hook there is nothing to show")
        elif packages.folder("torch", context) is None:
            yield Proof("loading", NOT_TRIED, "torch is not installed for this Python, and the hooks mend its modules")
        else:
            program = children.write_standins(folder)
            yield from _loading(folder, program)
            yield _lora(folder, program.with_name("lora.py"), context)


def _startup(folder: Path):
    """An interpreter start: active, and light."""
    seen = children.run("-c", STARTUP, cwd=folder)
    if not seen["ours"]:
        yield Proof("start-up", FAILED, "a fresh interpreter does not load qpatch: see qpatch doctor")
        return
    light = len(seen["ours"]) <= 2 and not seen["heavy"]
    yield Proof("start-up", PROVED if light else FAILED,
                f"a fresh interpreter loads {', '.join(seen['ours'])}"
                + (f" and {', '.join(seen['heavy'])}" if seen["heavy"] else " and no other module of ours"))
    off = children.run("-c", STARTUP, cwd=folder, QPATCH="0")
    yield Proof("import hook", PROVED if seen["live"] else FAILED,
                "a module imported in it is patched" if seen["live"] else "a module imported in it is not patched")
    yield Proof("off switch", PROVED if not off["live"] else FAILED,
                "QPATCH=0 leaves the same module as it is" if not off["live"] else "QPATCH=0 does not turn it off")


def _loading(folder: Path, program: Path):
    """A node pack that exchanges lazy Linears, loaded as ComfyUI loads it: without qpatch, then with it."""
    error = children.run(program, cwd=folder, QPATCH="0").get("error", "no error")
    expected = "AttributeError: 'NoneType' object has no attribute 'dtype'"
    yield Proof("the fault", PROVED if error == expected else FAILED,
                f"with QPATCH=0 the stand-in for the Z-Image loader ends in {error}")
    seen = children.run(program, cwd=folder)
    if "error" in seen:
        yield Proof("lazy Linears", FAILED, f"with qpatch it ends in {seen['error']}: see qpatch status")
        return
    yield _layers("lazy-linear", seen, "qkv", "out")
    yield _layers("zimage-fuse", seen, "w13")
    yield Proof("sources", PROVED if seen["untouched"] else FAILED,
                "the Linears they were made of " + ("are as they were" if seen["untouched"] else "were changed"))


#: Relative error that two bfloat16 factors may leave: each is off by at most 2**-9, half of that in the mean.
ROUNDING = 0.005


def _lora(folder: Path, program: Path, context) -> Proof:
    """A LoRA in packed factors: what it changes, at two strengths, and that nothing of it stays."""
    if packages.folder("safetensors", context) is None:
        return Proof("LoRA", NOT_TRIED, "safetensors is not installed for this Python")
    seen = children.run(program, cwd=folder)
    worst = max(seen["errors"])
    good = worst < ROUNDING and seen["restored"]
    return Proof("LoRA", PROVED if good else FAILED,
                 f"composed into fused quantized layers, at two strengths, it is off by {worst:.2%} of its effect; "
                 + ("taken out, the old factors stand again" if seen["restored"] else "taken out, something is left"))


def _layers(hook: str, seen: dict, *names: str) -> Proof:
    wrong = [f"{name} is {seen[name]}, not {EXPECTED[name]}" for name in names if seen[name] != EXPECTED[name]]
    if wrong:
        return Proof(hook, FAILED, "; ".join(wrong))
    made = ", ".join(f"{name} {seen[name]['out']} x {seen[name]['in']} {seen[name]['dtype'].partition('.')[2]}"
                     + (" with its bias" if seen[name]["bias"] else "") for name in names)
    return Proof(hook, PROVED, f"with qpatch the same loader builds {made}")
