"""Bad files: each is one clear error that names file and key, before any tensor is looked at."""

import json
import pickle
import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from qpatch.lora import header
from qpatch.lora.errors import FileError, LoraError, NonFiniteError, ShapeError, UnsupportedAdapter
from qpatch.lora.files import open_lora

STEM = "transformer_blocks.0.attn.to_q"
KEY = f"{STEM}.lora_A.weight"


def pair(down=(2, 5), up=(6, 2), stem=STEM):
    return {f"{stem}.lora_A.weight": torch.randn(down), f"{stem}.lora_B.weight": torch.randn(up)}


def assemble(table, data=b"", raw=None):
    """A safetensors file from a header table (or its raw JSON text) and data."""
    text = (json.dumps(table) if raw is None else raw).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refusal(tmp_path, content, kind=FileError):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(kind) as caught:
        open_lora(path)
    assert "bad.safetensors" in str(caught.value)
    return caught.value


GOOD = save(pair())


@pytest.mark.parametrize("content, said", [
    (b"", "empty"),
    (b"abc", "not a safetensors file"),
    (GOOD[:4], "not a safetensors file"),
    (GOOD[:60], "truncated inside its header"),
    (struct.pack("<Q", 2**60) + b"{}", "not a safetensors file"),
    (b"\xff" * 300, "not a safetensors file"),
    (pickle.dumps({"a": 1}), "Pickle files are refused"),
    (b"PK\x03\x04" + b"\0" * 100, "Pickle files are refused"),
    (b"<!DOCTYPE html><html><title>Sign in</title></html>", "web page"),
    (b"\n  <html>\n<body>403 Forbidden</body></html>", "web page"),
    (b'{"error":"Unauthorized"}', "server's error message"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n", "Git LFS"),
    (b"GGUF" + b"\0" * 100, "GGUF"),
    (assemble({}, raw="[1, 2]"), "not a safetensors file"),
    (assemble({}, raw='{"a": '), "not the JSON"),
    (assemble({}, raw='{"a": NaN}'), "not the JSON"),
    (assemble({}, raw='{"a": ' + "[" * 100_000), "not the JSON"),
    (struct.pack("<Q", 4) + b"{\xff\xfe\xfd", "not the JSON"),
    (assemble({}), "no tensors"),
    (GOOD + b"\0", "behind the last tensor"),
])
def test_what_is_no_safetensors_file_is_refused_with_what_it_is(tmp_path, content, said):
    assert said in str(refusal(tmp_path, content))


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580, 0x8B1F, 0x0A3C, 0x227B])
def test_a_header_whose_length_looks_like_another_format_is_read(tmp_path, length):
    text = json.dumps({KEY: entry(), KEY.replace("_A", "_B"): entry(offsets=(4, 8))}).encode()
    path = tmp_path / "good.safetensors"
    path.write_bytes(struct.pack("<Q", length) + text.ljust(length) + bytes(8))
    assert len(header.read(path).entries) == 2


@pytest.mark.parametrize("table, data, said", [
    ({KEY: entry(dtype="F31")}, 4, "unknown dtype tag"),
    ({KEY: entry(dtype=["F32"])}, 4, "unknown dtype tag"),
    ({KEY: entry(shape=[-1])}, 4, "non-negative"),
    ({KEY: entry(shape=[1.0])}, 4, "non-negative"),
    ({KEY: entry(shape=[True])}, 4, "non-negative"),
    ({KEY: entry(shape=[2**70])}, 4, "non-negative"),
    ({KEY: entry(shape=[2**40, 2**40])}, 4, "shape and bytes disagree"),
    ({KEY: entry(shape=[1] * 1000)}, 4, "non-negative"),
    ({KEY: entry(shape="1")}, 4, "non-negative"),
    ({KEY: entry(shape=[2])}, 4, "shape and bytes disagree"),
    ({KEY: entry(offsets=[4, 0])}, 4, "shape and bytes disagree"),
    ({KEY: entry(offsets=[0])}, 4, "offsets are malformed"),
    ({KEY: entry(offsets=[4, 8])}, 8, "gap or overlap"),
    ({KEY: entry(offsets=[0, 4]), "b": entry(offsets=[0, 4])}, 4, "gap or overlap"),
    ({KEY: entry()}, 3, "truncated"),
    ({KEY: entry()}, 0, "truncated"),
    ({KEY: {"dtype": "F32", "shape": [1]}}, 4, "malformed"),
    ({KEY: 5}, 4, "malformed"),
])
def test_bad_header_entry_names_the_key(tmp_path, table, data, said):
    error = refusal(tmp_path, assemble(table, bytes(data)))
    assert said in str(error) and error.key in table and error.file == "bad.safetensors"


def test_metadata_must_be_texts(tmp_path):
    assert refusal(tmp_path, assemble({"__metadata__": {"a": 1}, KEY: entry()}, bytes(4))).key == "__metadata__"


@pytest.mark.parametrize("raw, key", [
    (f'{{"{KEY}": {{}}, "b": {{}}, "{KEY}": {{}}}}', KEY),
    (f'{{"{KEY}": {{"dtype": "F32", "dtype": "F16", "shape": [1], "data_offsets": [0, 4]}}}}', "dtype"),
])
def test_duplicate_keys_are_refused(tmp_path, raw, key):
    error = refusal(tmp_path, assemble({}, bytes(4), raw))
    assert "twice" in str(error) and error.key == key


def test_truncated_data_is_refused_wherever_it_ends(tmp_path):
    length = 8 + struct.unpack("<Q", GOOD[:8])[0]
    for end in range(length, len(GOOD)):
        assert "truncated" in str(refusal(tmp_path, GOOD[:end]))


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    for path, said in ((tmp_path, "folder"), (tmp_path / "none.safetensors", "No such file"),
                       (tmp_path / "a\0b.safetensors", "cannot be read"), ("/dev/null", "no regular file")):
        with pytest.raises(FileError, match=said):
            open_lora(path)


def test_a_pytorch_file_is_refused_whatever_its_name(tmp_path):
    for name in ("a.pt", "b.safetensors", "c.ckpt"):
        torch.save(pair(), tmp_path / name)
        with pytest.raises(FileError, match="Pickle files are refused"):
            open_lora(tmp_path / name)


@pytest.mark.parametrize("down, up, said", [
    ((5, 2), (2, 6), "swapped or transposed"),
    ((6, 2), (2, 5), "swapped or transposed"),
    ((5, 2), (6, 2), "down is transposed"),
    ((2, 5), (2, 6), "up is transposed"),
    ((6, 2), (6, 2), "down is transposed"),
    ((2, 6), (2, 6), "up is transposed"),
    ((2, 5), (6, 3), "ranks of down and up disagree"),
    ((0, 5), (6, 0), "empty"),
    ((2, 5, 3, 3), (6, 2, 1, 1), "not a matrix"),
    ((2,), (6, 2), "not a matrix"),
    ((), (6, 2), "not a matrix"),
])
def test_factors_that_do_not_multiply_are_refused_with_their_shapes(tmp_path, down, up, said):
    save_file({key: tensor.contiguous() for key, tensor in pair(down, up).items()}, tmp_path / "bad.safetensors")
    with pytest.raises(ShapeError, match=said) as caught:
        open_lora(tmp_path / "bad.safetensors")
    assert caught.value.key.startswith(STEM) and str(list(down)) in str(caught.value.found)


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, lambda tensor: tensor.to("meta")])
def test_a_tensor_without_dense_memory_is_refused(convert):
    tensors = pair()
    key = next(iter(tensors))
    with pytest.raises(FileError, match="a dense tensor") as caught:
        open_lora({**tensors, key: convert(tensors[key])})
    assert caught.value.key == key


def test_swapped_factors_of_a_square_layer_are_named_when_the_model_is_known():
    adapter = next(iter(open_lora(pair((6, 2), (2, 6))).layers.values()))
    assert adapter.shape == (2, 2) and "swapped" in adapter.misfit(6, 6)
    assert adapter.misfit(2, 2) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("ending", ["lora_A.weight", "lora_B.weight"])
def test_not_finite_factors_are_refused_with_their_key(tmp_path, bad, dtype, ending):
    tensors = {key: tensor.to(dtype) for key, tensor in pair((2, 40), (60, 2)).items()}
    tensors[f"{STEM}.{ending}"][1, 1] = bad
    save_file(tensors, tmp_path / "bad.safetensors")
    adapter = next(iter(open_lora(tmp_path / "bad.safetensors").layers.values()))
    with pytest.raises(NonFiniteError) as caught:
        adapter.delta()
    assert caught.value.key == f"{STEM}.{ending}" and caught.value.file == "bad.safetensors"


def test_a_tensor_is_looked_at_for_nan_once(monkeypatch):
    looked_at = []
    monkeypatch.setattr("qpatch.lora.layer.is_finite", lambda tensor: looked_at.append(tensor) or True)
    adapter = next(iter(open_lora(pair()).layers.values()))
    adapter.delta()
    adapter.delta()
    assert len(looked_at) == 2


def test_opposite_infinities_and_large_finite_values_are_told_apart():
    tensors = pair((2, 40), (60, 2))
    tensors[f"{STEM}.lora_B.weight"][0] = torch.tensor([float("inf"), -float("inf")])
    with pytest.raises(NonFiniteError):
        next(iter(open_lora(tensors).layers.values())).delta()
    tensors[f"{STEM}.lora_B.weight"] = torch.full((60, 2), 3e38)
    next(iter(open_lora(tensors).layers.values())).delta()


@pytest.mark.parametrize("ending, value", [("alpha", float("nan")), ("alpha", float("inf")), ("scale", float("nan"))])
def test_not_finite_alpha_of_a_lora_is_refused(ending, value):
    tensors = {**pair(), f"{STEM}.{ending}": torch.tensor(value)}
    with pytest.raises(NonFiniteError) as caught:
        next(iter(open_lora(tensors).layers.values())).delta()
    assert caught.value.key == f"{STEM}.{ending}"


def test_integer_factors_and_a_vector_as_alpha_are_refused():
    for dtype in (torch.int8, torch.bool, torch.complex64):
        with pytest.raises(FileError, match="not floating point"):
            open_lora({key: tensor.to(dtype) for key, tensor in pair().items()})
    adapter = next(iter(open_lora({**pair(), f"{STEM}.alpha": torch.ones(2)}).layers.values()))
    with pytest.raises(ShapeError, match="single number"):
        adapter.delta()


@pytest.mark.parametrize("tensors, said", [
    ({"a": torch.ones(1), 5: torch.ones(1)}, "not a text"),
    ({KEY: [1.0]}, "not a tensor"),
    ({}, "no tensors"),
])
def test_a_dict_that_is_no_lora_is_refused(tensors, said):
    with pytest.raises(FileError, match=said):
        open_lora(tensors, name="given.safetensors")


def test_something_that_is_neither_path_nor_dict_is_a_type_error():
    with pytest.raises(TypeError, match="path or a dict"):
        open_lora(5)


def test_a_hundred_thousand_keys_are_read_without_fetching_a_tensor(tmp_path, monkeypatch):
    count = 25_000
    stems = [f"transformer_blocks.{index}.attn.to_q" for index in range(count)]
    stems += [f"strange_{index}.layer" for index in range(count)]
    table, position = {}, 0
    for stem in stems:
        for ending, shape in (("lora_A.weight", [1, 1]), ("lora_B.weight", [1, 1])):
            table[f"{stem}.{ending}"] = entry("F16", shape, (position, position + 2))
            position += 2
    path = tmp_path / "many.safetensors"
    path.write_bytes(assemble(table, bytes(position)))
    monkeypatch.setattr("qpatch.lora.source.FileSource.tensor", None)
    file = open_lora(path)
    assert len(file.layers) == count and len(file.unknown) == 2 * count


def test_one_unsupported_layer_is_skipped_and_a_file_of_them_is_refused():
    conv = {f"{STEM}.lora_mid.weight": torch.randn(2, 2, 3, 3)}
    with pytest.raises(UnsupportedAdapter, match="convolution"):
        open_lora({**pair(), **conv})
    file = open_lora({**pair(), **conv, **pair(stem="transformer_blocks.1.attn.to_q")})
    assert [str(target) for target in file.layers] == ["transformer_blocks.1.attn.to_qkv[q]"]
    assert {key for key, _ in file.skipped} == {*pair(), *conv}


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_as_it_stands_or_refused(tmp_path_factory, data):
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position:position + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    path = tmp_path_factory.mktemp("fuzz") / "f.safetensors"
    path.write_bytes(content)
    try:
        file = open_lora(path)
        for adapter in file.layers.values():
            adapter.delta()
    except LoraError as error:
        assert error.file == "f.safetensors"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_header_that_is_accepted_here_is_accepted_by_safetensors(tmp_path_factory, data):
    keys = data.draw(st.lists(st.text(max_size=5), unique=True, max_size=4))
    table, position = {}, 0
    for key in keys:
        dtype = data.draw(st.sampled_from(["F32", "BF16", "U8", "I64", "F8_E4M3", "BOOL"]))
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        size = header.BITS[dtype] // 8
        for extent in shape:
            size *= extent
        size += data.draw(st.sampled_from([0, 0, 0, 0, 1]))
        table[key] = entry(dtype, shape, (position, position + size))
        position += size
    path = tmp_path_factory.mktemp("header") / "f.safetensors"
    path.write_bytes(assemble(table, bytes(position + data.draw(st.sampled_from([0, 0, 0, 1])))))
    try:
        found = header.read(path)
    except FileError:
        with pytest.raises(SafetensorError):
            safe_open(path, "pt")
        return
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(found.entries)


def test_headers_keys_and_families_are_read_without_torch(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(GOOD)
    code = ("import sys; sys.modules['torch'] = None\n"
            "from qpatch.lora import families, header, keys\n"
            f"print(len(header.read({str(tmp_path / 'a.safetensors')!r}).entries), keys.resolve({KEY!r}).target)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["2", "transformer_blocks.0.attn.to_qkv[q]"], done.stderr
