"""The ends of keys: which role the last components give a tensor. To add a spelling is to add a line to a table."""

from __future__ import annotations

from functools import lru_cache

from .roles import Role

#: An up factor whose rows stand in the order of Nunchaku's modulation layers (layer.py); a name of its own, so that
#: what does not know the order does not take it for a plain one.
INTERLEAVED = "lora_B_interleaved"

#: Last components of a key -> role. "*" stands for one component, the adapter's name in a PEFT key.
SUFFIXES: dict[tuple[str, ...], Role] = {
    ("lora_down", "weight"): Role.down,
    ("lora_up", "weight"): Role.up,
    ("lora_mid", "weight"): Role.mid,
    ("lora_A", "weight"): Role.down,
    ("lora_B", "weight"): Role.up,
    ("lora_A", "*", "weight"): Role.down,
    ("lora_B", "*", "weight"): Role.up,
    (INTERLEAVED, "weight"): Role.up,
    ("lora_A",): Role.down,
    ("lora_B",): Role.up,
    ("lora", "down", "weight"): Role.down,
    ("lora", "up", "weight"): Role.up,
    ("lora_linear_layer", "down", "weight"): Role.down,
    ("lora_linear_layer", "up", "weight"): Role.up,
    ("lora_B", "bias"): Role.up_bias,
    ("lora_B", "*", "bias"): Role.up_bias,
    ("alpha",): Role.alpha,
    ("lora_alpha",): Role.alpha,
    ("lora_alpha", "*"): Role.alpha,
    ("scale",): Role.scale,
    ("dora_scale",): Role.dora,
    ("magnitude",): Role.dora,
    ("dora_layer", "weight"): Role.dora,
    ("lora_magnitude_vector",): Role.dora,
    ("lora_magnitude_vector", "weight"): Role.dora,
    ("lora_magnitude_vector", "*"): Role.dora,
    ("lora_magnitude_vector", "*", "weight"): Role.dora,
    ("reshape_weight",): Role.reshape_weight,
    **{(f"lokr_{name}", *tail): Role(f"lokr_{name}")
       for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t1", "t2") for tail in ((), ("*",))},
    **{(f"hada_{name}", *tail): Role(f"hada_{name}")
       for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2") for tail in ((), ("*",))},
    **{(name, "weight"): Role(f"glora_{name}") for name in ("a1", "a2", "b1", "b2", "bm")},
    ("oft_blocks",): Role.oft_blocks,
    ("oft_diag",): Role.oft_diag,
    ("oft_R", "weight"): Role.oft_r,
    ("oft_R", "*", "weight"): Role.oft_r,
    ("oft_R", "scaled_oft"): Role.oft_scaled,
    ("rescale",): Role.rescale,
    ("lambda_layer",): Role.tlora,
    ("q_layer", "weight"): Role.tlora_q,
    ("p_layer", "weight"): Role.tlora_p,
    # Only an adapter's where the same module has on_input too; grouping.py sees to that.
    ("weight",): Role.ia3_weight,
    ("on_input",): Role.ia3_on_input,
    ("ia3_l",): Role.ia3_l,
    ("ia3_l", "*"): Role.ia3_l,
    ("diff",): Role.diff,
    ("diff_b",): Role.diff_b,
    ("set_weight",): Role.set_weight,
    ("w_norm",): Role.w_norm,
    ("b_norm",): Role.b_norm,
}


def split_suffix(key: str) -> tuple[str, Role, str | None] | None:
    """(module name with prefix, role, adapter's name) of ``key``, or None if its end is no adapter's.

    The longest suffix wins, and a literal one before one with an adapter's name in it.
    """
    stem, *ending = key.rsplit(".", 3)
    found = _meaning(tuple(ending))
    if found is None or found[1] is Role.ia3_weight:
        return _of_processor(stem, ending) or (found and (key[:-len(".weight")], Role.ia3_weight, None))
    length, role, name = found
    return ".".join((stem, *ending[:-length])), role, name


@lru_cache(maxsize=1024)
def _meaning(ending: tuple[str, ...]) -> tuple[int, Role, str | None] | None:
    """(components of the suffix, role, adapter's name) of the last components of a key, at most three."""
    for length in range(len(ending), 0, -1):
        first, *rest = ending[-length:]
        role = SUFFIXES.get((first, *rest))
        if role is not None:
            return length, role, None
        if rest:
            role = SUFFIXES.get((first, "*", *rest[1:]))
            if role is not None:
                return length, role, rest[0]
    return None


def _of_processor(stem: str, ending: list[str]) -> tuple[str, Role, None] | None:
    """The attention processors of old diffusers: X.processor.to_q_lora.down.weight"""
    *before, which, last = ("", stem, *ending)
    if last != "weight" or which not in ("up", "down") or not before[-1].endswith("_lora"):
        return None
    name = ".".join((stem, *ending)[:-2])
    return name.removesuffix("_lora").replace(".processor.", "."), Role(which), None
