"""Dense float64 references of every kind of adapter, with random tensors to go with them.

Written from the published formulas, in numpy, without any code of the package. A kind is a function
(rng, out, inp, rank, alpha, store) -> Sample; ``store`` rounds an array to the dtype of the file and
returns the tensor, and the reference is computed from what was stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

#: (base weight, strength) -> change of it, both [out, in] float64.
Change = Callable[[np.ndarray, float], np.ndarray]


@dataclass
class Sample:
    """``tensors``: role name -> tensor. ``change`` and ``bias``: what they do to weight and bias, or None."""

    tensors: dict[str, torch.Tensor]
    change: Change | None = None
    bias: Change | None = None
    needs_base: bool = False
    extra: dict = field(default_factory=dict)


def f64(tensor) -> np.ndarray:
    return tensor.to(torch.float32).double().numpy() if tensor.dtype.itemsize < 4 else tensor.double().numpy()


def additive(dense: np.ndarray) -> Change:
    return lambda weight, strength: strength * dense


def split(size: int) -> tuple[int, int]:
    """The most even factors of ``size``, smaller first."""
    first = max(d for d in range(1, int(size**0.5) + 1) if size % d == 0)
    return first, size // first


def number(value) -> torch.Tensor:
    return torch.tensor(float(value))


def with_alpha(tensors, alpha):
    return tensors if alpha is None else {**tensors, "alpha": number(alpha)}


def lora(rng, out, inp, rank, alpha, store):
    down, up = store(rng.normal(size=(rank, inp))), store(rng.normal(size=(out, rank)))
    scale = 1.0 if alpha is None else alpha / rank
    return Sample(with_alpha({"down": down, "up": up}, alpha), additive(scale * f64(up) @ f64(down)))


def lora_conv(rng, out, inp, rank, alpha, store):
    sample = lora(rng, out, inp, rank, alpha, store)
    for name in ("down", "up"):
        sample.tensors[name] = sample.tensors[name][:, :, None, None].contiguous()
    return sample


def lora_bias(rng, out, inp, rank, alpha, store):
    sample = lora(rng, out, inp, rank, alpha, store)
    sample.tensors["up_bias"] = store(rng.normal(size=out))
    bias = (1.0 if alpha is None else alpha / rank) * f64(sample.tensors["up_bias"])
    sample.bias = lambda base, strength: strength * bias
    return sample


def _lokr(rng, out, inp, rank, alpha, store, whole, rank1=None):
    """W1 and W2, whole where ``whole`` says so, else products of rank ``rank1`` and ``rank``.

    The scale is alpha / rank, unless both are whole.
    """
    (a, c), (b, d) = split(out), split(inp)
    tensors, factors = {}, []
    for which, rows, columns in ((1, a, b), (2, c, d)):
        if which in whole:
            matrix = tensors[f"lokr_w{which}"] = store(rng.normal(size=(rows, columns)))
            factors.append(f64(matrix))
        else:
            inner = rank1 if which == 1 and rank1 else rank
            left = tensors[f"lokr_w{which}_a"] = store(rng.normal(size=(rows, inner)))
            right = tensors[f"lokr_w{which}_b"] = store(rng.normal(size=(inner, columns)))
            factors.append(f64(left) @ f64(right))
    scale = 1.0 if alpha is None or len(whole) == 2 else alpha / rank
    return Sample(with_alpha(tensors, alpha), additive(scale * np.kron(*factors)))


def lokr(*arguments):
    return _lokr(*arguments, whole={1})


def lokr_w2_whole(*arguments):
    return _lokr(*arguments, whole={2})


def lokr_both(*arguments):
    return _lokr(*arguments, whole=set())


def lokr_two_ranks(rng, out, inp, rank, alpha, store):
    """Two decomposed factors of different ranks: alpha is over that of W2."""
    return _lokr(rng, out, inp, rank, alpha, store, whole=set(), rank1=rank + 2)


def lokr_full(rng, out, inp, rank, alpha, store):
    """As ai-toolkit writes it: no decomposition, and an alpha that means nothing."""
    return _lokr(rng, out, inp, rank, 9999999999.0 if alpha is None else alpha, store, whole={1, 2})


def loha(rng, out, inp, rank, alpha, store):
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    shapes = ((out, rank), (rank, inp)) * 2
    tensors = {name: store(rng.normal(size=shape)) for name, shape in zip(names, shapes)}
    a1, b1, a2, b2 = (f64(tensors[name]) for name in names)
    scale = 1.0 if alpha is None else alpha / rank
    return Sample(with_alpha(tensors, alpha), additive(scale * (a1 @ b1) * (a2 @ b2)))


def glora(rng, out, inp, rank, alpha, store):
    shapes = {"glora_a1": (inp, rank), "glora_a2": (rank, inp), "glora_b1": (out, rank), "glora_b2": (rank, inp)}
    tensors = {name: store(rng.normal(size=shape)) for name, shape in shapes.items()}
    a1, a2, b1, b2 = (f64(tensors[name]) for name in shapes)
    scale = 1.0 if alpha is None else alpha / rank
    return Sample(with_alpha(tensors, alpha), lambda w, s: s * scale * (w @ a1 @ a2 + b1 @ b2), needs_base=True)


def glora_old(rng, out, inp, rank, alpha, store):
    sample = glora(rng, out, inp, rank, alpha, store)
    t = sample.tensors
    t["glora_a1"], t["glora_a2"], t["glora_b1"], t["glora_b2"] = (
        t["glora_a2"], t["glora_a1"], t["glora_b2"], t["glora_b1"])
    return sample


def magnitude(change: Change, m: np.ndarray, axis: int, convention: str) -> Change:
    """DoRA over ``change``: W' = m (W + D) / norm along ``axis``, of the base for rows in ComfyUI."""

    def apply(weight, strength):
        changed = weight + change(weight, 1.0)
        norm = np.linalg.norm(weight if convention == "comfyui" and axis == 1 else changed, axis=axis, keepdims=True)
        return strength * (m * changed / norm - weight)

    return apply


def _dora(rng, out, inp, rank, alpha, store, axis, flat=False, convention="comfyui", below=lora):
    sample = below(rng, out, inp, rank, alpha, store)
    shape = (out, 1) if axis == 1 else (1, inp)
    m = sample.tensors["dora"] = store(1 + rng.random(size=shape))
    if flat:
        sample.tensors["dora"] = m.flatten()
    return Sample(sample.tensors, magnitude(sample.change, f64(m), axis, convention), needs_base=True)


def dora(*arguments):
    return _dora(*arguments, axis=1)


def dora_flat(*arguments):
    return _dora(*arguments, axis=1, flat=True)


def dora_columns(*arguments):
    return _dora(*arguments, axis=0)


def dora_trainer(*arguments):
    return _dora(*arguments, axis=1, convention="trainer")


def dora_lokr(*arguments):
    return _dora(*arguments, axis=1, below=lokr)


def cayley(blocks: np.ndarray, bound: float) -> np.ndarray:
    """(I + Q)(I - Q)^-1 of Q = B - B^T, its norm over all blocks kept below ``bound`` if that is not 0."""
    q = blocks - blocks.swapaxes(-1, -2)
    if bound and np.linalg.norm(q) > bound:
        q = q * bound / np.linalg.norm(q)
    one = np.eye(q.shape[-1])
    return (one + q) @ np.linalg.inv(one - q)


def block_diagonal(blocks: np.ndarray) -> np.ndarray:
    count, size, _ = blocks.shape
    result = np.zeros((count * size, count * size))
    for index, block in enumerate(blocks):
        result[index * size:(index + 1) * size, index * size:(index + 1) * size] = block
    return result


def _oft(rng, out, inp, rank, alpha, store, convention):
    count, size = split(out)
    blocks = store(0.3 * rng.normal(size=(count, size, size)))
    rescale = store(1 + 0.1 * rng.normal(size=(out, 1)))
    bound = (alpha or 0.0) * (out if convention == "trainer" else 1)
    turn = block_diagonal(cayley(f64(blocks), bound)).T

    def change(weight, strength):
        if convention == "comfyui":
            return strength**2 * (turn @ weight - weight)
        return strength * (f64(rescale) * (turn @ weight) - weight)

    return Sample(with_alpha({"oft_blocks": blocks, "rescale": rescale}, alpha or 0.0), change, needs_base=True)


def oft(*arguments):
    return _oft(*arguments, convention="comfyui")


def oft_trainer(*arguments):
    return _oft(*arguments, convention="trainer")


def boft(rng, out, inp, rank, alpha, store):
    """m butterfly stages, each a permutation, a block-diagonal rotation and the permutation back."""
    size = 2
    count = out // size
    stages = 1
    while out % (2**stages * size) == 0:
        stages += 1
    blocks = store(0.3 * rng.normal(size=(stages, count, size, size)))
    rotations = cayley(f64(blocks), alpha or 0.0)

    def change(weight, strength):
        turned = weight
        for stage in range(stages):
            half = 2**stage * size // 2
            # Row i of a group of 2 * half meets row i + half: their new neighbours.
            order = np.arange(out).reshape(-1, 2, half).swapaxes(1, 2).flatten()
            mixing = np.eye(out)[order]
            rotation = strength * rotations[stage] + (1 - strength) * np.eye(size)
            turned = mixing.T @ block_diagonal(rotation) @ mixing @ turned
        return strength * (turned - weight)

    return Sample(with_alpha({"oft_blocks": blocks}, alpha or 0.0), change, needs_base=True)


def peft_oft(rng, out, inp, rank, alpha, store, shared=False):
    count, size = split(inp)
    packed = store(0.2 * rng.normal(size=(1 if shared else count, size * (size - 1) // 2)))
    q = np.zeros((len(packed), size, size))
    for block, row in zip(q, f64(packed)):
        position = iter(row)
        for i in range(size):
            for j in range(i + 1, size):
                block[i, j] = next(position)
                block[j, i] = -block[i, j]
    powers = [np.linalg.matrix_power(block, p) for block in q for p in range(5)]
    rotations = np.array([np.tensordot([1, 2, 2, 2, 1], powers[5 * i:5 * i + 5], 1) for i in range(len(q))])
    turn = block_diagonal(np.repeat(rotations, count, axis=0) if shared else rotations).T
    return Sample({"oft_r": packed}, lambda w, s: s * (w @ turn - w), needs_base=True)


def peft_oft_shared(*arguments):
    return peft_oft(*arguments, shared=True)


def _ia3(rng, out, inp, rank, alpha, store, on_input):
    factors = store(0.1 * rng.normal(size=inp if on_input else out))
    w = f64(factors)[None, :] if on_input else f64(factors)[:, None]
    return Sample({"ia3_weight": factors, "ia3_on_input": torch.tensor(int(on_input))},
                  lambda base, s: base * s * w, needs_base=True)


def ia3_rows(*arguments):
    return _ia3(*arguments, on_input=False)


def ia3_columns(*arguments):
    return _ia3(*arguments, on_input=True)


def peft_ia3(rng, out, inp, rank, alpha, store):
    factors = store(1 + 0.1 * rng.normal(size=(out, 1)))
    return Sample({"ia3_l": factors}, lambda w, s: s * (f64(factors) - 1) * w,
                  lambda b, s: s * (f64(factors)[:, 0] - 1) * b, needs_base=True)


def peft_ia3_ffn(rng, out, inp, rank, alpha, store):
    factors = store(1 + 0.1 * rng.normal(size=(1, inp)))
    return Sample({"ia3_l": factors}, lambda w, s: s * (f64(factors) - 1) * w, needs_base=True)


def diff(rng, out, inp, rank, alpha, store):
    weight, bias = store(rng.normal(size=(out, inp))), store(rng.normal(size=out))
    return Sample({"diff": weight, "diff_b": bias}, additive(f64(weight)), lambda b, s: s * f64(bias))


def diff_b(rng, out, inp, rank, alpha, store):
    bias = store(rng.normal(size=out))
    return Sample({"diff_b": bias}, None, lambda b, s: s * f64(bias))


def set_weight(rng, out, inp, rank, alpha, store):
    weight = store(rng.normal(size=(out, inp)))
    return Sample({"set_weight": weight}, lambda w, s: s * (f64(weight) - w), needs_base=True)


#: Kind -> function. The names are those of the formulas, not of the package's adapters.
KINDS = {function.__name__: function for function in (
    lora, lora_conv, lora_bias, lokr, lokr_w2_whole, lokr_both, lokr_two_ranks, lokr_full, loha, glora, glora_old,
    dora, dora_flat, dora_columns, dora_trainer, dora_lokr, oft, oft_trainer, boft, peft_oft, peft_oft_shared,
    ia3_rows, ia3_columns, peft_ia3, peft_ia3_ffn, diff, diff_b, set_weight,
)}
