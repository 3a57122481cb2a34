"""Every producer's files in every format out, read back by a decoder that knows nothing of the package: the changes are
those of the dense float64 references from which the files were made."""

import re

import numpy as np
import producers
import pytest

from qpatch.lora import open_lora
from qpatch.lora.conversion import FORMATS, convert

#: Kinds that every format writes as plain factors, and those that only these two turn into factors.
PLAIN, FACTORED = ("lora", "lora_conv", "lora_bias"), ("lokr", "lokr_w2_whole", "lokr_both", "lokr_full", "loha")
CASES = [(producer, family, kind, name) for producer, rules in producers.PRODUCERS.items() for family in rules.families
         for kind in rules.kinds for name in FORMATS
         if kind in PLAIN or (kind in FACTORED and name in ("diffusers", "nunchaku"))]
PREFIXES = {"comfyui": "diffusion_model.", "diffusers": "transformer.", "kohya": "lora_unet_",
            "nunchaku": "diffusion_model."}
ROWS = {"attn.to_qkv": "qkv", "attn.add_qkv_proj": "qkv", "attention.qkv": "qkv", "feed_forward.w13": ("w3", "w1")}


def spellings(name):
    """Name of a module, as the format spells it -> the target of the references."""
    found = {}
    blocks = [("transformer_blocks.0.", producers.QWEN_BLOCK), ("", producers.QWEN_SINGLE), ("", producers.Z_SINGLE)]
    z = {**producers.Z_CORE, **producers.Z_FUSED, **producers.Z_MODULATION}
    blocks += [(f"{block}.0.", z) for block in ("layers", "noise_refiner", "context_refiner")]
    for prefix, table in blocks:
        for target, (diffusers, native, *_) in table.items():
            fused = re.sub(r"\[.*", "", target)
            spelled = fused if name == "nunchaku" else native or diffusers
            if name in ("comfyui", "diffusers") and diffusers:
                spelled = diffusers
            written = prefix + spelled
            kept = prefix + (fused if name == "nunchaku" else target)
            found[written.replace(".", "_") if name == "kohya" else written] = kept
    return found


def decoded(tensors, name):
    """target -> float64 change, fused layers cut into their parts."""
    known, found = spellings(name), {}
    for key, down in tensors.items():
        match = re.fullmatch(r"(.*)\.(?:lora_A|lora_down)\.weight", key)
        if match is None:
            continue
        stem = match.group(1)
        target = known[stem.removeprefix(PREFIXES[name])]
        ups = [f"{stem}.{end}.weight" for end in ("lora_B", "lora_up", "lora_B_interleaved")]
        (up,) = (key for key in ups if key in tensors)
        scale = tensors[f"{stem}.alpha"].item() / down.shape[0] if f"{stem}.alpha" in tensors else 1.0
        change = scale * tensors[up].double().numpy() @ down.double().numpy()
        if up.endswith("interleaved.weight"):
            change = change.reshape(-1, 6, change.shape[1]).transpose(1, 0, 2).reshape(change.shape)
        parts = next((rows for end, rows in ROWS.items() if target.endswith(end)), None)
        for part, rows in zip(parts or (None,), np.split(change, len(parts or (None,)))):
            found[target if part is None else f"{target}[{part}]"] = rows
    return found


def wanted(example):
    found = {}
    for target, sample in example.layers.items():
        change = sample.change(example.base(target), 1.0)
        parts = next((rows for end, rows in ROWS.items() if target.endswith(end)), (None,))
        for part, rows in zip(parts, np.split(change, len(parts))):
            found[target if part is None else f"{target}[{part}]"] = rows
    return found


@pytest.mark.parametrize(("producer", "family", "kind", "name"), CASES)
def test_what_is_written_is_the_change_from_which_the_file_was_made(producer, family, kind, name):
    example = producers.make(producer, family, kind, rank=3)
    result = convert(open_lora(example.tensors), FORMATS[name])
    found = decoded(result.tensors, name)
    assert result.rounded == (kind in FACTORED) and result.error == 0
    references = wanted(example)
    assert not {target for target, change in references.items() if target not in found and change.any()}
    # The factors of a Kronecker or Hadamard product are products themselves, rounded to float32.
    tolerance = 1e-12 if kind in PLAIN else 1e-6
    for target, change in found.items():
        reference = references.get(target, np.zeros_like(change))
        assert np.abs(change - reference).max() <= tolerance * max(np.abs(reference).max(), 1e-30), target
