"""The real ComfyUI-HSWQ-Loader-and-Tools beside the hooks: each layer is rotated once, whoever loaded it.

QPATCH_TEST_HSWQ names the pack's folder, QPATCH_TEST_COMFYUI ComfyUI's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.comfyui
HELPERS = Path(__file__).resolve().parents[2] / "unit" / "hooks" / "convrot"


@pytest.fixture(scope="module")
def moments():
    folders = [os.environ.get(name) for name in ("QPATCH_TEST_COMFYUI", "QPATCH_TEST_HSWQ")]
    if not all(folders):
        pytest.skip("QPATCH_TEST_COMFYUI or QPATCH_TEST_HSWQ is not set")
    # No empty entry: that is the working folder, where qpatch/ lies without hooks/ in it.
    path = [str(HELPERS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([sys.executable, Path(__file__).with_name("hswq_child.py"), *folders],
                          capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("JSON "))[5:])


def test_before_its_loader_has_run_and_after_each_purge_layers_are_ours(moments):
    for moment in ("at the start", "first time purged", "second time purged"):
        layer = moments[moment]["nvfp4"]
        assert layer["layout"] == "TensorCoreNVFP4LayoutConvRot64" and not layer["marks"], moment


def test_while_it_is_active_its_layers_are_its_own(moments):
    for moment in ("first time active", "second time active"):
        layer = moments[moment]["nvfp4"]
        assert layer["layout"] == "TensorCoreNVFP4Layout" and "_hswq_nvfp4_convrot" in layer["marks"], moment


def test_every_layer_is_right_at_every_moment(moments):
    bounds = {"nvfp4": 0.12, "int8": 0.02}
    for moment, layers in moments.items():
        for kind, layer in layers.items():
            assert layer["error"] < bounds[kind] and layer["error with LoRA"] < bounds[kind], (moment, kind, layer)
