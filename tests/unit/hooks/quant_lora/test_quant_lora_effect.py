"""Hook quant-lora: what a LoRA does to the output of a quantized layer, against float64, and baked for comparison."""

import pytest
import torch

kitchen = pytest.importorskip("comfy_kitchen.tensor")

from qpatch.hooks.quant_lora import options

OUT, IN, RMS = 128, 256, 0.03
FORMATS = {
    "nvfp4": ("TensorCoreNVFP4Layout", {}),
    "mxfp8": ("TensorCoreMXFP8Layout", {}),
    "fp8": ("TensorCoreFP8Layout", {"scale": "recalculate"}),
    "int8": ("TensorWiseINT8Layout", {}),
    "int8 convrot": ("TensorWiseINT8Layout", {"per_channel": True, "convrot": True}),
    "convrot w4a4": ("TensorCoreConvRotW4A4Layout", {}),
    "w4a8": ("AsymW4A8Int8Layout", {}),
}


def quantize(format_name, values):
    layout, settings = FORMATS[format_name]
    if layout not in kitchen.__dict__:
        pytest.skip(f"this comfy_kitchen has no {layout}")
    return kitchen.QuantizedTensor.from_float(values, layout, **settings)


def model_of(comfy, *formats, dtype=torch.float32):
    model = torch.nn.Module()
    for name in formats:
        weight = quantize(name, (torch.randn(OUT, IN) * RMS).to(dtype))
        model.add_module(name.replace(" ", "_"), comfy.Linear(weight, torch.randn(OUT).to(dtype)))
    return model


def lora(rank, size, rows=OUT, columns=IN, alpha=None):
    """(down, up) whose product has the rms ``size`` times that of the weight, scale included."""
    up, down = torch.randn(rows, rank, dtype=torch.float64), torch.randn(rank, columns, dtype=torch.float64)
    up *= size * RMS / (up @ down).square().mean().sqrt()
    return up * (1.0 if alpha is None else rank / alpha), down


def agreement(found, wanted):
    """(cosine, ratio of the norms)."""
    found, wanted = found.double().flatten(), wanted.double().flatten()
    return (found @ wanted / (found.norm() * wanted.norm())).item(), (found.norm() / wanted.norm()).item()


def loaded(patcher, *sets, key="nvfp4.weight", strength=1.0, alpha=None, Adapter=None):
    """A clone of ``patcher`` with LoRAs, loaded."""
    clone = patcher.clone()
    for up, down in sets:
        clone.add_patches({key: Adapter("lora", up.float(), down.float(), alpha, None, None, None)}, strength)
    clone.partially_load(clone.load_device, 1e32)
    return clone


@pytest.mark.parametrize("size", (0.001, 0.02, 0.3))
@pytest.mark.parametrize("strength", (0.1, 1.0, 2.0))
@pytest.mark.parametrize("format_name", FORMATS)
def test_effect_is_that_of_the_lora_whatever_the_format_holds(comfy, format_name, strength, size):
    model = model_of(comfy, format_name)
    layer, key = next(model.children()), format_name.replace(" ", "_") + ".weight"
    patcher, x = comfy.ModelPatcher(model), torch.randn(5, 7, IN)
    base, (up, down) = layer(x), lora(4, size, alpha=2.0)
    loaded(patcher, (up, down), key=key, strength=strength, alpha=2.0, Adapter=comfy.Adapter)
    wanted = strength * (2.0 / 4) * (x.double() @ down.T @ up.T)
    cosine, ratio = agreement(layer(x) - base, wanted)
    # A delta of 0.1 % at strength 0.1 stands 14 bits above the rounding of a float32 output.
    assert cosine > 0.99 and abs(ratio - 1) < 0.01


@pytest.mark.parametrize("rank", (1, 16, 128))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_ranks_and_compute_types(comfy, rank, dtype):
    model = model_of(comfy, "int8", dtype=dtype)
    x = torch.randn(9, IN).to(dtype)
    base, (up, down) = model.int8(x), lora(rank, 0.3)
    loaded(comfy.ModelPatcher(model), (up, down), key="int8.weight", Adapter=comfy.Adapter)
    cosine, ratio = agreement(model.int8(x) - base, x.double() @ down.T @ up.T)
    assert model.int8(x).dtype == dtype and cosine > 0.99 and abs(ratio - 1) < 0.01


def test_a_tiny_up_factor_does_not_vanish_in_float16(comfy):
    model = model_of(comfy, "int8", dtype=torch.float16)
    (up, down), x = lora(4, 0.02), torch.randn(9, IN).half()
    base = model.int8(x)
    loaded(comfy.ModelPatcher(model), (up * 1e-6, down * 1e6), key="int8.weight", Adapter=comfy.Adapter)
    cosine, ratio = agreement(model.int8(x) - base, x.double() @ down.T @ up.T)
    assert cosine > 0.98 and abs(ratio - 1) < 0.02


def test_three_loras_add_up_and_slices_stay_in_their_rows(comfy):
    model = model_of(comfy, "nvfp4")
    patcher, x = comfy.ModelPatcher(model), torch.randn(11, IN)
    base, sets = model.nvfp4(x), [lora(rank, 0.02) for rank in (1, 8, 32)]
    clone = loaded(patcher, *sets[:2], strength=0.7, Adapter=comfy.Adapter)
    third = lora(32, 0.05, rows=OUT // 4)
    adapter = comfy.Adapter("lora", third[0].float(), third[1].float(), None, None, None, None)
    clone.add_patches({("nvfp4.weight", (0, OUT // 4, OUT // 4)): adapter}, -1.5)
    clone.partially_load(clone.load_device, 1e32)
    wanted = 0.7 * sum(x.double() @ down.T @ up.T for up, down in sets[:2])
    wanted[:, OUT // 4:OUT // 2] += -1.5 * (x.double() @ third[1].T @ third[0].T)
    cosine, ratio = agreement(model.nvfp4(x) - base, wanted)
    assert cosine > 0.9999 and abs(ratio - 1) < 1e-3


def test_lokr_and_loha_of_small_rank_run_beside_too(comfy):
    model = model_of(comfy, "w4a8")
    patcher, x = comfy.ModelPatcher(model).clone(), torch.randn(6, IN)
    base = model.w4a8(x)
    w1, w2a, w2b = torch.randn(4, 4), torch.randn(OUT // 4, 2) * 0.01, torch.randn(2, IN // 4) * 0.01
    a, c = (torch.randn(OUT, 3) * 0.1 for _ in range(2))
    b, d = (torch.randn(3, IN) * 0.1 for _ in range(2))
    patcher.add_patches({"w4a8.weight": comfy.Adapter("lokr", w1, None, None, None, None, w2a, w2b, None, None)})
    patcher.add_patches({"w4a8.weight": comfy.Adapter("loha", a, b, 6.0, c, d, None, None, None)}, 0.5)
    patcher.partially_load(patcher.load_device, 1e32)
    dense = torch.kron(w1.double(), w2a.double() @ w2b.double())
    dense += 0.5 * 2.0 * (a.double() @ b.double()) * (c.double() @ d.double())
    cosine, ratio = agreement(model.w4a8(x) - base, x.double() @ dense.T)
    assert cosine > 0.9999 and abs(ratio - 1) < 1e-3


def test_baked_the_same_lora_is_mostly_noise_or_nothing(comfy, monkeypatch):
    """Why the hook exists: the same measure through ComfyUI's way."""
    monkeypatch.setenv(options.VARIABLE, options.BAKE)
    model = model_of(comfy, "nvfp4", "convrot w4a4")
    patcher, x, sets = comfy.ModelPatcher(model), torch.randn(200, IN), lora(8, 0.025)
    for name, most in (("nvfp4", 0.3), ("convrot_w4a4", 0.5)):
        layer = getattr(model, name)
        base = layer(x)
        clone = loaded(patcher, sets, key=f"{name}.weight", Adapter=comfy.Adapter)
        cosine, _ = agreement(layer(x) - base, x.double() @ sets[1].T @ sets[0].T)
        assert "forward" not in vars(layer) and cosine < most
        clone.unpatch_model()


def test_a_rotated_nvfp4_layer_takes_the_lora_in_the_model_s_own_basis(comfy):
    layouts = pytest.importorskip("qpatch.hooks.convrot.layouts")
    from qpatch.hooks.quant_lora import steps

    weight = torch.randn(OUT, IN) * RMS
    plain = kitchen.QuantizedTensor.from_float(weight, "TensorCoreNVFP4Layout")
    turned = kitchen.QuantizedTensor.from_float(weight, layouts.rotated("TensorCoreNVFP4Layout", 64))
    model = torch.nn.Module()
    model.layer = comfy.Linear(turned)
    patcher, x, (up, down) = comfy.ModelPatcher(model), torch.randn(5, IN), lora(8, 0.01)
    base = model.layer(x)
    loaded(patcher, (up, down), key="layer.weight", Adapter=comfy.Adapter)
    cosine, ratio = agreement(model.layer(x) - base, x.double() @ down.T @ up.T)
    assert cosine > 0.9999 and abs(ratio - 1) < 1e-3
    assert steps.of(turned).rms == pytest.approx(steps.of(plain).rms, rel=0.1)
