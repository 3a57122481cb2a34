"""What can be wrong with the tensors of a file: each change takes ``draw`` and alters the contents."""

from __future__ import annotations

import struct

import torch
from hypothesis import strategies as st

from qpatch.lora.header import BITS
from qpatch.lora.keys import DOTTED_PREFIXES, FLAT_PREFIXES
from qpatch.lora.suffixes import SUFFIXES

from .tensors import DTYPES, SPELLINGS, Contents, Stored, example

_EXTENTS = st.sampled_from((0, 1, 2, 3, 4, 6, 7, 16, 17, 64, 128, 129, 384, 768))
_SHAPES = st.lists(_EXTENTS, max_size=5).map(tuple).filter(lambda shape: _size(shape) <= 200_000)
_VALUES = st.sampled_from((0.0, -0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-45, 1e-40, 6e4, 7e4,
                           -3e38, 1e300, 5e-324, 448.0, 1e-8))
_ALPHAS = st.sampled_from((0.0, 1.0, -2.0, 16.0, 1e-30, 1e30, 3e38, -3e38, 1e300, float("nan"), float("inf"),
                           9999999999.0))
_WORDS = st.sampled_from(("weight", "lora_A", "lora_B", "lora_down", "default", "alpha", "0", "1", "9", "59", "60",
                          "layers", "transformer_blocks", "attn", "to_q", "to_qkv", "model", "img_mod", "é",
                          "\u202e", "a b", ""))
_ENDS = [".".join(suffix).replace("*", "x") for suffix in SUFFIXES]
_MODULES = ["transformer_blocks.0.attn.to_q", "transformer_blocks.0.img_mod.1", "transformer_blocks.0.attn.norm_q",
            "transformer_blocks.7.attn.to_out.0", "img_in", "txt_norm", "layers.0.attention.qkv",
            "layers.0.attention.to_q", "layers.0.feed_forward.w13", "layers.0.adaLN_modulation.0",
            "layers.0.attention.q_norm", "cap_embedder.0", "transformer_blocks.0.attn.to_nowhere",
            "single_transformer_blocks.0.attn.to_q", "layers.0.adaLN_modulation.1", "text_encoder.layers.0.q",
            "lora_te1_x"]


def _size(shape) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _pick(draw, contents: Contents) -> str | None:
    return draw(st.sampled_from(list(contents.tensors))) if contents.tensors else None


def _number(draw, value) -> Stored:
    tag = draw(st.sampled_from(("F32", "F64", "BF16", "F16", "I64", "U8", "BOOL", "F8_E4M3", "U32", "F8_E8M0", "C64")))
    shape = draw(st.sampled_from(((), (1,), (1, 1), (2,), (0,))))
    if tag in DTYPES and (DTYPES[tag].is_floating_point or abs(value) < 2**62):
        return Stored.of(torch.full(shape, value, dtype=torch.float64).to(DTYPES[tag]))
    return Stored(tag, (), struct.pack("<d", value)).fitted(tag, shape)


def rename(draw, contents):
    """One component of a key is another one, or is gone, or is there twice."""
    key = _pick(draw, contents)
    if key is None:
        return
    parts = key.split(".")
    at = draw(st.integers(0, len(parts) - 1))
    parts[at:at + 1] = draw(st.sampled_from(([], [parts[at]] * 2, [parts[at].upper()], [parts[at][:-1]],
                                             [draw(_WORDS)])))
    contents.tensors[".".join(parts)] = contents.tensors.pop(key)


def prefix(draw, contents):
    """All keys have another prefix, or one over and over."""
    head = draw(st.sampled_from((*DOTTED_PREFIXES, *FLAT_PREFIXES, "x.", "\ufeff")))
    head *= draw(st.sampled_from((1, 2, 400)))
    contents.tensors = {head + key: stored for key, stored in contents.tensors.items()}


def reshape(draw, contents):
    key = _pick(draw, contents)
    if key is None:
        return
    stored = contents.tensors[key]
    shape = draw(st.sampled_from((stored.shape[::-1], (*stored.shape, 1, 1), (*stored.shape, 3, 3),
                                  (*stored.shape, 0), (), (1, *stored.shape), (_size(stored.shape),),
                                  stored.shape[:-1], draw(_SHAPES))))
    contents.tensors[key] = stored.fitted(stored.tag, shape if _size(shape) <= 500_000 else ())


def retype(draw, contents):
    key = _pick(draw, contents)
    if key is not None:
        stored = contents.tensors[key]
        contents.tensors[key] = stored.fitted(draw(st.sampled_from(list(BITS))), stored.shape)


def retype_all(draw, contents):
    """The whole file in another float dtype, as quantized files are."""
    tag = draw(st.sampled_from(("F8_E4M3", "F8_E5M2", "F16", "F64", "F8_E8M0", "F8_E4M3FNUZ", "F4", "I8")))
    contents.tensors = {key: stored.fitted(tag, stored.shape) for key, stored in contents.tensors.items()}


def values(draw, contents):
    """Some or all elements have one peculiar value."""
    key = _pick(draw, contents)
    if key is None or not (dtype := DTYPES.get(contents.tensors[key].tag)) or not dtype.is_floating_point:
        return
    stored = contents.tensors[key]
    one = Stored.of(torch.tensor([draw(_VALUES)], dtype=torch.float64).to(dtype)).data
    if draw(st.booleans()):
        contents.tensors[key] = Stored(stored.tag, stored.shape, one * (len(stored.data) // len(one)))
    elif stored.data:
        at = draw(st.integers(0, len(stored.data) // len(one) - 1)) * len(one)
        contents.tensors[key] = Stored(stored.tag, stored.shape, stored.data[:at] + one + stored.data[at + len(one):])


def alpha(draw, contents):
    key = _pick(draw, contents)
    if key is not None:
        stem = key.rsplit(".", draw(st.integers(1, 2)))[0]
        name = draw(st.sampled_from(("alpha", "scale", "lora_alpha")))
        contents.tensors[f"{stem}.{name}"] = _number(draw, draw(_ALPHAS))


def drop(draw, contents):
    contents.tensors.pop(_pick(draw, contents), None)


def swap(draw, contents):
    """Two keys have each other's tensors: up and down, or two layers."""
    one, other = _pick(draw, contents), _pick(draw, contents)
    if one is not None:
        tensors = contents.tensors
        tensors[one], tensors[other] = tensors[other], tensors[one]


def repeat(draw, contents):
    """A key once more in another spelling, with the same content or another."""
    key = _pick(draw, contents)
    if key is not None:
        again = draw(st.sampled_from(("transformer.", "diffusion_model.", "model."))) + key
        other = draw(st.sampled_from((key, _pick(draw, contents))))
        contents.tensors[again] = contents.tensors[other]


def extra(draw, contents):
    """A tensor with some known ending, on a module of the file or another one."""
    key = _pick(draw, contents)
    stem = draw(st.sampled_from([*_MODULES, *([key.rsplit(".", 2)[0], key.rsplit(".", 1)[0]] if key else [])]))
    tag = draw(st.sampled_from(("F32", "BF16", "F16", "F8_E4M3", "I64", "BOOL")))
    key = f"{stem}.{draw(st.sampled_from(_ENDS))}"
    contents.tensors[key] = Stored(tag, (), b"\x3c\x3e\x01").fitted(tag, draw(_SHAPES))


def flags(draw, contents):
    name = draw(st.sampled_from(("use_rslora_flag", "use_dora_flag", "lokr_factor")))
    contents.tensors[name] = _number(draw, draw(_ALPHAS))


def mixture(draw, contents):
    """Layers of a second file: of another kind, another trainer, or the other family."""
    groups, _ = example(*draw(st.sampled_from(SPELLINGS)))
    for stem in draw(st.lists(st.sampled_from(list(groups)), min_size=1, max_size=2)):
        contents.tensors |= groups[stem]


_HUGE = {"lokr": {"lokr_w1": "n1", "lokr_w2": "1n"}, "lora": {"lora_A.weight": "1n", "lora_B.weight": "n1"},
         "loha": {"hada_w1_a": "n1", "hada_w1_b": "1n", "hada_w2_a": "n1", "hada_w2_b": "1n"},
         "two": {"lokr_w1_a": "n1", "lokr_w1_b": "1n", "lokr_w2_a": "n1", "lokr_w2_b": "1n"},
         "glora": {"a1.weight": "n1", "a2.weight": "1n", "b1.weight": "n1", "b2.weight": "1n"},
         "oft": {"oft_R.weight": "1n"}, "ia3": {"ia3_l": "n1"}, "bias": {"diff_b": "n"}, "columns": {"diff": "1n"}}


def huge(draw, contents):
    """A few factors in a small file that multiply to a matrix of billions of elements."""
    count = draw(st.sampled_from((1000, 4095, 32640, 60000)))
    shapes = {"n1": (count, 1), "1n": (1, count), "n": (count,)}
    stem = draw(st.sampled_from((*_MODULES, "diffusion_model.layers.3.attention.to_q")))
    for ending, shape in _HUGE[draw(st.sampled_from(list(_HUGE)))].items():
        contents.tensors[f"{stem}.{ending}"] = Stored("BF16", (), b"\x80\x3f\x00\x3f").fitted("BF16", shapes[shape])


def long_key(draw, contents):
    piece = draw(st.sampled_from(("model.", "a", "lora_A.", "transformer_blocks.0.", "1.", "_", "to_q_")))
    end = draw(st.sampled_from(("", ".lora_A.weight", "layers.0.attention.to_q.alpha")))
    contents.tensors[piece * draw(st.sampled_from((50, 2000, 40000))) + end] = _number(draw, 1.0)


def many_keys(draw, contents):
    """Hundreds of unknown names, each a little different."""
    stem = draw(st.sampled_from(("layers.{}.attention.to_p", "{}x.lora", "transformer_blocks.0.attn.to_{}")))
    one = _number(draw, 1.0)
    count = draw(st.sampled_from((3, 300)))
    contents.tensors |= {f"{stem.format(number)}.lora_A.weight": one for number in range(count)}


_NASTY = st.sampled_from((
    "", "1", "null", "[]", "{}", "[" * 2000, '{"a":' * 1500, "NaN", "1" * 5000, "1e999", '{"r": 1e999}',
    '{"r": ' + "9" * 400 + "}",
    '{"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.use_rslora": true}', '{"lora_alpha": "x", "r": []}',
    '{"r": 4, "lora_alpha": 2, "rank_pattern": {"((((.*)*)*)*)*x": 4}, "alpha_pattern": {"(.*_?)*(.*.?)*!": 2}}',
    '{"r": 4, "alpha_pattern": {"(": 1, "": 2, "to_q": -1, "to_k": 0, "(?P<a>": 4, "to_v": 1e400}}',
    '{"lora_alpha": true, "r": 0, "rank_pattern": [1]}', '{"lora_alpha": 1e308, "r": 0}',
    '{"a": {"b": 1, "": 2, "c": NaN}}',
    '{"step": ' + "9" * 4000 + "}", "\ud83d\ude00", "a\nb", "\u0000", "x" * 100_000, '{"img": {" a ": 3, "b": true}}'))
_TOLD = ("lora_adapter_metadata", "ss_tag_frequency", "training_info", "ss_output_name", "modelspec.title",
         "ss_network_dim", "ss_network_module", "software", "version", "format", "qpatch.history",
         "trigger_words", "ss_network_args", "")


def metadata(draw, contents):
    table = st.dictionaries(st.sampled_from(_TOLD), _NASTY, min_size=1, max_size=3)
    contents.metadata = draw(st.one_of(table, st.sampled_from(([], 1, None, {"a": 1}, {"a": None}))))


CHANGES = (rename, prefix, reshape, reshape, retype, retype_all, values, values, alpha, alpha, drop, swap, repeat,
           extra, extra, flags, mixture, huge, long_key, many_keys, metadata, metadata)
