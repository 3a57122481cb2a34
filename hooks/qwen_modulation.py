"""Hook ``qwen-modulation``: LoRA on img_mod.1 and txt_mod.1 of Nunchaku Qwen-Image.

The quantized modulation layers give their rows interleaved, [dim, 6], where the original layer (and
every LoRA trained on it) has [6, dim]; the block's forward turns them. qpatch.lora places the rows of
a LoRA in that order and adds its branch to the layer's own output, so the forward stays upstream's.
What could go wrong is that a release changes the order: so the forward is tried with a recognisable
vector, and only a block class that was seen to turn interleaved rows is marked as such. Without the
mark the loader leaves these layers out and says so.
"""

from __future__ import annotations

import torch

from qpatch.finding import incompatible, needed
from qpatch.patching import Supply

from .lora_loader.options import INTERLEAVED, ROWS

BLOCK = "NunchakuQwenImageTransformerBlock"
_DIM = 4


def examine(module):
    try:
        order = order_of_rows(vars(module)[BLOCK])
    except Exception as error:
        # The trial calls upstream code with stub layers: whatever it raises means that the code has changed.
        return incompatible(f"{BLOCK} could not be tried: {type(error).__name__}: {error}")
    if order != INTERLEAVED:
        return incompatible(f"{BLOCK} takes its modulation rows {order}; known is {INTERLEAVED}")
    return needed("LoRA on img_mod.1 and txt_mod.1 is placed in the interleaved row order of the quantized layers")


def patches(module):
    return [Supply(vars(module)[BLOCK], ROWS, INTERLEAVED)]


class _Seen(Exception):
    """Carries the hidden states that reached the attention."""


def _attention(hidden_states, **_):
    raise _Seen(hidden_states)


def order_of_rows(cls) -> str:
    """How ``cls.forward`` takes the 6 * dim outputs of a modulation layer: "interleaved", "planar" or "another way".

    A block with stub layers gets modulation rows 0, 1, 2, ... and hidden states of zero; what reaches the
    attention is then the shift: the first sixth of the rows in the order that the forward uses.
    """
    block = cls.__new__(cls)
    torch.nn.Module.__init__(block)
    block.scale_shift = 0
    rows = torch.arange(6.0 * _DIM).unsqueeze(0)
    for stream in ("img", "txt"):
        setattr(block, f"{stream}_mod", lambda temb: rows.clone())
        setattr(block, f"{stream}_norm1", lambda states: states)
    block.attn = _attention
    zero = torch.zeros(1, 1, _DIM)
    try:
        block.forward(hidden_states=zero, encoder_hidden_states=zero, encoder_hidden_states_mask=None, temb=zero[0])
    except _Seen as seen:
        shift = seen.args[0].flatten()
        known = {INTERLEAVED: rows[0, 0::6], "planar": rows[0, :_DIM]}
        return next((name for name, expected in known.items() if torch.equal(shift, expected)), "another way")
    raise LookupError("its forward does not call attn")
