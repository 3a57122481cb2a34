"""The lazy-Linear hooks on real checkouts of ComfyUI, nunchaku and ComfyUI-nunchaku, through the built wheel.

Needs QPATCH_TEST_COMFYUI (a ComfyUI folder), QPATCH_TEST_NUNCHAKU (a folder to put on sys.path) and
QPATCH_TEST_COMFYUI_NUNCHAKU (the node pack), and an interpreter with ComfyUI's requirements. With
QPATCH_TEST_QWENIMAGELORALOADER the older pack is loaded beside it as well.
"""

import json
import os
from pathlib import Path

import pytest

STANDINS = Path(__file__).resolve().parents[1] / "standins"
NEEDED = ("QPATCH_TEST_COMFYUI", "QPATCH_TEST_NUNCHAKU", "QPATCH_TEST_COMFYUI_NUNCHAKU")
MISSING = [name for name in NEEDED if not os.environ.get(name)]

pytestmark = [
    pytest.mark.comfyui, pytest.mark.nunchaku,
    pytest.mark.skipif(bool(MISSING), reason=f"real checkouts are not named: {', '.join(MISSING)}"),
]


def child(env, script, *packs, **variables):
    """The report of ``script`` on the real checkouts."""
    comfyui, nunchaku, pack = (os.environ[name] for name in NEEDED)
    done = env.command(script, comfyui, nunchaku, *(packs or [pack]),
                       env={"PYTHONDONTWRITEBYTECODE": "1", **variables}, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


def zimage(env, *packs, **variables):
    return child(env, STANDINS / "build_zimage.py", *packs, **variables)


@pytest.fixture(scope="module")
def mended(installed_with_torch):
    return zimage(installed_with_torch)


@pytest.fixture(scope="module")
def matrix(installed_with_torch):
    return child(installed_with_torch, Path(__file__).with_name("lazy_matrix.py"))


def test_without_qpatch_building_zimage_dies_on_the_missing_weight(installed_with_torch):
    report = zimage(installed_with_torch, QPATCH="0")
    assert len(report["eager"]) == 20
    assert report["error"] == {
        "type": "AttributeError", "text": "'NoneType' object has no attribute 'dtype'", "in": "from_linear",
    }


def test_with_the_wheel_lazy_zimage_is_the_eager_one(mended):
    assert all(mended["loaded"].values())
    assert mended["error"] is None and len(mended["lazy"]) == 20
    assert mended["lazy"] == mended["eager"]
    assert set(map(tuple, mended["lazy"].values())) == {("SVDQW4A4Linear", "torch.float16", "cpu", False)}
    assert mended["declared"] == ["torch.bfloat16"]


def test_the_model_loads_its_checkpoint_and_has_it_bit_by_bit(mended):
    assert mended["unfilled"] and mended["agrees"]


def test_a_second_pass_is_refused_and_changes_nothing(mended):
    assert mended["second"]["type"] == "TypeError" and "quantized already" in mended["second"]["text"]
    assert mended["unchanged"]


def test_every_hook_says_applied(mended):
    rows = [row for name in ("lazy-linear", "zimage-fuse") for row in mended["hooks"][name]["targets"]]
    assert {row["state"] for row in rows} == {"applied"}, rows
    assert {"nunchaku.models.linear", "nunchaku.models.utils"} <= {row["module"] for row in rows}


@pytest.mark.parametrize("hook, function", [
    ("lazy-linear", "from_linear"), ("zimage-fuse", "fuse_to_svdquant_linear"),
])
def test_both_hooks_are_needed(installed_with_torch, hook, function):
    error = zimage(installed_with_torch, QPATCH_DISABLE=hook)["error"]
    assert (error["type"], error["in"]) == ("AttributeError", function)


def test_each_function_makes_of_lazy_linears_what_it_makes_of_filled_ones(matrix):
    assert len(matrix["cases"]) >= 40
    for case in matrix["cases"]:
        assert case["was lazy"] and case["untouched"], case["case"]
        assert case["lazy"] == case["filled"], case["case"]


def test_only_a_fuse_of_biased_linears_is_refused(matrix):
    refused = [case["case"] for case in matrix["cases"] if isinstance(case["filled"], str)]
    assert refused and all(case.startswith("fuse_to_svdquant_linear") and "bias=True" in case for case in refused)


def test_the_linear_that_the_hooks_try_is_made_up_as_comfyui_s(matrix):
    real, tried = matrix["attributes"]
    assert real == tried


@pytest.mark.skipif(
    not os.environ.get("QPATCH_TEST_QWENIMAGELORALOADER"), reason="QPATCH_TEST_QWENIMAGELORALOADER names no folder",
)
@pytest.mark.parametrize("older", ["first", "second"])
def test_beside_the_older_pack_the_model_is_built_and_the_report_names_it(installed_with_torch, older):
    packs = [os.environ["QPATCH_TEST_QWENIMAGELORALOADER"], os.environ["QPATCH_TEST_COMFYUI_NUNCHAKU"]]
    report = zimage(installed_with_torch, *(packs if older == "first" else reversed(packs)))
    assert all(report["loaded"].values())
    assert report["lazy"] == report["eager"] and report["agrees"]
    assert report["hooks"]["zimage-fuse"]["state"] == "applied"
    (linear,) = [row for row in report["hooks"]["lazy-linear"]["targets"] if row["module"] == "nunchaku.models.linear"]
    assert linear["state"] == "applied" and "nunchaku_patch" in linear["explanation"]
