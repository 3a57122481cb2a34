"""Where source layers live in models: fused and split modules, row orders, FLUX's splits, layers that are not there."""

import expected
import producers
import pytest
import torch
import trees

from qpatch import lora
from qpatch.lora import adapters
from qpatch.lora.errors import ShapeError, UnsupportedAdapter
from qpatch.lora.families import FAMILIES
from qpatch.lora.keys import Role, Target
from qpatch.lora.placement import NoPlace, Places, family_of, locate
from qpatch.lora.terms import Delta

QWEN, Z = FAMILIES["qwen-image"], FAMILIES["z-image"]


def found(root, family, module, part=None):
    """[(module, rows, rows taken of the source)] of one target."""
    return [(place.site.path, (place.rows.start, place.rows.stop), place.source_rows)
            for place in Places(root, family).find(Target(module, part))]


@pytest.mark.parametrize("part, rows", [("q", (0, 64)), ("k", (64, 128)), ("v", (128, 192)), (None, (0, 192))])
@pytest.mark.parametrize("name", ["attn.to_qkv", "attn.add_qkv_proj"])
def test_q_k_and_v_are_thirds_of_a_fused_layer_in_this_order(name, part, rows):
    module = f"transformer_blocks.0.{name}"
    assert found(trees.qwen(), QWEN, module, part) == [(module, rows, None)]


@pytest.mark.parametrize("part, rows", [("w3", (0, 96)), ("w1", (96, 192)), (None, (0, 192))])
@pytest.mark.parametrize("diffusers, name", [(None, "w13"), ("to_qkv", "net.0.proj")])
def test_w3_the_value_comes_before_w1_the_gate(part, rows, diffusers, name):
    root = trees.z_image(diffusers=diffusers)
    assert found(root, Z, "layers.0.feed_forward.w13", part) == [(f"layers.0.feed_forward.{name}", rows, None)]


def test_an_unquantized_model_has_a_module_for_each_part():
    root = trees.qwen(plain=True)
    block = "transformer_blocks.0.attn."
    assert found(root, QWEN, block + "add_qkv_proj", "k") == [(block + "add_k_proj", (0, 64), None)]
    assert found(root, QWEN, block + "to_qkv") == [
        (block + "to_q", (0, 64), slice(0, 64)), (block + "to_k", (0, 64), slice(64, 128)),
        (block + "to_v", (0, 64), slice(128, 192))]


def test_refiners_that_are_not_quantized_are_found_by_what_they_are():
    comfy, diffusers = (trees.z_image(refiners="plain", diffusers=names) for names in (None, "fused_module"))
    ffn, attention = "noise_refiner.0.feed_forward.", "noise_refiner.0.attention."
    assert found(comfy, Z, ffn + "w13", "w1") == [(ffn + "w1", (0, 96), None)]
    assert found(comfy, Z, attention + "qkv", "v") == [(attention + "qkv", (128, 192), None)]
    assert found(diffusers, Z, ffn + "w13", "w1") == [(ffn + "net.0.proj", (96, 192), None)]
    assert found(diffusers, Z, attention + "qkv", "v") == [(attention + "to_v", (0, 64), None)]


def test_the_fused_module_of_nunchakus_z_image_holds_qkv_and_norms():
    root = trees.z_image(diffusers="fused_module")
    block = "layers.0.attention."
    assert found(root, Z, block + "qkv", "k") == [(block + "fused_module.qkv", (64, 128), None)]
    assert found(root, Z, block + "q_norm") == [(block + "fused_module.norm_q_weight", (0, 16), None)]


def test_other_names_of_the_diffusers_class_are_known():
    root = trees.z_image(diffusers="to_qkv")
    for canonical, name in (("layers.0.attention.out", "layers.0.attention.to_out.0"),
                            ("layers.0.feed_forward.w2", "layers.0.feed_forward.net.2"),
                            ("x_embedder", "all_x_embedder.2-1"), ("final_layer.linear", "all_final_layer.2-1.linear"),
                            ("layers.0.attention.k_norm", "layers.0.attention.norm_k")):
        assert found(root, Z, canonical)[0][0] == name


@pytest.mark.parametrize("diffusers", ["fused_module", "to_qkv"])
@pytest.mark.parametrize("refiners", ["fused", "plain"])
@pytest.mark.parametrize("producer", ["musubi", "diffusion-pipe"])
def test_split_and_fused_files_change_the_diffusers_class_alike(diffusers, refiners, producer):
    torch.manual_seed(1)
    root = trees.z_image(diffusers=diffusers, refiners=refiners)
    bare = {name: value.detach().clone() for name, value in root.named_parameters()}
    example = producers.make(producer, "z-image", rank=3, dims=trees.Z_DIMS)
    report = lora.compose(root, [(example.tensors, 0.5)])
    assert report.complete and report.files[0].applied == report.files[0].total == len(example.layers)
    for target, sample in example.layers.items():
        for place in Places(root, Z).find(Target(*target.rstrip("]").split("[")) if "[" in target else Target(target)):
            wanted = 0.5 * torch.from_numpy(sample.change(None, 1.0))[place.source_rows or slice(None)]
            assert expected.relative(_grown(place, bare), wanted) < 6e-3, place.site.path


def _grown(place, bare):
    """What was added to the rows of a place."""
    site = place.site
    if hasattr(site, "prefix"):
        name = next(name for name in bare if name.endswith(site.prefix + "proj_up") and bare[name].shape[0] == site.out
                    and name.startswith(site.path.rpartition(".")[0]))
        before = torch.nn.Module()
        before.proj_up, before.proj_down = bare[name], bare[name.replace("proj_up", "proj_down")]
        return (trees.effective(site.owner, site.prefix) - trees.effective(before))[place.rows]
    grown = getattr(site.owner, site.attribute).detach().double() - bare[f"{site.path}.weight"].double()
    # A plain weight is rounded once more.
    return grown[place.rows]


@pytest.mark.parametrize("parts", ["q", "v", "qv", "qk", "kv"])
def test_missing_parts_leave_their_rows_untouched(parts):
    torch.manual_seed(0)
    root = trees.qwen()
    layer = root.get_submodule("transformer_blocks.0.attn.to_qkv")
    before = trees.effective(layer)
    example = producers.make("lightning", "qwen-image", rank=5, dims=trees.QWEN_DIMS)
    wanted = torch.zeros_like(before)
    tensors = {}
    for number, part in enumerate(parts):
        spelled = f"transformer_blocks.0.attn.to_{part}."
        tensors.update({key: value for key, value in example.tensors.items() if key.startswith(spelled)})
        # Each part has a rank and an alpha of its own.
        tensors[spelled + "lora_down.weight"] = tensors[spelled + "lora_down.weight"][:5 - number]
        tensors[spelled + "lora_up.weight"] = tensors[spelled + "lora_up.weight"][:, :5 - number]
        tensors[spelled + "alpha"] = torch.tensor(1.0 + number)
        product = tensors[spelled + "lora_up.weight"].double() @ tensors[spelled + "lora_down.weight"].double()
        wanted[64 * "qkv".index(part):][:64] = (1.0 + number) / (5 - number) * product
    lora.compose(root, [(tensors, 1.0)])
    added = trees.effective(layer) - before
    assert expected.relative(added, wanted) < 6e-3
    for part in set("qkv") - set(parts):
        assert not added[64 * "qkv".index(part):][:64].any()


def test_of_a_fused_layer_that_the_file_holds_in_parts_too_only_the_parts_are_applied():
    torch.manual_seed(0)
    root, twin = trees.z_image(), trees.z_image()
    twin.load_state_dict(root.state_dict())
    both = producers.make("anime-z", "z-image", dims=trees.Z_DIMS)
    parts = {key: value for key, value in both.tensors.items() if "attention_qkv" not in key}
    report = lora.compose(root, [(both.tensors, 1.0)])
    lora.compose(twin, [(parts, 1.0)])
    for name, value in twin.state_dict().items():
        assert torch.equal(root.state_dict()[name], value), name
    assert report.files[0].misses and all("attention_qkv" in key for key, _ in report.files[0].misses)


def test_layers_that_the_model_does_not_have_are_misses_with_their_keys():
    root = trees.qwen(blocks=1)
    example = producers.make("peft", "qwen-image", blocks=2, dims=trees.QWEN_DIMS)
    file = lora.compose(root, [(example.tensors, 1.0)]).files[0]
    assert (file.applied, file.total) == (20, 34) and len(file.misses) == 14
    key, reason = file.misses[0]
    assert key in example.tensors and reason.startswith("the model has no layer transformer_blocks.1.")


def test_modules_that_are_to_be_left_out_are_misses_with_the_reason_given():
    root = trees.qwen()

    def leave_out(name, module):
        return "switched off" if hasattr(module, "wzeros") else None

    example = producers.make("peft", "qwen-image", dims=trees.QWEN_DIMS)
    file = lora.compose(root, [(example.tensors, 1.0)], leave_out=leave_out).files[0]
    assert [reason for _, reason in file.misses] == ["switched off"] * 2
    assert not hasattr(root.transformer_blocks[0].img_mod[1], "qpatch_lora_up")


def test_a_layer_of_another_size_is_refused_with_file_key_and_sizes():
    example = producers.make("peft", "qwen-image", dims={**trees.QWEN_DIMS, "h": 32})
    root = trees.qwen()
    with pytest.raises(ShapeError) as caught:
        lora.plan(root, [(example.tensors, 1.0)])
    error = caught.value
    assert error.file == "<dict>" and error.key in example.tensors
    assert error.expected == [64, 64] and error.found == [32, 32]


def test_the_transformer_is_found_inside_wrappers_and_told_from_other_models():
    model, outer = trees.z_image(), torch.nn.Module()
    outer.model = torch.nn.Module()
    outer.model.diffusion_model = model
    assert locate(outer) == (model, Z) and locate(trees.qwen())[1] is QWEN
    assert family_of(outer) is Z and family_of(trees.qwen(plain=True)) is None
    flux = trees.tree({"transformer_blocks.0.ff.net.2": trees.linear(2, 2)})
    assert family_of(flux) is None


class TestFlux:
    """Names of nunchaku's second FLUX.1 class. Opening FLUX files is out of scope; where their layers go is not."""

    @pytest.fixture
    def root(self):
        block, single = "transformer_blocks.0.", "single_transformer_blocks.0."
        return trees.tree({
            block + "attn.to_qkv": trees.SVDQW4A4Linear(64, 192),
            block + "attn.add_qkv_proj": trees.SVDQW4A4Linear(64, 192),
            block + "norm1.linear": trees.AWQW4A16Linear(64, 384),
            block + "ff.net.2": trees.SVDQW4A4Linear(128, 64),
            single + "norm.linear": trees.AWQW4A16Linear(64, 192),
            single + "attn.to_qkv": trees.SVDQW4A4Linear(64, 192),
            single + "attn.to_out": trees.SVDQW4A4Linear(64, 64),
            single + "mlp_fc1": trees.SVDQW4A4Linear(64, 256),
            single + "mlp_fc2": trees.SVDQW4A4Linear(256, 64)})

    def test_the_output_of_a_single_block_is_split_by_its_input_columns(self, root):
        down, up, bias = torch.randn(3, 320), torch.randn(64, 3), torch.randn(64)
        target = Target("single_transformer_blocks.0.proj_out")
        adapter = adapters.build(target, {Role.down: down, Role.up: up, Role.diff_b: bias})
        places = Places(root, None).find(target, adapter.shape)
        delta = adapter.delta()
        assert [place.site.path.rpartition("0.")[2] for place in places] == ["attn.to_out", "mlp_fc2"]
        cuts = [place.cut(delta) for place in places]
        products = [(cut.terms[0].up @ cut.terms[0].down) for cut in cuts]
        assert torch.allclose(torch.cat(products, 1), up @ down)
        # Both outputs are added, so that the bias belongs to one of them only.
        assert torch.equal(cuts[0].bias, bias) and cuts[1].bias is None

    def test_a_split_layer_of_another_width_is_refused(self, root):
        with pytest.raises(ShapeError, match=r"expected \[64, 320\], found \[64, 319\]"):
            Places(root, None).find(Target("single_transformer_blocks.0.proj_out"), (64, 319))

    def test_what_needs_the_whole_weight_cannot_be_split(self, root):
        place = Places(root, None).find(Target("single_transformer_blocks.0.proj_out"))[0]
        with pytest.raises(UnsupportedAdapter, match="keeps in several"):
            place.cut(Delta(rebase=lambda weight, strength: weight))

    @pytest.mark.parametrize("target, name, rows", [
        (("transformer_blocks.0.attn.to_qkv", "k"), "attn.to_qkv", (64, 128)),
        (("transformer_blocks.0.attn.add_qkv_proj", "v"), "attn.add_qkv_proj", (128, 192)),
        (("single_transformer_blocks.0.attn.to_qkv", "q"), "attn.to_qkv", (0, 64)),
        (("single_transformer_blocks.0.proj_mlp", None), "mlp_fc1", (0, 256)),
        (("transformer_blocks.0.ff.net.2", None), "ff.net.2", (0, 64)),
    ])
    def test_other_layers_go_to_their_fused_or_renamed_modules(self, root, target, name, rows):
        (place,) = Places(root, None).find(Target(*target))
        assert place.site.path.endswith(name) and (place.rows.start, place.rows.stop) == rows

    @pytest.mark.parametrize("name, splits", [
        ("transformer_blocks.0.norm1.linear", 6),
        ("single_transformer_blocks.0.norm.linear", 3),
    ])
    def test_modulation_rows_are_interleaved_by_the_number_of_their_chunks(self, root, name, splits):
        (place,) = Places(root, None).find(Target(name))
        rows = torch.arange(splits * 64)
        stored = place.site.stored(rows)
        assert stored[:splits].tolist() == [64 * chunk for chunk in range(splits)]
        assert torch.equal(place.site.natural(stored), rows)

    def test_a_layer_that_is_not_there_has_no_place(self, root):
        with pytest.raises(NoPlace, match="the model has no layer single_transformer_blocks.1.proj_out"):
            Places(root, None).find(Target("single_transformer_blocks.1.proj_out"))
