"""The installed wheel on a stand-in of ComfyUI: a ConvRot layer is right because comfy.ops was imported, no more."""

import json
import shutil
from pathlib import Path

import pytest

HELPERS = Path(__file__).resolve().parents[1] / "unit" / "hooks" / "convrot"

CODE = """
import json, sys
sys.path[:0] = [{folder!r}, {helpers!r}]
import torch
import comfy.ops
from convrot_reference import error, load, nvfp4_layer
from qpatch import states

torch.manual_seed(0)
weight, x = torch.randn(96, 256), torch.randn(20, 256)
layer = comfy.ops.mixed_precision_ops(compute_dtype=torch.float32, disabled={{"nvfp4"}}).Linear(256, 96, bias=False)
load(layer, nvfp4_layer(weight, 64))
print(json.dumps({{"error": error(layer(x), x @ weight.t()),
                   "states": {{row["hook"]: row["state"] for row in states.snapshot()}}}}))
"""


@pytest.fixture
def comfyui(tmp_path):
    """A folder with a package ``comfy`` whose ``ops`` keeps ComfyUI's contracts and faults."""
    pytest.importorskip("comfy_kitchen")
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy" / "__init__.py").touch()
    shutil.copy(HELPERS / "standin_ops.py", tmp_path / "comfy" / "ops.py")
    return tmp_path


def run(env, comfyui, **environment):
    done = env.run(CODE.format(folder=str(comfyui), helpers=str(HELPERS)), env={"QPATCH_LOG": "quiet", **environment})
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_comfy_ops_is_all_it_takes(installed_with_torch, comfyui):
    found = run(installed_with_torch, comfyui)
    assert found["error"] < 0.12
    assert found["states"]["convrot"] == "applied" and found["states"]["convrot-bake"] == "disabled"


def test_each_hook_has_its_toggle(installed_with_torch, comfyui):
    found = run(installed_with_torch, comfyui, QPATCH_DISABLE="convrot,convrot-conv2d")
    assert found["error"] > 1
    assert found["states"]["convrot"] == found["states"]["convrot-conv2d"] == "disabled"


def test_with_everything_off_comfyui_is_as_it_was(installed_with_torch, comfyui):
    found = run(installed_with_torch, comfyui, QPATCH="0")
    assert found["error"] > 1
