"""Every kind of adapter in every kind of module: the effective change equals the dense float64 reference."""

import expected
import producers
import pytest
import torch
import trees

from qpatch import lora

DIMS = {"qwen-image": {**trees.QWEN_DIMS, "h": 128, "f": 256, "m": 768, "n": 256},
        "z-image": {**trees.Z_DIMS, "h": 128, "f": 256, "m": 512}}
TREES = {"qwen-image": lambda **options: trees.qwen(h=128, f=256, **options),
         "z-image": lambda **options: trees.z_image(h=128, f=256, **options)}
#: Relative error of a product of two factors rounded to the stored dtype, with room for a few roundings more.
ROUNDING = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
#: One producer for each kind of adapter.
BY_KIND = {kind: name for name, rules in producers.PRODUCERS.items() for kind in rules.kinds
           if name not in ("anime-z", "diffsynth")}
CASES = [(family, kind) for family in TREES for kind, name in BY_KIND.items()
         if family in producers.PRODUCERS[name].families]


def rounded_alike(found, wanted, dtype, offset=0.0):
    """Whether ``found`` is ``wanted`` as ``dtype`` holds it, sums having been formed in float32.

    ``offset`` was added to it where it is stored.
    """
    slack = torch.finfo(dtype).eps * (wanted.abs() + offset) + 1e-6 * wanted.abs().max()
    return bool(((found - wanted).abs() <= slack).all())


def check(root, bare, example, strength, dtype):
    """Compare every module of ``root``, composed, with ``bare`` and what was to be added to it."""
    for name, (weight, bias) in expected.changes(example, bare, strength).items():
        module, before = root.get_submodule(name), bare.get_submodule(name)
        branch = expected.low_rank_of(module)
        if branch is not None:
            assert expected.relative(branch - expected.low_rank_of(before), weight) < ROUNDING[dtype], name
        else:
            assert rounded_alike(expected.weight_of(module), expected.weight_of(before) + weight, dtype), name
        if bias.any():
            # A modulation's bias is stored with ones added to its scales.
            assert rounded_alike(expected.bias_of(module), expected.bias_of(before) + bias, dtype, offset=1.0), name


@pytest.mark.parametrize("family, kind", CASES)
def test_the_effective_change_of_every_module_is_the_dense_reference(family, kind):
    torch.manual_seed(0)
    number = CASES.index((family, kind))
    precision, dtype = ("int4", "nvfp4")[number % 2], (torch.bfloat16, torch.float16)[number // 2 % 2]
    root = TREES[family](dtype=dtype, precision=precision)
    twin = TREES[family](dtype=dtype, precision=precision)
    twin.load_state_dict(root.state_dict())
    example = producers.make(BY_KIND[kind], family, kind, rank=5, alpha=1.5, dims=DIMS[family])
    strength = 0.8
    report = lora.compose(root, [(example.tensors, strength)], max_rank=1024)
    assert report.files[0].problem is None
    check(root, twin, example, strength, dtype)
    lora.reset(root)
    for name, value in twin.state_dict().items():
        assert torch.equal(root.state_dict()[name], value), name
