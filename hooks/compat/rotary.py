"""Hook ``comfy-compat-rotary``: ``comfy.ldm.qwen_image.model.apply_rotary_emb``, while ComfyUI lacks it.

ComfyUI dropped the function as unused and put it back for Nunchaku's sake; for the releases between,
the Qwen-Image node of ComfyUI-nunchaku cannot be imported. Functions of this name elsewhere in ComfyUI
take another table and give blank pictures, so none of them stands in for it.
"""

from qpatch.finding import needed, not_needed
from qpatch.patching import Supply


def apply_rotary_emb(x, freqs_cis):
    """Rotate the channel pairs of ``x``.

    x          [..., channels], any float dtype; the pairs are neighbours: (0, 1), (2, 3), ...
    freqs_cis  [..., channels / 2, 2, 2], one rotation matrix for each pair, broadcast against ``x``.
    Returns ``x``'s shape, in the dtype that both promote to. An ``x`` without tokens comes back as it is.
    """
    if x.shape[1] == 0:
        return x
    first, second = x.reshape(*x.shape[:-1], -1, 1, 2).unbind(-1)
    left, right = freqs_cis.unbind(-1)
    return (left * first + right * second).reshape(x.shape)


def examine(module):
    if "apply_rotary_emb" in vars(module):
        return not_needed("apply_rotary_emb is there")
    return needed("apply_rotary_emb is missing, and ComfyUI-nunchaku's Qwen-Image node imports it")


def patches(module):
    return [Supply(module, "apply_rotary_emb", apply_rotary_emb)]
