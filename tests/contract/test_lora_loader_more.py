"""What only real ComfyUI has: its LoRA code as the reference, its samplers and schedules, its nodes, dynamic VRAM."""

import gc

import pytest
import torch
from emulation import effect, merging, world
from emulation.cases import load
from emulation.effect import FAMILIES, TOLERANCE, Pairs, example
from emulation.kinds import KindCases

import qpatch

pytestmark = [pytest.mark.comfyui, pytest.mark.nunchaku,
              pytest.mark.skipif(world.missing() is not None, reason=f"{world.missing()} is not set")]

#: What ComfyUI reads, and a strength that makes it a visible change. Its "set" takes no strength.
READ_BY_COMFYUI = {"lora": 0.02, "lokr": 0.02, "lokr_w2_whole": 0.02, "lokr_both": 0.01, "lokr_full": 0.02,
                   "loha": 0.005, "glora": 0.3, "glora_old": 0.3, "dora": 0.3, "dora_columns": 0.3, "dora_lokr": 0.02,
                   "oft": 0.3, "boft": 0.3, "diff": 0.3, "diff_b": 0.3, "set_weight": 1.0}


@pytest.fixture(scope="module")
def pairs():
    qpatch.activate()
    world.enter(world.checkouts())
    yield Pairs()


class TestKindsOnCheckouts(KindCases):
    pass


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", READ_BY_COMFYUI)
def test_every_kind_that_comfyui_reads_has_the_effect_it_has_there(pairs, family, kind, monkeypatch):
    import comfy.sd

    monkeypatch.setenv("QPATCH_MAX_RANK", "900")
    pair, strength = pairs(family), READ_BY_COMFYUI[kind]
    file = example(family, "comfyui extract" if kind == "set_weight" else "simpletuner lycoris", kind)
    plain, _ = comfy.sd.load_lora_for_models(pair.plain, None, file.tensors, strength, 0)
    wanted = pair.run(plain)
    del plain
    got = pair.run(load(pair.quantized, file, strength))
    assert torch.equal(pair.run(pair.plain), pair.plain_base)
    assert effect.mismatch(got, pair.base, wanted, pair.plain_base) < TOLERANCE


def sample(pair, patcher, hooks=None, steps=3):
    """A few steps of a sampler with guidance; ``hooks`` are on the positive conditioning only."""
    import comfy.sample

    generator = torch.Generator().manual_seed(11)
    shape = pair.inputs["x"].shape
    noise = torch.randn(shape, generator=generator)
    positive, negative = (torch.randn(1, 7, 96, generator=generator) for _ in range(2))
    conditioning = {"hooks": hooks} if hooks is not None else {}
    conditionings = [[positive, conditioning]], [[negative, {}]]
    return comfy.sample.sample(patcher, noise, steps, 2.0, "euler", "simple", *conditionings, torch.zeros(shape),
                               disable_pbar=True, seed=1)


def schedule(file, strength, *keyframes):
    """A LoRA on conditioning whose strength follows (strength, start percent) keyframes."""
    import comfy.hooks

    group = comfy.hooks.create_hook_lora(file.tensors, strength, 0.0)
    frames = comfy.hooks.HookKeyframeGroup()
    for value, start in keyframes:
        frames.add(comfy.hooks.HookKeyframe(strength=value, start_percent=start))
    if keyframes:
        group.set_keyframes_on_hooks(frames)
    return group


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keyframes", [(), ((0.0, 0.0), (1.0, 0.3), (0.5, 0.7))])
def test_a_sampler_with_a_scheduled_lora_gives_what_it_gives_on_the_unquantized_model(pairs, family, keyframes):
    pair, file = pairs(family), example(family, "comfyui extract")
    plain_base, base = sample(pair, pair.plain), sample(pair, pair.quantized)
    wanted = sample(pair, pair.plain, schedule(file, 0.02, *keyframes))
    for _ in range(2):
        got = sample(pair, pair.quantized, schedule(file, 0.02, *keyframes))
        assert effect.mismatch(got, base, wanted, plain_base) < TOLERANCE
    assert torch.equal(sample(pair, pair.quantized), base)
    assert pair.bare()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sampler_gives_the_same_twice_with_a_lora_and_the_base_without(pairs, family):
    pair, file = pairs(family), example(family)
    base, patcher = sample(pair, pair.quantized), load(pair.quantized, file, 0.02)
    first = sample(pair, patcher)
    assert not torch.allclose(first, base, atol=1e-3)
    assert torch.equal(sample(pair, patcher), first)
    assert torch.equal(sample(pair, pair.quantized), base)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scheduled_model_as_lora_acts_on_the_unquantized_layers_beside_a_lora(pairs, family):
    import comfy.hooks
    import comfy.sd

    pair, twin, file = pairs(family), pairs(family, twin=True), example(family)

    def scheduled(model):
        return comfy.hooks.create_hook_model_as_lora(comfy.hooks.get_patch_weights_from_model(model), {}, 0.5, 0.0)

    patcher = load(pair.quantized, file, 0.02)
    plain, _ = comfy.sd.load_lora_for_models(pair.plain, None, file.tensors, 0.02, 0)
    with merging.doubled(twin):
        base, got = sample(pair, patcher), sample(pair, patcher, scheduled(twin.quantized))
        plain_base, wanted = sample(pair, plain), sample(pair, plain, scheduled(twin.plain))
    assert effect.mismatch(got, base, wanted, plain_base) < TOLERANCE
    assert torch.equal(sample(pair, patcher), base)
    pair.run(pair.plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_comfyui_s_own_node_loads_a_file_by_its_name(pairs, family, tmp_path, monkeypatch, caplog):
    import folder_paths
    import nodes

    pair, file = pairs(family), example(family)
    file.write(tmp_path / "style.safetensors")
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "loras", ([str(tmp_path)], {".safetensors"}))
    node = nodes.LoraLoaderModelOnly()
    (patcher,) = node.load_lora_model_only(pair.quantized, "style.safetensors", 0.02)
    with caplog.at_level("INFO", logger="qpatch"):
        assert pair.error(patcher, [(file, 0.02)]) < TOLERANCE
    assert f"style.safetensors 0.02 -> {len(file.layers)}/{len(file.layers)} layers" in caplog.text
    (weaker,) = node.load_lora_model_only(pair.quantized, "style.safetensors", 0.01)
    assert pair.error(weaker, [(file, 0.01)]) < TOLERANCE
    del patcher, weaker
    gc.collect()
    assert pair.bare()


@pytest.mark.parametrize("family", FAMILIES)
def test_comfyui_s_own_nodes_extract_the_lora_of_the_unquantized_layers(pairs, family):
    from comfy_extras import nodes_lora_extract, nodes_model_merging

    pair, file = pairs(family), example(family)
    (difference,) = nodes_model_merging.ModelSubtract().merge(load(pair.quantized, file, 0.02), pair.quantized, 1.0)
    whole = nodes_lora_extract.LORAType.FULL_DIFF
    found = nodes_lora_extract.calc_lora_model(difference, 8, "diffusion_model.", "", {}, whole, bias_diff=True)
    changes = merging.plain_changes(pair, file, 0.02)
    assert found.keys() == {key.replace(".weight", ".diff").replace(".bias", ".diff_b") for key in changes
                            if key.endswith((".weight", ".bias")) and merging.plain(pair, key)}
    for key, change in changes.items():
        value = found.get(key.replace(".weight", ".diff"))
        assert value is None or torch.allclose(value.float(), change, atol=0.01 * change.abs().max().item() + 1e-6), key
    difference.detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deep_clone_takes_the_list_to_its_own_model_and_leaves_the_first_bare(pairs, family):
    pair, twin, file = pairs(family), pairs(family, twin=True), example(family)
    patcher = load(pair.quantized, file, 0.02)
    try:
        deep = patcher.clone(model_override=twin.quantized.get_clone_model_override())
    except (TypeError, AttributeError):
        pytest.skip("this release has no deep clones, or the patcher's override takes no argument")
    got = twin.run(deep)
    assert torch.equal(world.evaluate(pair.quantized, pair.inputs), pair.base)
    assert torch.equal(got, pair.run(patcher))
    del deep, patcher
    gc.collect()
    assert pair.bare() and twin.bare()


@pytest.mark.parametrize("family", FAMILIES)
def test_under_dynamic_vram_a_model_from_a_mapped_file_takes_and_gives_back_loras(pairs, family, tmp_path):
    pair, file = pairs(family), example(family)
    lazily = world.from_file(pair, tmp_path / "model.safetensors")
    base = world.run(lazily, pair.inputs)
    assert torch.allclose(base, pair.base, atol=1e-4)
    state = {key: value.clone() for key, value in lazily.model.diffusion_model.state_dict().items()}
    got = world.run(load(lazily, file, 0.02), pair.inputs)
    with effect.dense(pair.plain, [(file, 0.02)]):
        assert effect.mismatch(got, base, pair.run(pair.plain), pair.plain_base) < TOLERANCE
    assert torch.equal(world.run(lazily, pair.inputs), base)
    now = lazily.model.diffusion_model.state_dict()
    assert all(torch.equal(effect._bits(now[key]), effect._bits(state[key])) for key in state)


def test_model_patches_of_z_image_act_together_with_a_lora_and_may_load_models_in_the_middle_of_a_step(pairs):
    import comfy.model_management as management

    pair, file = pairs("z-image"), example("z-image")

    def patch(arguments):
        # Z-Image's ControlNet encodes its image in the first step, and loads again what was loaded.
        management.load_models_gpu(management.loaded_models(only_currently_used=True))
        return {"img": 0.9 * arguments["img"] + 0.3 * arguments["img"].roll(1, -1)}

    patches = {"double_block": [patch], "noise_refiner": [patch]}
    arguments = {**pair.inputs, "transformer_options": {"patches": patches}}
    base, plain_base = world.run(pair.quantized, arguments), world.run(pair.plain, arguments)
    assert not torch.allclose(base, pair.base, atol=1e-2)
    got = world.run(load(pair.quantized, file, 0.02), arguments)
    with effect.dense(pair.plain, [(file, 0.02)]):
        assert effect.mismatch(got, base, world.run(pair.plain, arguments), plain_base) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_the_torch_compile_node_takes_loras_from_before_and_after_it(pairs, family):
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    def compiled(patcher):
        node = TorchCompileModel.execute if hasattr(TorchCompileModel, "execute") else TorchCompileModel().patch
        return node(patcher, "eager")[0]

    pair, file = (pairs(family, blocks=1) if family == "qwen-image" else pairs(family)), example(family, blocks=1)
    base, wanted = sample(pair, pair.quantized, steps=1), sample(pair, load(pair.quantized, file, 0.02), steps=1)
    bare = compiled(pair.quantized)
    for patcher in (load(bare, file, 0.02), compiled(load(pair.quantized, file, 0.02))):
        assert torch.allclose(sample(pair, patcher, steps=1), wanted, atol=1e-4)
        assert torch.allclose(sample(pair, bare, steps=1), base, atol=1e-4)
    assert not torch.allclose(wanted, base, atol=1e-3)
    torch._dynamo.reset()
