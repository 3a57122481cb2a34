"""The doctor's reading of files against real upstream code doing the same by running.

Needs QPATCH_TEST_COMFYUI (a ComfyUI folder), QPATCH_TEST_NUNCHAKU (a folder to put on sys.path) and
QPATCH_TEST_COMFYUI_NUNCHAKU (the node pack), and an interpreter with ComfyUI's requirements.
"""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from qpatch.doctor import comfyui, dynamic_vram, node_packs, packages, static_imports
from qpatch.doctor.context import Context

NEEDED = ("QPATCH_TEST_COMFYUI", "QPATCH_TEST_NUNCHAKU", "QPATCH_TEST_COMFYUI_NUNCHAKU")
pytestmark = [
    pytest.mark.comfyui, pytest.mark.nunchaku,
    pytest.mark.skipif(any(not os.environ.get(name) for name in NEEDED), reason=f"set {', '.join(NEEDED)}"),
]

#: Whether a Linear is lazy, found by making one. argv: ComfyUI's folder, "1" to pass for Windows.
LAZY = """
import sys
sys.path.insert(0, sys.argv[1])
import comfy.cli_args
comfy.cli_args.args.cpu = True
import comfy.memory_management, comfy.model_management, comfy.ops
comfy.memory_management.aimdo_enabled = True
comfy.model_management.WINDOWS = sys.argv[2] == "1"
print(comfy.ops.disable_weight_init.Linear(8, 8).weight is None)
"""

#: Which of the (module, name) pairs in argv[2] cannot be imported. argv[1]: ComfyUI's folder.
IMPORTS = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
import comfy.cli_args
comfy.cli_args.args.cpu = True
failed = []
for module, name in json.loads(sys.argv[2]):
    try:
        exec(f"from {module} import {name}" if name else f"import {module}", {})
    except ImportError:
        failed.append([module, name])
print(json.dumps(failed))
"""


@pytest.fixture
def folder():
    return Path(os.environ["QPATCH_TEST_COMFYUI"])


@pytest.fixture
def context(folder, tmp_path):
    """This interpreter, with that ComfyUI and a base folder that holds the node pack."""
    nodes = tmp_path / "base" / "custom_nodes"
    nodes.mkdir(parents=True)
    (nodes / "some folder").symlink_to(os.environ["QPATCH_TEST_COMFYUI_NUNCHAKU"])
    found = Context.here([folder, tmp_path / "base"])
    return dataclasses.replace(found, path=(Path(os.environ["QPATCH_TEST_NUNCHAKU"]), *found.path))


def child(env, code, *arguments):
    done = env.command("-c", code, *arguments, env={"PYTHONPATH": os.environ["QPATCH_TEST_NUNCHAKU"], "QPATCH": "0",
                                              "PYTHONDONTWRITEBYTECODE": "1"})
    return done.stdout.strip().rpartition("\n")[2]


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_whether_linears_are_lazy_is_read_as_it_runs(installed_with_torch, folder, platform):
    runs = child(installed_with_torch, LAZY, str(folder), "1" if platform == "win32" else "0") == "True"
    context = dataclasses.replace(Context.here([folder]), platform=platform)
    assert (dynamic_vram._by_comfyui(folder, context) is None) == runs


def test_the_version_is_the_one_that_comfyui_states(folder):
    stated = {}
    exec((folder / "comfyui_version.py").read_text(), stated)
    assert comfyui.version(folder) == stated["__version__"]


def test_the_real_node_pack_is_recognised_in_any_folder(context):
    (pack,) = node_packs.nunchaku_packs(context)
    assert not pack.disabled and packages.release(pack.version) >= (1,)


@pytest.mark.parametrize("package", ["comfy", "nunchaku"])
def test_the_imports_that_are_read_to_fail_are_those_that_fail(installed_with_torch, context, folder, package):
    (pack,) = node_packs.nunchaku_packs(context)
    home = folder / "comfy" if package == "comfy" else packages.folder("nunchaku", context)
    wanted = sorted({pair for file in pack.folder.rglob("*.py") for pair in static_imports._imports(file, package)},
                    key=str)
    assert len(wanted) > 10
    failed = json.loads(child(installed_with_torch, IMPORTS, str(folder), json.dumps(wanted)))
    read = {(lacking.module, lacking.name) for lacking in static_imports.missing(pack.folder, home)}
    # A module of the wheel that is there may still fail for want of something else (insightface, say).
    unexplained = {tuple(pair) for pair in failed} - read
    assert read <= {tuple(pair) for pair in failed}
    assert not unexplained or package == "nunchaku" and all("pulid" in module for module, _ in unexplained)


def test_status_imports_the_real_targets_and_shows_what_became_of_each_hook(installed_with_torch, folder, context):
    words = [word for base in context.comfyui for word in ("--comfyui", base)]
    done = installed_with_torch.command("-m", "qpatch", "status", "--import", "--json", *words, check=False,
                                        env={"PYTHONPATH": os.environ["QPATCH_TEST_NUNCHAKU"],
                                             "PYTHONDONTWRITEBYTECODE": "1"})
    states = {hook["hook"]: hook["state"] for hook in json.loads(done.stdout)["hooks"]}
    assert states["lazy-linear"] == "applied" and states["zimage-fuse"] == "applied"
