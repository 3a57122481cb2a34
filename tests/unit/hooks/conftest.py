"""The stand-ins of upstream, as module objects in this process that no import hook has met."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

STANDINS = Path(__file__).resolve().parents[2] / "standins"


@pytest.fixture
def standin(monkeypatch):
    """``standin(path, name, *changes)``: the stand-in file ``path`` run as the module ``name``.

    ``changes`` are (old, new) texts, to make another version of it. The module is in sys.modules
    for the time of the test, so that stand-ins loaded later can import from it.
    """

    def load(path, name, *changes):
        file = STANDINS / path
        source = file.read_text()
        for old, new in changes:
            assert old in source, f"{file} has no {old!r}"
            source = source.replace(old, new)
        module = ModuleType(name)
        module.__file__ = str(file)
        module.__package__ = name.rpartition(".")[0]
        parent = module.__package__
        while parent:
            if parent not in sys.modules:
                package = ModuleType(parent)
                package.__path__ = []
                monkeypatch.setitem(sys.modules, parent, package)
            parent = parent.rpartition(".")[0]
        monkeypatch.setitem(sys.modules, name, module)
        if module.__package__:
            monkeypatch.setattr(sys.modules[module.__package__], name.rpartition(".")[2], module, raising=False)
        exec(compile(source, str(file), "exec"), module.__dict__)
        return module

    return load


@pytest.fixture
def comfy(standin):
    """ComfyUI's side: ``comfy.linear(in, out, bias, dtype, lazy=True)`` builds a Linear as it does."""
    memory = standin("ComfyUI/comfy/memory_management.py", "comfy.memory_management")
    ops = standin("ComfyUI/comfy/ops.py", "comfy.ops")
    lumina = standin("ComfyUI/comfy/ldm/lumina/model.py", "comfy.ldm.lumina.model")

    def linear(in_features, out_features, bias=False, dtype=None, lazy=True, device=None):
        memory.aimdo_enabled = lazy
        try:
            return ops.manual_cast.Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)
        finally:
            memory.aimdo_enabled = False

    return SimpleNamespace(memory=memory, ops=ops, lumina=lumina, linear=linear)
