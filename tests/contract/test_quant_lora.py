"""Hook quant-lora inside a real ComfyUI (QPATCH_TEST_COMFYUI), in this process, on its CPU backends.

The interpreter that runs the tests has to have qpatch installed and be able to import that ComfyUI.
"""

import pytest
import torch
from quant_lora_layers import IN, OUT, loaded, lora, patcher_of
from quant_lora_twins import CPU, FORMATS, agreement, available, real

comfy, vram = real.comfy, real.vram

pytestmark = pytest.mark.comfyui


@pytest.fixture(autouse=True)
def seeded(comfy, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.delenv("QPATCH_QUANT_LORA", raising=False)


@pytest.fixture(params=FORMATS)
def named(request, comfy):
    """(name, patcher, its layer, x, the layer's output without LoRA)"""
    patcher, x = patcher_of(comfy, request.param), torch.randn(2, 9, IN)
    found = patcher.model.diffusion_model[request.param]
    return request.param, patcher, found, x, found(x)


@pytest.mark.parametrize(("rank", "size", "strength"), ((1, 0.001, 0.1), (16, 0.02, 1.0), (128, 0.3, 2.0)))
def test_effect_of_three_loras_is_theirs(comfy, named, monkeypatch, rank, size, strength):
    monkeypatch.setenv("QPATCH_QUANT_LORA", "side")
    name, patcher, linear, x, base = named
    loras = [lora(comfy, rank, size, alpha=4.0) for _ in range(3)]
    loaded(patcher, name, *(adapter for adapter, _ in loras), strength=strength)
    cosine, ratio = agreement(linear(x) - base, strength * x.double() @ sum(dense for _, dense in loras).T)
    assert cosine > 0.99 and abs(ratio - 1) < 0.01
    patcher.partially_load(CPU, 1e32)
    assert torch.equal(linear(x), base) and "forward" not in vars(linear)


def test_by_itself_the_hook_chooses_what_keeps_the_lora_and_baking_is_the_measured_reason(comfy, named, monkeypatch):
    name, patcher, linear, x, base = named
    adapter, dense = lora(comfy, 16, 0.01)
    wanted = x.double() @ dense.T
    loaded(patcher, name, adapter)
    cosine, _ = agreement(linear(x) - base, wanted)
    assert cosine > 0.99
    monkeypatch.setenv("QPATCH_QUANT_LORA", "bake")
    loaded(patcher, name, adapter)
    baked, _ = agreement(linear(x) - base, wanted)
    assert "forward" not in vars(linear) and baked < 0.8


@pytest.mark.parametrize("size", (0.005, 0.1, 0.3))
def test_predicted_share_is_what_comfyui_s_own_baking_keeps(comfy, named, monkeypatch, size):
    from qpatch.hooks.quant_lora import kept

    monkeypatch.setenv("QPATCH_QUANT_LORA", "bake")
    name, patcher, linear, _, _ = named
    adapter, dense = lora(comfy, 16, size)
    before = linear.weight.dequantize().double()
    predicted = kept.predict(linear.weight, dense.norm().item(), OUT * IN)
    loaded(patcher, name, adapter)
    measured, _ = agreement(linear.weight.dequantize().double() - before, dense)
    assert abs(predicted - measured) < (0.06 if measured > 0.8 else 0.12)


@pytest.mark.parametrize("memory", (0.1, 1e32))
def test_low_vram_and_partial_unload_keep_the_weight_quantized(comfy, named, memory):
    name, patcher, linear, x, base = named
    patcher.unpatch_model(CPU)
    adapter, dense = lora(comfy, 8, 0.005)
    clone = loaded(patcher, name, adapter, memory=memory)
    clone.partially_unload(CPU, 1e32)
    assert linear.weight_function == []
    cosine, ratio = agreement(linear(x) - base, x.double() @ dense.T)
    assert cosine > 0.99 and abs(ratio - 1) < 0.01


def test_factors_take_their_room_where_the_model_just_fits(comfy, monkeypatch):
    monkeypatch.setenv("QPATCH_QUANT_LORA", "side")
    patcher = patcher_of(comfy, *available(comfy))
    patcher.unpatch_model(CPU)
    room = 1.01 * patcher.model_size()
    adapter, _ = lora(comfy, 16, 0.01)
    factors = 16 * (OUT + IN) * 4
    patcher.partially_load(CPU, room)
    assert not patcher.model.model_lowvram
    patcher.detach()
    clone = loaded(patcher, "nvfp4", adapter, memory=room)
    assert clone.model.model_lowvram and 0 < clone.model.model_loaded_weight_memory + factors <= room
    assert clone.clone().model_size() == patcher.model_size()


def test_dynamic_vram_neither_patches_nor_requantizes_what_runs_beside(comfy, named, vram, monkeypatch):
    monkeypatch.setenv("QPATCH_QUANT_LORA", "side")
    name, patcher, linear, x, _ = named
    patcher.unpatch_model(CPU)
    dynamic = comfy.model_patcher.ModelPatcherDynamic(patcher.model, vram.device, CPU)
    assert dynamic.is_dynamic()

    def run(which):
        which.partially_load(vram.device)
        vram.evict()
        return linear(x.to(vram.device))

    base = run(dynamic)
    adapter, dense = lora(comfy, 8, 0.01)
    clone = dynamic.clone()
    clone.add_patches({f"diffusion_model.{name}.weight": adapter})
    on = run(clone)
    assert linear.weight_lowvram_function is None
    cosine, ratio = agreement(on - base, x.double() @ dense.T)
    assert cosine > 0.99 and abs(ratio - 1) < 0.01
    assert torch.equal(run(dynamic), base) and "forward" not in vars(linear)
    assert torch.equal(run(clone), on)
    clone.unpatch_model(CPU)
    assert "forward" not in vars(linear)


def test_another_strength_and_no_lora_leave_the_weights_loaded(comfy, named, monkeypatch):
    name, patcher, linear, x, base = named
    moves, move = [], patcher.model.to
    monkeypatch.setattr(patcher.model, "to", lambda *args: (moves.append(args), move(*args))[1])
    adapter, dense = lora(comfy, 8, 0.005)
    for strength in (1.0, 0.3, 2.0):
        loaded(patcher, name, adapter, strength=strength)
        cosine, ratio = agreement(linear(x) - base, strength * x.double() @ dense.T)
        assert cosine > 0.99 and abs(ratio - 1) < 0.01
    patcher.partially_load(CPU, 1e32)
    assert torch.equal(linear(x), base) and moves == []


def test_conditioning_hooks_schedule_a_lora(comfy, named):
    import comfy.hooks

    name, patcher, linear, x, base = named
    adapter, dense = lora(comfy, 8, 0.01)
    group = comfy.hooks.create_hook_lora({}, 1.0, 1.0)
    hook = group.hooks[0]
    patcher = patcher.clone()
    patcher.add_hook_patches(hook, {f"diffusion_model.{name}.weight": adapter}, 0.5)
    patcher.partially_load(CPU, 1e32)
    for _ in range(2):
        patcher.patch_hooks(group)
        cosine, ratio = agreement(linear(x) - base, 0.5 * x.double() @ dense.T)
        assert cosine > 0.99 and abs(ratio - 1) < 0.01
        patcher.patch_hooks(None)
        assert torch.equal(linear(x), base)


def test_a_saved_model_contains_the_lora_and_merging_sees_the_base(comfy, named, monkeypatch):
    monkeypatch.setenv("QPATCH_QUANT_LORA", "side")
    name, patcher, linear, x, base = named
    adapter, dense = lora(comfy, 16, 0.5)
    key, before = f"diffusion_model.{name}.weight", linear.weight.dequantize().double()
    clone = loaded(patcher, name, adapter)
    small, _ = lora(comfy, 4, 0.002)
    clone.add_patches({key: small})
    clone.partially_load(CPU, 1e32)
    assert "forward" in vars(linear)
    [(weight, convert), *patches] = clone.get_key_patches(key)[key]
    assert torch.equal(convert(weight).double(), before) and [patch[1] for patch in patches] == [adapter, small]
    # As in a node. safetensors asks for the tensors one by one, on the CPU.
    with torch.inference_mode():
        saved = clone.state_dict_for_saving()
        saved = {key: value.to("cpu") for key, value in saved.items()}
    again = patcher_of(comfy, name).model.diffusion_model[name]
    own = {key.removeprefix("diffusion_model.").partition(".")[2]: value for key, value in saved.items()}
    again.load_state_dict(own, strict=False)
    found = again.weight.dequantize().double() - before
    cosine, _ = agreement(found, dense)
    assert cosine > 0.85 and "forward" in vars(linear)


def test_two_loras_in_bypass_mode(comfy):
    name = "int8_tensorwise" if "int8_tensorwise" in comfy.quant_ops.QUANT_ALGOS else "float8_e4m3fn"
    patcher, x = patcher_of(comfy, name), torch.randn(3, IN)
    linear = patcher.model.diffusion_model[name]
    base, wanted, model = linear(x), 0, patcher
    comfy.lora.model_lora_keys_unet, kept = (lambda model, key_map: {"layer": f"diffusion_model.{name}.weight"},
                                             comfy.lora.model_lora_keys_unet)
    try:
        for strength in (1.0, 0.5):
            adapter, dense = lora(comfy, 8, 0.2)
            file = {"layer.lora_up.weight": adapter.weights[0], "layer.lora_down.weight": adapter.weights[1]}
            model, _ = comfy.sd.load_bypass_lora_for_models(model, None, file, strength, 1.0)
            wanted = wanted + strength * x.double() @ dense.T
    finally:
        comfy.lora.model_lora_keys_unet = kept
    model.inject_model()
    cosine, ratio = agreement(linear(x) - base, wanted)
    assert cosine > 0.99 and abs(ratio - 1) < 0.01
    model.eject_model()
    assert torch.equal(linear(x), base)


def test_the_fused_activation_of_int8_layers_does_not_lose_the_lora(comfy):
    if not hasattr(comfy.ops, "linear_input_act"):
        pytest.skip("this ComfyUI has no fused activation")
    patcher, x = patcher_of(comfy, "int8_tensorwise"), torch.randn(3, IN)
    linear = patcher.model.diffusion_model["int8_tensorwise"]
    base = comfy.ops.linear_input_act(linear, x, "gelu_tanh")
    adapter, dense = lora(comfy, 8, 0.02)
    loaded(patcher, "int8_tensorwise", adapter)
    added = comfy.ops.linear_input_act(linear, x, "gelu_tanh") - base
    wanted = torch.nn.functional.gelu(x, approximate="tanh").double() @ dense.T
    # The fused call quantizes its activation by itself: its base is not that of the plain forward to the bit.
    plain = linear(torch.nn.functional.gelu(x, approximate="tanh")) - base
    assert torch.equal(added, plain) and agreement(added, wanted)[0] > 0.9


def test_compiling_finds_no_reason_for_a_break_that_it_did_not_find_before(comfy, named):
    name, patcher, linear, x, _ = named

    def explained():
        torch._dynamo.reset()
        with torch.no_grad():
            found = torch._dynamo.explain(lambda value: linear(value))(x)
        return found.graph_count, [reason.user_stack[-1].name for reason in found.break_reasons]

    try:
        graphs, reasons = explained()
    except torch._dynamo.exc.TorchRuntimeError:
        pytest.skip("torch.compile cannot trace this format here without a LoRA either")
    adapter, _ = lora(comfy, 8, 0.005)
    loaded(patcher, name, adapter)
    assert "forward" in vars(linear)
    with_lora, same = explained()
    # In a layer that breaks by itself the addition comes after that break: one small graph more.
    assert same == reasons and with_lora == graphs + bool(reasons)
