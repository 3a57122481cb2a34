"""ComfyUI's parsed patches, back as the tensors of a LoRA file.

Nodes that weigh blocks one by one, and conditioning hooks, parse a LoRA with ComfyUI's code and hand
over ``{model key: adapter}``. Written as a file again, they take the one path there is.
"""

from __future__ import annotations

import torch

from qpatch.hooks.adapter_class import is_comfyui_s

#: Name of a ComfyUI adapter class -> suffixes of its ``weights``, in order.
_ADAPTERS = {
    "lora": ("lora_up.weight", "lora_down.weight", "alpha", "lora_mid.weight", "dora_scale", "reshape_weight"),
    "loha": ("hada_w1_a", "hada_w1_b", "alpha", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2", "dora_scale"),
    "lokr": ("lokr_w1", "lokr_w2", "alpha", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "lokr_t2",
             "dora_scale"),
    "glora": ("a1.weight", "a2.weight", "b1.weight", "b2.weight", "alpha", "dora_scale"),
    "oft": ("oft_blocks", "rescale", "alpha", "dora_scale"),
    "boft": ("oft_blocks", "rescale", "alpha", "dora_scale"),
}
_PREFIX = "diffusion_model."


def as_file(key, patch, family) -> dict[str, torch.Tensor] | None:
    """The tensors that a LoRA file would hold for one patch, or None if it is nothing that such a file says.

    key: a key of the model's state dict, or (key, (axis, start, length)) for a part of the rows.
    patch: an adapter, or ("diff", ...) or ("set", ...).
    """
    name, offset, function = (key, None, None) if isinstance(key, str) else (*key, None, None)[:3]
    stem, _, parameter = name.removeprefix(_PREFIX).rpartition(".")
    source = _source(stem, offset, family)
    if source is None or function is not None or parameter not in ("weight", "bias"):
        return None
    tensors = _tensors(patch, parameter)
    return tensors and {f"{_PREFIX}{source}.{suffix}": tensor for suffix, tensor in tensors.items()}


def _source(stem: str, offset, family) -> str | None:
    """The name under which a LoRA file speaks of the module ``stem``, or of the rows of it that ``offset`` means."""
    place = family.find(stem)
    if place is None or offset is None:
        return place and stem
    axis, start, length = offset
    module = family.module(place[0])
    if axis != 0 or start % length or start // length >= len(module.parts):
        return None
    _, names = module.parts[start // length]
    return place[0].removesuffix(module.name) + names[0]


def _tensors(patch, parameter: str) -> dict[str, torch.Tensor] | None:
    suffixes = _ADAPTERS.get(getattr(patch, "name", None))
    if suffixes is not None and parameter == "weight" and is_comfyui_s(patch):
        values = zip(suffixes, patch.weights)
        return {suffix: torch.as_tensor(value) for suffix, value in values if value is not None}
    if not isinstance(patch, tuple) or len(patch) not in (1, 2):
        return None
    kind, values = patch if len(patch) == 2 else ("diff", patch)
    known = {("diff", "weight"): "diff", ("diff", "bias"): "diff_b", ("set", "weight"): "set_weight"}
    suffix = known.get((kind, parameter))
    return suffix and {suffix: values[0]}
