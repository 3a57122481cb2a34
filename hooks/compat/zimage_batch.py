"""Hook ``comfy-compat-zimage-batch``: a batch of Nunchaku Z-Image images, each with its own positions.

The fused kernel sees all tokens of the batch as one row after another and takes row n of the packed
rotary table for token n; the table holds the rows of one image. From image two on the positions are
wrong, or the table is too short for the kernel. The table is repeated for the batch before it is packed.

The hooks that pack the table are put on the layers for each forward. ComfyUI 0.21 and later interrupt with a
BaseException, from inside any layer, and torch then calls no hook that would take them off: from the next run on
the table is packed twice, and the packing stops. What an interrupted forward left is taken off before the next.
"""

from types import SimpleNamespace

import torch

from . import Repair, Spot


def whole_batch(table: torch.Tensor, batch: int) -> torch.Tensor:
    """``table`` [1 or batch, tokens, ...] as [1, batch * tokens, ...], image after image."""
    return table.expand(batch, *table.shape[1:]).reshape(1, -1, *table.shape[2:])


def _for_one_image(original, module):
    hook = module.RopeFuseAttentionHook()
    image = torch.zeros(2, 16, 1)
    table = torch.arange(16 * 4 * 4, dtype=torch.float32).reshape(1, 16, 1, 4, 2, 2)
    packed = original(hook, None, (image, None, table), {})[0][2]
    first, second = packed[0, :16], packed[0, 16:32]
    return None if torch.equal(first, second) else "the rotary table covers the first image of a batch only"


def _for_the_batch(original, module):
    def pre_forward(self, module, input_args, input_kwargs):
        x, table = input_args[0], input_args[2]
        if table is not None and x.shape[0] > 1:
            input_args = (*input_args[:2], _kept(self, table, x.shape[0]), *input_args[3:])
        return original(self, module, input_args, input_kwargs)
    return pre_forward


def _kept(hook, table, batch):
    # In the hook's own cache, which it clears after each forward: every layer asks for the same table,
    # and the hook knows a table by its address, so this one has to live as long as its entry does.
    entry = ("qpatch", id(table), batch)
    if entry not in hook.packed_freqs_cis_cache:
        hook.packed_freqs_cis_cache[entry] = (table, whole_batch(table, batch))
    return hook.packed_freqs_cis_cache[entry][1]


def _not_fused(module):
    fused = "fused_qkv_norm_rotary" in vars(module)
    return None if fused else "positions are not fused into the kernel in this release"


class _Left:
    """What an interrupted forward left on the layers."""

    taken_off = False

    def unhook(self):
        self.taken_off = True


def _leaves_them(original, module):
    hook, left = module.RopeFuseTransformerHook(True), _Left()
    hook.attn_hook = left
    original(hook, SimpleNamespace(layers=(), noise_refiner=(), context_refiner=()), ())
    return None if left.taken_off else "an interrupted run leaves its hooks on the layers"


def _takes_them_off(original, module):
    def pre_forward(self, model, input_args):
        left = getattr(self, "attn_hook", None)
        if left is not None:
            left.unhook()
        return original(self, model, input_args)
    return pre_forward


REPAIR = Repair(
    Spot("RopeFuseAttentionHook.pre_forward", _for_one_image, _for_the_batch, absent=_not_fused),
    Spot("RopeFuseTransformerHook.pre_forward", _leaves_them, _takes_them_off, absent="no hooks come and go"),
    fine="the rotary table covers the whole batch",
)
examine, patches = REPAIR.examine, REPAIR.patches
