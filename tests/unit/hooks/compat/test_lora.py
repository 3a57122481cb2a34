"""Repairs of comfy.lora: ``lora_shape``, ``original_weights`` and ``lora_key_map``."""

import logging

import pytest
import torch

OLDER = (", original_weights=None", ""), ("original_weights[key]", "globals()[key]")


@pytest.fixture
def lora(core):
    return core.lora


def _random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _patch(what, strength=1.0, model=1.0, offset=None):
    return (strength, what, model, offset, None)


def _adapter(lora, up, down, alpha=None, mid=None, reshape=None):
    return lora.LoRAAdapter(up, down, alpha, mid, None, reshape)


def _misfits(lora):
    return {
        "a slice outside the weight": _patch(("diff", (_random(4, 6),)), offset=(0, 6, 4)),
        "a slice of an axis that is not there": _patch(("diff", (_random(8, 6),)), offset=(3, 0, 4)),
        "a weight of another size": _patch(("set", (_random(9, 6),))),
        "a rank of zero": _patch(_adapter(lora, _random(8, 0), _random(0, 6), alpha=1.0)),
        "a middle factor of another rank": _patch(_adapter(lora, _random(8, 2), _random(2, 6), mid=_random(3, 3))),
        "a lora for the transposed weight": _patch(_adapter(lora, _random(6, 2), _random(2, 8))),
        "a lora for more rows": _patch(_adapter(lora, _random(9, 2), _random(2, 6))),
        "a lora for more rows of a slice": _patch(_adapter(lora, _random(8, 2), _random(2, 6)), offset=(0, 4, 4)),
        "one that scales the model first": _patch(("set", (_random(9, 6),)), model=0.5),
    }


CASES = list(_misfits(type("Names", (), {"LoRAAdapter": lambda *weights: None})))


@pytest.mark.parametrize("case", CASES)
def test_a_misfit_is_skipped_with_a_line_and_its_neighbours_act(lora, mend, caplog, case):
    assert mend("lora_shape", lora).verdict == "needed"
    weight, up, down = _random(8, 6), _random(8, 2), _random(2, 6)
    before = weight.clone()
    fits = _patch(_adapter(lora, up, down, alpha=1.0), strength=0.5)
    with caplog.at_level(logging.WARNING):
        out = lora.calculate_weight([fits, _misfits(lora)[case], fits], weight, "blocks.0.weight")
    torch.testing.assert_close(out, before + 2 * 0.5 * (1.0 / 2) * (up @ down), rtol=1e-12, atol=1e-12)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "qpatch"]
    assert "LoRA skipped for blocks.0.weight, a weight of [8, 6]" in line


STOPPING = [case for case in CASES if not case.startswith("a lora for")]


@pytest.mark.parametrize("case", STOPPING)
def test_without_the_repair_it_stops_the_workflow(lora, case):
    with pytest.raises((RuntimeError, IndexError, ZeroDivisionError)):
        lora.calculate_weight([_misfits(lora)[case]], _random(8, 6), "k")


def test_without_the_repair_a_lora_for_the_transposed_weight_is_added_as_noise(lora):
    weight = _random(8, 6)
    out = lora.calculate_weight([_misfits(lora)["a lora for the transposed weight"]], weight.clone(), "k")
    assert not torch.equal(out, weight)


def test_what_fits_gives_the_same_bits_with_and_without_the_repair(lora, mend):
    patches = [_patch(_adapter(lora, _random(4, 2), _random(2, 6)), 0.3, 1.0, (0, 2, 4)),
               _patch(("diff", (_random(8, 6),)), 0.7, 0.9)]
    plain = lora.calculate_weight(patches, _random(8, 6), "k", intermediate_dtype=torch.float64)
    mend("lora_shape", lora)
    assert torch.equal(lora.calculate_weight(patches, _random(8, 6), "k", intermediate_dtype=torch.float64), plain)


@pytest.mark.parametrize("text", [
    "CUDA out of memory. Tried to allocate 2 GiB", "CUDA error: an illegal memory access",
])
def test_a_device_that_fails_is_not_taken_for_a_misfit(lora, mend, text):
    mend("lora_shape", lora)

    class Failing:
        weights = ()

        def calculate_weight(self, *args):
            raise RuntimeError(text)

    with pytest.raises(RuntimeError, match=text[:10]):
        lora.calculate_weight([_patch(Failing())], _random(8, 6), "k")


def test_a_comfyui_that_skips_misfits_is_left_alone(standin, mend):
    mended = standin("compat/lora.py", "comfy.lora",
                     ("weight = weight.narrow(*offset)",
                      "weight = weight[:0] if sum(offset[1:]) > len(weight) else weight"))
    assert mend("lora_shape", mended).verdict == "not-needed"


def test_an_argument_added_later_passes_through(standin, mend):
    later = standin("compat/lora.py", "comfy.lora", ("original_weights=None)", "original_weights=None, foo=0)"),
                    ("    return weight\n\n\nclass", "    return weight + foo\n\n\nclass"))
    mend("lora_shape", later)
    out = later.calculate_weight([_patch(("diff", (torch.zeros(2),)))], torch.zeros(2), "k", foo=1)
    assert torch.equal(out, torch.ones(2))


def test_the_keys_of_one_model_do_not_leak_into_those_of_the_next(lora, mend):
    first, second = torch.nn.Linear(2, 2), torch.nn.LayerNorm(2, bias=False)
    assert mend("lora_key_map", lora).verdict == "needed"
    lora.model_lora_keys_unet(first)
    assert lora.model_lora_keys_unet(second) == {"lora_weight": "weight"}
    assert lora.model_lora_keys_clip(second) == {"lora_weight": "weight"}


def test_without_the_repair_they_do(lora):
    lora.model_lora_keys_unet(torch.nn.Linear(2, 2))
    assert "lora_bias" in lora.model_lora_keys_unet(torch.nn.LayerNorm(2, bias=False))


def test_a_map_that_the_caller_passes_is_filled_and_given_back(lora, mend):
    mend("lora_key_map", lora)
    mine = {"kept": 1}
    assert lora.model_lora_keys_unet(torch.nn.Linear(2, 2), mine) is mine
    assert lora.model_lora_keys_unet(torch.nn.Linear(2, 2), key_map=mine) is mine
    assert set(mine) == {"kept", "lora_weight", "lora_bias"}


def test_a_comfyui_without_a_shared_default_is_left_alone(standin, mend):
    mended = standin("compat/lora.py", "comfy.lora", ("key_map={}", "key_map=None"),
                     ("    for key in model", "    key_map = key_map or {}\n    for key in model"))
    assert mend("lora_key_map", mended).verdict == "not-needed"


def test_an_older_calculate_weight_takes_original_weights(standin, mend):
    older = standin("compat/lora.py", "comfy.lora", *OLDER)
    assert mend("original_weights", older).verdict == "needed"
    patches = [_patch(("diff", (torch.ones(2),)))]
    out = older.calculate_weight(patches, torch.zeros(2), "k", original_weights={"k": "unused"})
    assert torch.equal(out, torch.ones(2))


def test_where_original_weights_matter_they_are_not_dropped(standin, mend):
    older = standin("compat/lora.py", "comfy.lora", *OLDER)
    mend("original_weights", older)
    patches = [_patch(("model_as_lora", (torch.ones(2),)))]
    with pytest.raises(TypeError, match="cannot apply a model as a LoRA"):
        older.calculate_weight(patches, torch.zeros(2), "k", original_weights={"k": 1})


def test_a_low_vram_patch_takes_original_weights_and_uses_them_where_they_matter(core, mend):
    assert mend("original_weights", core.patcher).verdict == "needed"
    plain = core.patcher.LowVramPatch("k", {"k": [_patch(("diff", (torch.ones(2),)))]})
    assert torch.equal(plain(torch.zeros(2), original_weights={}), torch.ones(2))
    assert torch.equal(plain(torch.zeros(2)), torch.ones(2))
    model = core.patcher.LowVramPatch("k", {"k": [_patch(("model_as_lora", (torch.full((2,), 5.0),)))]})
    assert torch.equal(model(torch.zeros(2), original_weights={"k": [(torch.ones(2), None)]}), torch.full((2,), 4.0))


def test_functions_that_take_original_weights_are_left_alone(core, standin, mend):
    assert mend("original_weights", core.lora).verdict == "not-needed"
    mended = standin("compat/model_patcher.py", "comfy.model_patcher",
                     ("def __call__(self, weight):", "def __call__(self, weight, original_weights=None):"))
    assert mend("original_weights", mended).verdict == "not-needed"
