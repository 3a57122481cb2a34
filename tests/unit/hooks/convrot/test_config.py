"""``comfy_quant`` in every form it has been seen in."""

import json

import pytest
import torch

from qpatch.hooks.convrot import config

SETTINGS = {"format": "nvfp4", "convrot": True, "convrot_groupsize": 64}
TEXT = json.dumps(SETTINGS)


def as_tensor(text):
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize("raw", [
    SETTINGS, TEXT, TEXT.encode(), bytearray(TEXT.encode()), as_tensor(TEXT), as_tensor(TEXT)[None],
    json.dumps(TEXT), as_tensor(json.dumps(TEXT)), as_tensor(json.dumps(json.dumps(TEXT))),
])
def test_every_form_is_read_alike(raw):
    assert config.decode(raw) == SETTINGS


def test_a_bare_name_is_the_format():
    assert config.decode(as_tensor("nvfp4")) == {"format": "nvfp4"}
    assert config.decode(as_tensor(json.dumps("int8_tensorwise"))) == {"format": "int8_tensorwise"}


def test_no_configuration_is_none():
    assert config.decode(None) is None


@pytest.mark.parametrize("raw", [as_tensor("[1, 2]"), as_tensor('{"format": '), as_tensor(""), b"\xff\xfe", 5, [1]])
def test_what_is_no_configuration_is_refused(raw):
    with pytest.raises(ValueError, match="comfy_quant|utf-8"):
        config.decode(raw)


@pytest.mark.parametrize("settings", [
    {"format": "nvfp4", "convrot": True, "convrot_groupsize": 64},
    {"format": "nvfp4", "params": {"convrot": True, "convrot_groupsize": 64}},
    {"format": "nvfp4", "convrot": True, "params": {"convrot_groupsize": 64}},
    {"format": "nvfp4", "convrot": "true", "convrot_groupsize": "64"},
    {"format": "nvfp4", "convrot": 1, "convrot_groupsize": 64, "params": None},
    {"format": "nvfp4", "convrot": True, "convrot_groupsize": 64,
     "params": {"convrot": False, "convrot_groupsize": 16}},
])
def test_the_rotation_is_found_at_the_top_or_among_the_parameters(settings):
    assert config.declaration(settings) == config.Declaration("nvfp4", 64)


@pytest.mark.parametrize("settings", [
    {"format": "nvfp4"}, {"format": "nvfp4", "convrot": False, "convrot_groupsize": 64},
    {"format": "nvfp4", "convrot": "false"}, {"format": "nvfp4", "convrot_groupsize": 64},
])
def test_no_rotation_where_none_is_declared(settings):
    assert config.declaration(settings) == config.Declaration("nvfp4")


def test_the_group_size_is_256_where_the_file_does_not_say():
    assert config.declaration({"format": "nvfp4", "convrot": True}).group_size == 256
    assert config.declaration({"format": "nvfp4", "convrot": True, "convrot_groupsize": None}).group_size == 256


def test_a_group_size_that_is_no_number_is_refused():
    with pytest.raises(ValueError):
        config.declaration({"format": "nvfp4", "convrot": True, "convrot_groupsize": "many"})


@pytest.mark.parametrize("settings", [
    {"orig_shape": [60, 256]}, {"out_features": 60, "in_features": 256}, {"params": {"orig_shape": [60, 256]}},
])
def test_the_logical_shape_is_found(settings):
    assert config.shape(settings) == (60, 256)


def test_no_shape_where_the_file_gives_only_half_of_it():
    assert config.shape({"in_features": 256}) is None


def test_what_is_written_is_read_by_every_release_of_comfyui():
    nested = {"format": "nvfp4", "params": {"convrot": True, "convrot_groupsize": 64}}
    written = config.encode(config.plain(nested))
    assert written.dtype == torch.uint8
    assert json.loads(bytes(written.tolist()))["convrot_groupsize"] == 64
    assert config.stock_reads(written, config.decode(written))


@pytest.mark.parametrize("raw", [SETTINGS, TEXT, as_tensor(json.dumps(TEXT)), as_tensor("nvfp4"),
                                 as_tensor('{"format": "nvfp4", "params": {"convrot": true}}')])
def test_other_forms_are_known_to_need_rewriting(raw):
    assert not config.stock_reads(raw, config.decode(raw))
