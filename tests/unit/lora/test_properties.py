"""Properties over random models, ranks, alphas, strengths and missing components."""

import expected
import torch
import trees
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_composition import bits, objects, same, traces

from qpatch import lora

settings.register_profile("lora", max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("lora")

LAYERS = {
    "transformer_blocks.0.attn.to_q": ("h", "h"), "transformer_blocks.0.attn.to_k": ("h", "h"),
    "transformer_blocks.0.attn.to_v": ("h", "h"), "transformer_blocks.0.attn.add_q_proj": ("h", "h"),
    "transformer_blocks.0.attn.to_out.0": ("h", "h"), "transformer_blocks.0.img_mlp.net.0.proj": ("f", "h"),
    "transformer_blocks.0.txt_mlp.net.2": ("h", "f"), "transformer_blocks.0.img_mod.1": ("m", "h"),
    "proj_out": ("l", "h"),
}
#: Source layer -> (module, part of its rows).
FUSED = {"attn.to_q": ("attn.to_qkv", 0), "attn.to_k": ("attn.to_qkv", 1), "attn.to_v": ("attn.to_qkv", 2),
         "attn.add_q_proj": ("attn.add_qkv_proj", 0)}

ranks = st.one_of(st.integers(1, 24), st.sampled_from([16, 32, 48, 64, 128, 256]))
strengths = st.one_of(st.just(0.0), st.just(1.0), st.floats(-4, 4), st.floats(-1e4, 1e4))
alphas = st.one_of(st.none(), st.floats(0.125, 512))


@st.composite
def files(draw):
    """(tensors, {layer: change float64}) of a random LoRA; layers, ranks and alphas differ within it."""
    names = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5, unique=True))
    return names, [draw(ranks) for _ in names], [draw(alphas) for _ in names], draw(st.integers(0, 2**16))


@st.composite
def models(draw):
    h, f = draw(st.sampled_from([64, 80, 128])), draw(st.sampled_from([64, 96]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    rank, precision = draw(st.sampled_from([16, 32, 64])), draw(st.sampled_from(["int4", "nvfp4"]))
    return dict(h=h, f=f, dtype=dtype, rank=rank, precision=precision)


def build(options):
    torch.manual_seed(0)
    return trees.qwen(**options)


def write(drawn, options):
    names, ranks, alphas, seed = drawn
    generator = torch.Generator().manual_seed(seed)
    extents = {"h": options["h"], "f": options["f"], "m": 6 * options["h"], "l": 16}
    tensors, changes = {}, {}
    for name, rank, alpha in zip(names, ranks, alphas):
        out, inp = (extents[size] for size in LAYERS[name])
        down = (torch.randn(rank, inp, generator=generator) * 0.1).bfloat16()
        up = (torch.randn(out, rank, generator=generator) * 0.1).bfloat16()
        tensors[f"transformer.{name}.lora_A.weight"], tensors[f"transformer.{name}.lora_B.weight"] = down, up
        if alpha is not None:
            tensors[f"transformer.{name}.alpha"] = torch.tensor(alpha)
        changes[name] = (1.0 if alpha is None else alpha / rank) * up.double() @ down.double()
    return tensors, changes


def effect(root):
    """module -> what its low-rank branch gives, or its weight, float64."""
    found = {}
    for name in {*LAYERS} | {"transformer_blocks.0.attn.to_qkv", "transformer_blocks.0.attn.add_qkv_proj"}:
        try:
            module = root.get_submodule(name)
        except AttributeError:
            continue
        branch = expected.low_rank_of(module)
        found[name] = module.weight.detach().double() if branch is None else branch
    return found


def place(changes, found):
    """The changes of source layers in the modules that hold them."""
    wanted = {name: torch.zeros_like(value) for name, value in found.items()}
    for name, change in changes.items():
        inside = name.removeprefix("transformer_blocks.0.")
        module, part = FUSED.get(inside, (inside, 0))
        rows = wanted[module if module == "proj_out" else f"transformer_blocks.0.{module}"]
        rows[part * len(change):][:len(change)] += change
    return wanted


def finest(dtype, rows):
    """Change of a product by the last bit of its up factor, however small its scale; the downs have norms below 20."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * 20 * rows ** 0.5


def close(one, other, dtype, roundings):
    """Equal up to some roundings of the factors, or of a plain weight."""
    eps = torch.finfo(dtype).eps
    return all((one[name] - value).norm() <= roundings * (eps * value.norm() + finest(dtype, len(value)))
               for name, value in other.items())


@given(models(), st.lists(st.tuples(files(), strengths), min_size=1, max_size=4))
def test_composing_and_resetting_is_the_identity_bit_for_bit(options, stack):
    root = build(options)
    before, ids = bits(root), objects(root)
    try:
        lora.compose(root, [(write(drawn, options)[0], strength) for drawn, strength in stack])
        lora.set_strengths(root, [strength / 2 for _, strength in stack])
    except lora.NonFiniteError:
        # float16 does not hold every strength; what is refused must leave no trace either.
        pass
    lora.reset(root)
    assert same(bits(root), before) and objects(root) == ids and traces(root) == []


@given(models(), files(), st.floats(-4, 4))
def test_the_effect_is_the_strength_times_the_product_of_the_factors(options, drawn, strength):
    root = build(options)
    before = effect(root)
    tensors, changes = write(drawn, options)
    lora.compose(root, [(tensors, strength)])
    after, wanted = effect(root), place(changes, before)
    for name, change in wanted.items():
        error = (after[name] - before[name] - strength * change).norm()
        # A plain weight is rounded itself; of the others a difference is taken here, in float64.
        plain = before[name].norm() * (1 if name == "proj_out" else 1e-12)
        rounding = torch.finfo(options["dtype"]).eps * (abs(strength) * change.norm() + plain)
        assert error <= rounding + finest(options["dtype"], len(change)), name


@given(models(), files(), files(), st.floats(-2, 2), st.floats(-2, 2))
def test_the_order_of_the_files_does_not_matter(options, one, other, first, second):
    one, other = write(one, options)[0], write(other, options)[0]
    ends = []
    for stack in ([(one, first), (other, second)], [(other, second), (one, first)]):
        root = build(options)
        lora.compose(root, stack)
        ends.append(effect(root))
    # The same blocks stand in another order: the products differ by the order of their summands only.
    for name in ends[0]:
        assert (ends[0][name] - ends[1][name]).norm() <= 1e-6 * ends[0][name].norm() or name == "proj_out"
    assert close(*ends, options["dtype"], 1)


@given(models(), files(), st.floats(-2, 2))
def test_a_file_twice_at_one_strength_is_the_file_once_at_twice_the_strength(options, drawn, strength):
    tensors = write(drawn, options)[0]
    twice, once = build(options), build(options)
    lora.compose(twice, [(tensors, strength), (tensors, strength)])
    lora.compose(once, [(tensors, 2 * strength)])
    assert close(effect(twice), effect(once), options["dtype"], 2)


@given(models(), st.lists(st.tuples(files(), st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=3))
def test_changing_strengths_gives_the_bits_of_composing_with_them(options, stack):
    rescaled, direct = build(options), build(options)
    written = [write(drawn, options)[0] for drawn, _, _ in stack]
    lora.compose(rescaled, [(tensors, old) for tensors, (_, old, _) in zip(written, stack)])
    first = bits(rescaled)
    lora.set_strengths(rescaled, [new for _, _, new in stack])
    lora.compose(direct, [(tensors, new) for tensors, (_, _, new) in zip(written, stack)])
    assert same(bits(rescaled), bits(direct))
    lora.set_strengths(rescaled, [old for _, old, _ in stack])
    assert same(bits(rescaled), first)


@given(models(), st.lists(files(), min_size=1, max_size=4))
def test_ranks_are_padded_once_and_stay_below_the_kernels_limit(options, drawn):
    root = build(options)
    lora.compose(root, [(write(one, options)[0], 1.0) for one in drawn])
    for name, module in root.named_modules():
        if not hasattr(module, "proj_down"):
            continue
        wanted = sum(rank for names, ranks, *_ in drawn for layer, rank in zip(names, ranks) if goes_to(layer, name))
        assert module.rank == module.proj_down.shape[1] == module.proj_up.shape[1] <= 1024
        appended = module.rank - options["rank"]
        assert appended % 16 == 0 and (wanted <= appended < wanted + 16 or module.rank >= 1024 - 16)


def goes_to(layer, module):
    inside = layer.removeprefix("transformer_blocks.0.")
    return module == f"transformer_blocks.0.{FUSED.get(inside, (inside,))[0]}"
