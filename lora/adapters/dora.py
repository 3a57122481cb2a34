"""DoRA: the changed weight, each row (or column) scaled to a learned length.

W' = m * (W + D) / norm, D the change of the adapter below, m the magnitude; the change at
strength S is S (W' - W). Whose norm:

    "trainer"  of W + D, per row or per column as m says (LyCORIS, PEFT, OneTrainer, kohya).
    "comfyui"  per row: of the base W alone; per column: of W + D.

The default is ComfyUI's, where strengths have been tuned with it.
"""

from __future__ import annotations

import torch

from ..errors import ShapeError
from ..keys import Role
from ..layer import Layer
from ..lowrank import to_dense
from ..terms import Delta


def magnitude_axis(layer: Layer, shape: tuple[int, int]) -> int:
    """1 where the magnitude scales rows (norm along axis 1), 0 where it scales columns.

    Files have [out, 1], [out] (PEFT) or [1, in]; a 1-D magnitude is always one per row.
    """
    found = list(layer.raw_shape(Role.dora))
    while len(found) > 2 and found[-1] == 1:
        found.pop()
    out, inp = shape
    if found in ([out], [out, 1]):
        return 1
    if found == [1, inp]:
        return 0
    raise layer.refuse(ShapeError, "the magnitude fits neither the rows nor the columns of the layer", Role.dora,
                       expected=f"[{out}, 1] or [1, {inp}]", found=found)


def decompose(delta: Delta, layer: Layer, shape: tuple[int, int]) -> Delta:
    """``delta`` with the magnitude of ``layer`` applied: a change that depends on the base weight."""
    axis = magnitude_axis(layer, shape)
    magnitude = layer.tensor(Role.dora).float().reshape((-1, 1) if axis == 1 else (1, -1))
    norm_of_base = axis == 1 and layer.rules.convention == "comfyui"

    def rebase(weight, strength):
        changed = weight + _change_at_full_strength(delta, weight)
        norm = torch.linalg.vector_norm(weight if norm_of_base else changed, dim=axis, keepdim=True)
        # As ComfyUI and LyCORIS do: a row of zeros must not divide by zero.
        changed *= magnitude.to(weight) / (norm + torch.finfo(weight.dtype).eps)
        return (changed - weight) * strength

    note = f"DoRA, norm of the {'base' if norm_of_base else 'changed'} weight per {'row' if axis == 1 else 'column'}"
    return Delta(rebase=rebase, note=note)


def _change_at_full_strength(delta, weight):
    if delta.rebase is not None:
        return to_dense(delta.rebase(weight, 1.0)).to(weight)
    return to_dense(delta.terms if delta.dense is None else delta.dense).to(weight)
