"""``mend("patcher_calls", module)``: what the engine does with one repair and one module, taken back after the test."""

import importlib
from types import SimpleNamespace

import pytest

from qpatch import patching
from qpatch.finding import NEEDED
from qpatch.repairs import PREFIX


@pytest.fixture
def mend():
    done = []

    def run(thing, module):
        implementation = importlib.import_module(f"qpatch.hooks.compat.{thing}")
        found = implementation.examine(module)
        if found.verdict == NEEDED:
            patches = implementation.patches(module)
            for patch in patches:
                patch.by = PREFIX + thing.replace("_", "-")
            patching.put(patches)
            done.extend(patches)
        return found

    yield run
    patching.take_back(done)


@pytest.fixture
def core(standin):
    """ComfyUI's own modules, with their faults."""
    return SimpleNamespace(
        extension=standin("compat/patcher_extension.py", "comfy.patcher_extension"),
        quant_ops=standin("compat/quant_ops.py", "comfy.quant_ops"),
        lora=standin("compat/lora.py", "comfy.lora"),
        patcher=standin("compat/model_patcher.py", "comfy.model_patcher"),
        qwen=standin("compat/qwen_model.py", "comfy.ldm.qwen_image.model"),
    )
