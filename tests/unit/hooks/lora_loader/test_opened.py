"""Names of LoRAs, and when two dicts mean the same LoRA."""

import gc

import torch

from qpatch.hooks.lora_loader import file_names, opened
from qpatch.lora.families import get

Z = get("z-image")


def tensors():
    stem = "layers.0.attention.to_q"
    return {f"{stem}.lora_A.weight": torch.ones(2, 8), f"{stem}.lora_B.weight": torch.ones(8, 2)}


def test_a_lora_is_called_after_the_file_that_its_tensors_were_read_from(tmp_path):
    read = tensors()

    def original(ckpt, safe_load=False, return_metadata=False):
        return (read, {}) if return_metadata else read

    load = file_names.noting_the_name(original)
    assert load(str(tmp_path / "style.safetensors"), safe_load=True, return_metadata=True) == (read, {})
    assert opened.lora(read, Z, "lora #1").name == "style.safetensors"
    # A node that took some keys away and added others.
    others = {**dict(list(read.items())[1:]), "more": torch.ones(1)}
    assert opened.name_of(others) == "style.safetensors"


def test_tensors_of_unknown_origin_get_the_name_of_their_place():
    assert opened.lora(tensors(), Z, "lora #3").name == "lora #3"


def test_remembering_names_keeps_no_tensor_alive():
    read = tensors()
    opened.remember(read, "style.safetensors")
    before = len(opened._read_from)
    del read
    gc.collect()
    assert len(opened._read_from) == before - 2


def test_the_same_tensors_are_the_same_opened_file_and_others_are_not():
    read = tensors()
    one, again, other = opened.lora(read, Z, "a"), opened.lora(dict(read), Z, "b"), opened.lora(tensors(), Z, "a")
    assert one.file is again.file and one.file is not other.file


def test_what_the_caller_does_with_its_dict_does_not_reach_the_lora():
    read = tensors()
    one = opened.lora(read, Z, "a")
    read.clear()
    assert len(one.file.layers) == 1


def test_a_lora_in_pieces_grows_until_a_layer_comes_twice():
    first, second = tensors(), {key.replace("to_q", "to_k"): value for key, value in tensors().items()}
    pieces = opened.Pieces(dict(first), Z, "a")
    assert pieces.grow(second) and len(pieces.file.layers) == 2
    assert not pieces.grow(first) and len(pieces.file.layers) == 2


def test_the_copy_of_a_lora_in_pieces_grows_by_itself():
    pieces = opened.Pieces(dict(tensors()), Z, "a")
    twin = pieces.copy()
    twin.grow({key.replace("to_q", "to_k"): value for key, value in tensors().items()})
    assert len(pieces.file.layers) == 1 and len(twin.file.layers) == 2
