"""What one tensor of a file is to its adapter."""

from __future__ import annotations

import enum


class Role(str, enum.Enum):
    """What one tensor is to its adapter. The values are the names used in messages."""

    down = "down"
    up = "up"
    mid = "mid"
    up_bias = "up_bias"
    alpha = "alpha"
    scale = "scale"
    dora = "dora"
    reshape_weight = "reshape_weight"
    lokr_w1 = "lokr_w1"
    lokr_w1_a = "lokr_w1_a"
    lokr_w1_b = "lokr_w1_b"
    lokr_w2 = "lokr_w2"
    lokr_w2_a = "lokr_w2_a"
    lokr_w2_b = "lokr_w2_b"
    lokr_t1 = "lokr_t1"
    lokr_t2 = "lokr_t2"
    hada_w1_a = "hada_w1_a"
    hada_w1_b = "hada_w1_b"
    hada_w2_a = "hada_w2_a"
    hada_w2_b = "hada_w2_b"
    hada_t1 = "hada_t1"
    hada_t2 = "hada_t2"
    glora_a1 = "glora_a1"
    glora_a2 = "glora_a2"
    glora_b1 = "glora_b1"
    glora_b2 = "glora_b2"
    glora_bm = "glora_bm"
    oft_blocks = "oft_blocks"
    oft_diag = "oft_diag"
    oft_r = "oft_r"
    oft_scaled = "oft_scaled"
    rescale = "rescale"
    tlora = "tlora"
    tlora_q = "tlora_q"
    tlora_p = "tlora_p"
    ia3_weight = "ia3_weight"
    ia3_on_input = "ia3_on_input"
    ia3_l = "ia3_l"
    diff = "diff"
    diff_b = "diff_b"
    set_weight = "set_weight"
    w_norm = "w_norm"
    b_norm = "b_norm"

    # Enum's own hash is a Python function; these are dict keys in every loop over a file.
    __hash__ = str.__hash__
    __str__ = str.__str__
