"""Writing a layer's basis back into its ``comfy_quant`` configuration."""

from __future__ import annotations

from comfy_kitchen.tensor import get_layout_class

from . import basis, config, layouts


def declare(module, sd: dict, prefix: str) -> dict:
    """``sd``, in which ComfyUI has written the layer ``module``, with the declaration of its rotated basis.

    The logical shape is written as well where the stored one is padded, as the converters of such files do:
    it cannot be told from the stored one.
    """
    key = f"{prefix}comfy_quant"
    weight = basis.unwrapped(getattr(module, "weight", None))
    if weight is None or key not in sd:
        return sd
    layout = get_layout_class(weight._layout_cls)
    if not issubclass(layout, layouts.RotatedLayout) or layout.GROUP_SIZE == 1:
        return sd
    settings = config.decode(sd[key])
    settings.update(convrot=True, convrot_groupsize=layout.GROUP_SIZE)
    shape = tuple(weight.shape)
    # Banks of experts have three dimensions, and no shape of their own in a file.
    if len(shape) == 2 and hasattr(layout, "get_padded_shape") and layout.get_padded_shape(shape) != shape:
        settings["orig_shape"] = list(shape)
    sd[key] = config.encode(settings)
    return sd
