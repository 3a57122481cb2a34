"""Each known break on real ComfyUI, nunchaku and ComfyUI-nunchaku: there without qpatch, mended with the wheel.

Needs QPATCH_TEST_COMFYUI (a ComfyUI folder), QPATCH_TEST_NUNCHAKU (a folder to put on sys.path) and
QPATCH_TEST_COMFYUI_NUNCHAKU (the node pack), and an interpreter with ComfyUI's requirements.
"""

import json
import os
from pathlib import Path

import pytest

NEEDED = ("QPATCH_TEST_COMFYUI", "QPATCH_TEST_NUNCHAKU", "QPATCH_TEST_COMFYUI_NUNCHAKU")
MISSING = [name for name in NEEDED if not os.environ.get(name)]

pytestmark = [
    pytest.mark.comfyui, pytest.mark.nunchaku,
    pytest.mark.skipif(bool(MISSING), reason=f"real checkouts are not named: {', '.join(MISSING)}"),
]


def report(env, **variables):
    done = env.command(Path(__file__).with_name("compat_breaks.py"), *(os.environ[name] for name in NEEDED),
                       env={"PYTHONDONTWRITEBYTECODE": "1", **variables}, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def broken(installed_with_torch):
    return report(installed_with_torch, QPATCH="0")["breaks"]


@pytest.fixture(scope="module")
def whole(installed_with_torch):
    return report(installed_with_torch)


@pytest.fixture(scope="module")
def mended(whole):
    return whole["breaks"]


def test_the_pack_loads_with_every_repair_in_a_state_that_is_no_failure(whole):
    assert all(whole["loaded"].values())
    states = {name: row["state"] for name, row in whole["hooks"].items() if name.startswith("comfy-compat-")}
    assert states and set(states.values()) <= {"applied", "not-needed", "waiting"}, states


def without_qwen(broken):
    """Whether the pack's Qwen-Image cannot even be imported here without qpatch (ComfyUI 0.23 and 0.24)."""
    return "no attribute 'apply_rotary_emb'" in str(broken["rotary"])


#: break -> (what it comes to with qpatch, what the report without qpatch says where the pack loads whole).
EXPECTED = {
    "clone": ([True, True, True], "disable_dynamic"),
    "returned_weight": ([[0.5], [0.0], []], "return_weight"),
    "partial_unload": (True, "weight_function"),
    "config_copy": ("TinyNunchakuZImage", "not callable"),
    "flux": ([True, 2], "img_in"),
    "key_map": (False, "True"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_break_is_there_without_qpatch_and_mended_with_it(broken, mended, name):
    whole, says = EXPECTED[name]
    if name != "clone" or "disable_dynamic" in str(broken[name]):
        assert says in str(broken[name])
    assert mended[name] == whole


def test_apply_rotary_emb_is_there_and_rotates(broken, mended):
    assert without_qwen(broken) or broken["rotary"] < 1e-12
    assert mended["rotary"] < 1e-12


def test_each_image_of_a_batch_is_the_image_that_it_is_alone(broken, mended):
    assert broken["batch"]["2"][1] > 0.1 and "rotary row for each of 288 tokens" in broken["batch"]["3"]
    assert all(error < 1e-3 for size in ("2", "3") for error in mended["batch"][size])


def test_misfits_are_skipped_and_what_fits_acts(broken, mended):
    assert mended["misfits"].pop("fits") == broken["misfits"].pop("fits") == 96.0
    assert broken["misfits"].pop("transposed") == 96.0
    assert all(isinstance(text, str) for text in broken["misfits"].values())
    assert set(mended["misfits"].values()) == {0.0}


def test_quantized_weights_can_be_copied_and_listed(broken, mended):
    assert "storage" in broken["quantized"]["copy"] and "weight_scale" in broken["quantized"]["keys"]
    assert mended["quantized"] == {"copy": True, "keys": ["layer.weight"], "in a Parameter": True}


def test_plain_layers_end_in_the_dtype_of_the_model(broken, mended):
    assert without_qwen(broken) or broken["plain_dtypes"]["torch.float32"] == ["torch.bfloat16", "torch.float32"]
    assert mended["plain_dtypes"] == {"torch.float32": ["torch.bfloat16"], "torch.float16": ["torch.bfloat16"]}


def test_qwen_image_moves_once_and_is_counted(broken, mended):
    size = mended["moves"][-1]
    assert without_qwen(broken) or broken["moves"][:4] == [[1, 0], [3, 0], [5, 0], [6, 0]]
    assert mended["moves"] == [[1, size], [1, size], [1, size], [1, size], [2, 0], size] and size > 0


def test_qwen_image_receives_each_argument_under_its_name(mended):
    given = json.loads(mended["qwen_calls"]["given"].partition(": ")[2])
    assert {name: given[name] for name in ("timesteps", "context", "attention_mask", "ref_latents")} == {
        "timesteps": "timestep", "context": "context", "attention_mask": "mask", "ref_latents": "latents"}


def test_a_qwen_block_takes_comfyui_s_options(broken, mended):
    assert without_qwen(broken) or "transformer_options" in broken["qwen_calls"]["block"]
    assert "TypeError" not in mended["qwen_calls"]["block"]
