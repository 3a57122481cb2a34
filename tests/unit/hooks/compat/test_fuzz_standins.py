"""Each repair on its stand-in, changed at random: it mends, or says why not, and what it leaves alone is untouched."""

import os
import random
import sys
from pathlib import Path
from types import FunctionType

import pytest

from qpatch import engine, states, toggles
from qpatch.catalogue import named
from qpatch.finder import matches
from qpatch.repairs import PREFIX

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import shapes

#: repair -> its stand-in and the name that it is imported under.
STANDINS = {
    "config-copy": ("compat/supported_models_base.py", "comfy.supported_models_base"),
    "control-lora": ("compat/controlnet.py", "comfy.controlnet"),
    "disabled-list": ("compat/mixed_ops.py", "comfy.ops"),
    "flux-wrapper": ("compat/flux_wrapper.py", "pack.wrappers.flux"),
    "lora-key-map": ("compat/lora.py", "comfy.lora"),
    "lora-shape": ("compat/lora.py", "comfy.lora"),
    "original-weights": ("compat/model_patcher.py", "comfy.model_patcher"),
    "patcher-calls": ("compat/zimage_patcher.py", "pack.model_patcher.zimage"),
    "quant-keys": ("compat/model_patcher.py", "comfy.model_patcher"),
    "quant-parameter": ("compat/model_patcher.py", "comfy.model_patcher"),
    "qwen-calls": ("compat/pack_qwenimage.py", "pack.models.qwenimage"),
    "qwen-moves": ("compat/common_patcher.py", "pack.model_patcher.common"),
    "rotary": ("compat/qwen_model.py", "comfy.ldm.qwen_image.model"),
    "zimage-attention": ("compat/zimage_attention.py", "pack.models.zimage"),
    "zimage-batch": ("compat/rope_hook.py", "pack.models.zimage"),
}
ROUNDS = int(os.environ.get("QPATCH_TEST_ROUNDS", "12"))


def places(module):
    """Every (owner, name) of a function in ``module`` or in one of its own classes."""
    classes = [value for value in vars(module).values()
               if isinstance(value, type) and value.__module__ == module.__name__]
    return [(owner, name) for owner in (module, *classes) for name, value in vars(owner).items()
            if isinstance(value, (FunctionType, staticmethod, classmethod))]


def change(module, generator):
    """One change of the kind that a new release brings."""
    found = places(module)
    if not found:
        return
    owner, name = generator.choice(found)
    kind = generator.choice(("gone", "renamed", "another", "another", "slots"))
    if kind == "slots" and isinstance(owner, type):
        body = {key: value for key, value in vars(owner).items() if key not in ("__dict__", "__weakref__")}
        setattr(module, owner.__name__, type(owner.__name__, owner.__bases__, {**body, "__slots__": ()}))
        return
    if kind == "renamed":
        setattr(owner, name + "_v2", vars(owner)[name])
    if kind in ("gone", "renamed"):
        delattr(owner, name)
    else:
        setattr(owner, name, shapes.attribute(generator))


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    monkeypatch.setattr(states, "_attempts", {})
    monkeypatch.setattr(toggles, "why_disabled", lambda hook: None)
    monkeypatch.setattr(toggles, "strict", lambda: False)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("thing", STANDINS)
def test_a_changed_stand_in_is_mended_or_left_alone_and_the_state_says_which(core, standin, thing, seed):
    generator = random.Random(f"{thing} {seed}")
    module = standin(*STANDINS[thing])
    for _ in range(generator.randint(1, 3)):
        change(module, generator)
    hook = named(PREFIX + thing)
    target = next(t for t in hook.targets if matches(module.__name__, (t.pattern,)))
    before = shapes.contents(module)
    engine._offer(hook, target, module.__name__, module)
    attempt = states.last(hook, target, module.__name__)
    if attempt is not None:
        assert attempt.state in ("applied", "not-needed", "incompatible"), attempt.error
        assert attempt.state != "applied" or (attempt.patches and not attempt.losses())
        for patch in reversed(attempt.patches):
            patch.revert()
    assert shapes.contents(module) == before
