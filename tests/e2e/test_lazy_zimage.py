"""The built wheel in a fresh environment: Z-Image is built while ComfyUI's Linears are lazy.

A child process starts the stand-in ComfyUI, loads the node packs as ComfyUI does, and builds the
model with and without dynamic VRAM; ``standins/build_zimage.py`` says what it reports.
"""

import json
import shutil
from pathlib import Path

import pytest

STANDINS = Path(__file__).resolve().parents[1] / "standins"
PACK = "ComfyUI-nunchaku"
#: 1 block and 2 + 2 refiners, with qkv, out, w13 and w2 each.
QUANTIZED_LAYERS = 20


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """``stage()``: a copy of the stand-ins, so that nothing is written into the checkout."""
    def copy():
        folder = tmp_path_factory.mktemp("stage") / "standins"
        shutil.copytree(STANDINS, folder, ignore=shutil.ignore_patterns("__pycache__"))
        return folder

    return copy


@pytest.fixture(scope="module")
def shared(stage):
    return stage()


def build(env, stage, *packs, **variables):
    """What the child program found; ``packs`` are folders below custom_nodes, in loading order."""
    folders = [stage / "custom_nodes" / pack for pack in packs or (PACK,)]
    done = env.command(stage / "build_zimage.py", stage / "ComfyUI", stage / "packages", *folders, env=variables)
    return json.loads(done.stdout.splitlines()[-1])


def targets(report, hook):
    """{module name: state} of one hook; a pack's module is named by its part behind the folder."""
    rows = report["hooks"][hook]["targets"]
    return {row["module"].rpartition("/")[2]: row["state"] for row in rows}


@pytest.fixture(scope="module")
def mended(installed_with_torch, shared):
    return build(installed_with_torch, shared)


def test_without_qpatch_building_dies_on_the_missing_weight(installed_with_torch, shared):
    report = build(installed_with_torch, shared, QPATCH="0")
    assert len(report["eager"]) == QUANTIZED_LAYERS
    assert report["error"] == {
        "type": "AttributeError", "text": "'NoneType' object has no attribute 'dtype'", "in": "from_linear",
    }


def test_with_the_wheel_the_lazy_model_is_the_eager_one(mended):
    assert mended["error"] is None
    assert len(mended["lazy"]) == QUANTIZED_LAYERS and mended["lazy"] == mended["eager"]
    assert set(map(tuple, mended["lazy"].values())) == {("SVDQW4A4Linear", "torch.float16", "cpu", False)}


def test_without_torch_dtype_the_declared_one_is_taken(mended):
    assert mended["declared"] == ["torch.bfloat16"]


def test_the_linears_that_stay_are_lazy_until_the_checkpoint_fills_them(mended):
    assert {"cap_embedder.1", "x_embedder", "layers.0.adaLN_modulation.0"} <= set(mended["unfilled"])
    assert mended["agrees"]


def test_a_second_pass_over_the_model_is_refused_and_changes_nothing(mended):
    assert mended["second"]["type"] == "TypeError" and "quantized already" in mended["second"]["text"]
    assert mended["unchanged"]


def test_only_the_targets_are_patched_and_each_is_reported(mended):
    assert targets(mended, "zimage-fuse") == {"ComfyUI-nunchaku.models.zimage": "applied"}
    assert targets(mended, "lazy-linear") == {
        "nunchaku.models.linear": "applied",
        "nunchaku.models.utils": "applied",
        "nunchaku.models.text_encoders.linear": "applied",
        "nunchaku.models.transformers.transformer_zimage": "applied",
    }


@pytest.mark.parametrize("packs", [("Importer", PACK), (PACK, "Importer")])
def test_packs_that_import_nunchaku_before_or_after_change_nothing(installed_with_torch, shared, packs):
    report = build(installed_with_torch, shared, *packs)
    assert report["loaded"] == {"Importer": True, PACK: True}
    assert report["lazy"] == report["eager"] and report["agrees"]


@pytest.mark.parametrize("packs", [("OlderFix", PACK), (PACK, "OlderFix")])
def test_beside_the_older_fix_the_model_is_built_and_the_report_names_it(installed_with_torch, shared, packs):
    report = build(installed_with_torch, shared, *packs)
    assert report["lazy"] == report["eager"]
    row = report["hooks"]["lazy-linear"]
    (linear,) = [target for target in row["targets"] if target["module"] == "nunchaku.models.linear"]
    assert row["state"] == linear["state"] == "applied"
    assert "put around what had replaced it: SVDQW4A4Linear.from_linear is now" in linear["explanation"]
    assert "OlderFix" in linear["explanation"]
    assert report["hooks"]["zimage-fuse"]["state"] == "applied"


@pytest.mark.parametrize("packs", [("OlderFix", PACK), (PACK, "OlderFix")])
def test_without_a_second_look_at_packs_a_replaced_patch_is_lost_and_says_to_whom(installed_with_torch, shared, packs):
    report = build(installed_with_torch, shared, *packs, QPATCH_DISABLE="comfy-compat-other-packs")
    row = report["hooks"]["lazy-linear"]
    assert row["state"] == "lost" and "SVDQW4A4Linear.from_linear is now" in row["explanation"]
    assert "OlderFix" in row["explanation"]


@pytest.mark.parametrize("folder", ["nunchaku v1.2.1", "a b.c@nightly"])
def test_the_pack_is_known_under_any_folder_name(installed_with_torch, stage, folder):
    own = stage()
    (own / "custom_nodes" / PACK).rename(own / "custom_nodes" / folder)
    report = build(installed_with_torch, own, folder)
    assert report["lazy"] == report["eager"]
    assert targets(report, "zimage-fuse") == {folder.replace(".", "_x_") + ".models.zimage": "applied"}


@pytest.mark.parametrize("hook, function", [
    ("lazy-linear", "from_linear"), ("zimage-fuse", "fuse_to_svdquant_linear"),
])
def test_each_hook_can_be_switched_off_alone(installed_with_torch, shared, hook, function):
    report = build(installed_with_torch, shared, QPATCH_DISABLE=hook)
    assert report["error"]["type"] == "AttributeError" and report["error"]["in"] == function
    states = {name: report["hooks"][name]["state"] for name in ("lazy-linear", "zimage-fuse")}
    assert states.pop(hook) == "disabled" and set(states.values()) == {"applied"}


def test_a_nunchaku_that_mended_itself_is_left_alone_and_the_pack_is_still_mended(installed_with_torch, stage):
    own = stage()
    file = own / "packages/nunchaku/models/linear.py"
    source = file.read_text()
    for old, new in (
        ('kwargs.pop("torch_dtype", linear.weight.dtype)',
         'kwargs.pop("torch_dtype", None) or getattr(linear.weight, "dtype", linear.weight_comfy_model_dtype)'),
        ("device=linear.weight.device", 'device=getattr(linear.weight, "device", None)'),
        ("bias=linear.bias is not None",
         'bias=linear.bias is not None or getattr(linear, "comfy_need_lazy_init_bias", False)'),
    ):
        assert old in source
        source = source.replace(old, new)
    # A Linear that is not lazy declares nothing.
    file.write_text(source.replace("linear.weight_comfy", "linear.weight is None and linear.weight_comfy"))
    report = build(installed_with_torch, own)
    assert report["lazy"] == report["eager"]
    assert targets(report, "lazy-linear")["nunchaku.models.linear"] == "not-needed"
    assert targets(report, "zimage-fuse") == {"ComfyUI-nunchaku.models.zimage": "applied"}


ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, nunchaku
from qpatch import patching
print(patching.marked(vars(nunchaku.models.linear.SVDQW4A4Linear)["from_linear"]))
print({"comfy", "safetensors", "qpatch.lora"} & set(sys.modules))
"""


def test_the_hooks_bring_nothing_with_them_but_torch(installed_with_torch, shared):
    done = installed_with_torch.command("-c", ALONE, shared / "packages")
    assert done.stdout.split() == ["True", "set()"]


COPIES = """
import sys
sys.path[:0] = sys.argv[1:]
import comfy.memory_management, comfy.ops, torch
from nunchaku.models.transformers import transformer_zimage
comfy.memory_management.aimdo_enabled = True
class Attention:
    to_q = to_k = to_v = comfy.ops.manual_cast.Linear(128, 64, bias=True, dtype=torch.bfloat16)
layer = transformer_zimage.quantized_qkv(Attention)
print(layer.out_features, layer.bias.dtype, layer.qweight.device, Attention.to_q.weight)
"""


def test_copies_that_other_modules_import_by_name_are_mended(installed_with_torch, shared):
    done = installed_with_torch.command("-c", COPIES, shared / "ComfyUI", shared / "packages")
    assert done.stdout.split() == ["192", "torch.bfloat16", "cpu", "None"]
