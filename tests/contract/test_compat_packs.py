"""Other node packs beside qpatch, real ones, in several orders: nothing twice, nothing lost unsaid.

Needs what test_compat.py needs, and QPATCH_TEST_QWENIMAGELORALOADER and QPATCH_TEST_HSWQ: the folders of
ComfyUI-QwenImageLoraLoader and ComfyUI-HSWQ-Loader-and-Tools.
"""

import json
import os
from pathlib import Path

import pytest

PACKS = ("QPATCH_TEST_COMFYUI_NUNCHAKU", "QPATCH_TEST_QWENIMAGELORALOADER", "QPATCH_TEST_HSWQ")
NEEDED = ("QPATCH_TEST_COMFYUI", "QPATCH_TEST_NUNCHAKU", *PACKS)
MISSING = [name for name in NEEDED if not os.environ.get(name)]

pytestmark = [
    pytest.mark.comfyui, pytest.mark.nunchaku,
    pytest.mark.skipif(bool(MISSING), reason=f"real checkouts are not named: {', '.join(MISSING)}"),
]


ORDERS = {"pack first": (0, 1, 2), "pack last": (2, 1, 0), "pack between": (1, 0, 2)}


@pytest.fixture(scope="module", params=ORDERS.values(), ids=ORDERS)
def report(request, installed_with_torch):
    folders = [os.environ[name] for name in (*NEEDED[:2], *(PACKS[index] for index in request.param))]
    done = installed_with_torch.command(
        Path(__file__).with_name("compat_packs.py"), *folders, env={"PYTHONDONTWRITEBYTECODE": "1"}, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


def whole(report):
    """Whether this ComfyUI (0.24 and later) has all that the HSWQ pack patches."""
    return all(answer is True for answer in report["later"].values())


def test_all_packs_load_and_patch(report):
    assert len(report["loaded"]) == 3 and all(report["loaded"].values())
    if whole(report):
        assert report["later"] == {"apply_comfy_quant_int8_patches": True, "apply_comfy_quant_nvfp4_patches": True}
    else:
        assert "no attribute '_load_quantized_module'" in report["later"]["apply_comfy_quant_nvfp4_patches"]


def test_no_patch_stands_twice(report):
    assert report["depths"] and max(report["depths"].values()) == 1, report["depths"]


def test_every_state_is_told_and_none_is_a_failure(report):
    states = {name: row["state"] for name, row in report["hooks"].items()}
    assert not {"failed", "lost"} & set(states.values()), states
    assert all(row["explanation"] for row in report["hooks"].values())


def test_the_report_says_who_stands_around_a_patch_and_who_beneath_it(report):
    said = {row["module"]: row["explanation"] for name in ("lazy-linear", "comfy-compat-original-weights")
            for row in report["hooks"][name]["targets"]}
    linear = said["nunchaku.models.linear"]
    assert "put around what had replaced it" in linear and "patches.nunchaku_patch" in linear
    if whole(report):
        assert "is called through" in said["comfy.model_patcher"] and "comfy_quant_int8" in said["comfy.model_patcher"]
