"""Hook quant-lora in a real ComfyUI (QPATCH_TEST_COMFYUI), and what is around a model there.

Samplers, ControlNet, schedules, save and merge nodes, clones for other GPUs.
"""

import copy
import importlib

import pytest
import quant_lora_twins as twins_of
import torch
from quant_lora_twins import CPU, agreement
from safetensors.torch import load_file

comfy = twins_of.real.comfy

pytestmark = pytest.mark.comfyui


@pytest.fixture(scope="module", params=("z-image", "qwen-image"))
def both(request, comfy):
    for name in ("sample", "hooks", "controlnet"):
        importlib.import_module(f"comfy.{name}")
    torch.manual_seed(0)
    # A CPU multiplies it in float, so effects can be compared.
    yield twins_of.Twins(comfy, "nvfp4", request.param)
    comfy.model_management.unload_all_models()


@pytest.fixture
def twins(comfy, both, monkeypatch):
    monkeypatch.setenv("QPATCH_QUANT_LORA", "side")
    torch.manual_seed(0)
    return both


def plain_patcher(twins):
    # A copy: the patcher may go while its LoRA is in the weights.
    return twins.comfy.model_patcher.ModelPatcher(copy.deepcopy(twins.plain), CPU, CPU)


def close(found, wanted):
    cosine, ratio = agreement(found, wanted)
    return cosine > 0.99 and abs(ratio - 1) < 0.01


def test_keyframes_switch_a_scheduled_lora_on_down_and_off_during_sampling(comfy, twins):
    (fixed, _), (file, _) = twins.lora(8, 0.02), twins.lora(8, 0.1)
    results = []
    for start in (twins.patcher, plain_patcher(twins)):
        patcher, _ = comfy.sd.load_lora_for_models(start, None, fixed, 1.0, 0.0)
        hooks = comfy.hooks.create_hook_lora(file, 1.0, 0.0)
        frames = comfy.hooks.HookKeyframeGroup()
        for strength, begin in ((1.0, 0.0), (0.25, 0.3), (0.0, 0.6)):
            frames.add(comfy.hooks.HookKeyframe(strength, begin, guarantee_steps=1))
        hooks.set_keyframes_on_hooks(frames)
        without = twins.sample(patcher, steps=4)
        results.append(twins.sample(patcher, hooks=hooks, steps=4) - without)
        assert torch.equal(twins.sample(patcher, steps=4), without)
    # The same by ComfyUI's own code on the float model.
    assert close(*results) and results[0].abs().max() > 0.01


def test_a_controlnet_acts_together_with_a_lora(comfy, twins):
    if twins.family != "qwen-image":
        pytest.skip("what controls Z-Image is a patch of the model, not a ControlNet")
    control = importlib.import_module("comfy.ldm.qwen_image.controlnet").QwenImageControlNetModel(
        operations=comfy.ops.disable_weight_init, dtype=torch.float32, **twins_of.world.QWEN)
    twins_of.tiny.randomize(control, seed=7)

    def apply(patcher):
        found = comfy.controlnet.ControlNet(control, compression_ratio=1, load_device=CPU)
        found.set_cond_hint(torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(3)), 0.8)
        return twins.sample(patcher, control=found)

    file, _ = twins.lora(8, 0.1)
    starts, effects = (twins.patcher, plain_patcher(twins)), []
    for start in starts:
        patcher, _ = comfy.sd.load_lora_for_models(start, None, file, 0.7, 0.0)
        effects.append(apply(patcher) - apply(start))
    assert close(*effects)
    assert not close(apply(starts[0]), twins.sample(starts[0]))


def saved(comfy, patcher, folder, monkeypatch):
    """The tensors of the diffusion model that ComfyUI's ModelSave node writes."""
    paths = importlib.import_module("folder_paths")
    monkeypatch.setattr(paths, "get_output_directory", lambda: str(folder))
    importlib.import_module("comfy_extras.nodes_model_merging").ModelSave().save(patcher, "model")
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    return {key.removeprefix("model.").removeprefix("diffusion_model."): value for key, value in tensors.items()}


def test_the_save_node_writes_what_it_writes_without_the_hook(comfy, twins, monkeypatch, tmp_path):
    loras = [twins.lora(8, 0.5), twins.lora(4, 0.02, twins.names[:3])]
    files = {}
    for mode in ("side", "bake"):
        monkeypatch.setenv("QPATCH_QUANT_LORA", mode)
        (tmp_path / mode).mkdir()
        patcher, changes = twins.with_loras(twins.fresh(), loras, 0.8)
        running = twins.run(patcher)
        branches = [module for module in patcher.model.modules() if hasattr(module, "qpatch_branch")]
        assert len(branches) == (len(twins.names) if mode == "side" else 0)
        files[mode] = saved(comfy, patcher, tmp_path / mode, monkeypatch)
        assert torch.equal(twins.run(patcher), running)
    assert files["side"].keys() == files["bake"].keys() == twins.entries.keys()
    assert all(value.equal(files["bake"][key]) for key, value in files["side"].items())
    assert not all(value.equal(files["side"][key]) for key, value in twins.entries.items())
    # The file is a model that loads, with the LoRA in it as far as the format holds it.
    again = twins.fresh(entries=files["side"])
    cosine, _ = agreement(twins.run(again) - twins.wanted({}), twins.wanted(changes) - twins.wanted({}))
    assert cosine > 0.8


def test_a_lora_on_a_merged_model_runs_beside_what_the_merge_has_made(comfy, twins):
    merging = importlib.import_module("comfy_extras.nodes_model_merging").ModelMergeSimple()
    other = twins.fresh()
    generator = torch.Generator().manual_seed(9)
    for path in twins.names:
        layer = other.model.diffusion_model.get_submodule(path)
        noise = 0.02 * torch.randn(layer.weight.shape, generator=generator)
        other.add_patches({f"diffusion_model.{path}.weight": ("diff", (noise,))})
    start = twins.patcher
    [merged] = merging.merge(start, other, 0.3)
    base = twins.run(merged)
    weights = {path: twins.patcher.model.diffusion_model.get_submodule(path).weight.dequantize().double()
               for path in twins.names}
    plain = {path: twins.plain.diffusion_model.get_submodule(path).weight for path in twins.names}
    now = {path: weights[path] - plain[path].double() for path in twins.names}
    assert close(base, twins.wanted(now))
    patcher, changes = twins.with_loras(merged, [twins.lora(8, 0.02)], 1.0)
    total = {path: now[path] + changes[path] for path in twins.names}
    assert close(twins.run(patcher) - base, twins.wanted(total) - twins.wanted(now))
    assert torch.equal(twins.run(merged), base)
    twins.run(start)
    again = {path: twins.patcher.model.diffusion_model.get_submodule(path).weight.dequantize() for path in twins.names}
    assert all(plain[path].equal(again[path].float()) for path in twins.names)


def test_clones_for_other_gpus_run_the_loras_and_follow_their_changes(comfy, twins):
    start = twins.in_float()
    if not hasattr(start, "deepclone_multigpu"):
        pytest.skip("this ComfyUI has no clones for other GPUs")
    start.cached_patcher_init = (twins.fresh, ())
    patcher, one = twins.with_loras(start, [twins.lora(8, 0.05)], 1.0)
    base, before = twins.wanted({}), twins.run(patcher)
    # A device of another name is all that a CPU has to offer.
    clone = patcher.deepclone_multigpu(new_load_device=torch.device("cpu", 0))
    clone.is_multigpu_base_clone = True
    patcher.set_additional_models("multigpu", [clone])
    assert clone.model is not patcher.model and close(twins.run(clone) - base, twins.wanted(one) - base)
    assert torch.equal(twins.run(patcher), before)
    changed, two = twins.with_loras(patcher, [twins.lora(4, 0.1)], -0.5)
    changed.match_multigpu_clones()
    [follower] = changed.get_additional_models_with_key("multigpu")
    total = {path: one[path] + two[path] for path in one}
    for which in (follower, changed):
        assert close(twins.run(which) - base, twins.wanted(total) - base)
    assert follower.model is clone.model
