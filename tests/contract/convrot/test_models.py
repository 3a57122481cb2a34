"""Whole models of a real ComfyUI, tiny: file -> stock loader -> stock LoRA -> run -> stock saving -> loader again."""

import copy

import pytest
import torch
from comfy_kitchen.tensor import QuantizedTensor
from convrot_reference import error, int8_layer, nvfp4_layer, same_entries, settings_tensor
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.comfyui
TINY = {"dim": 256, "n_heads": 2, "n_kv_heads": 2, "n_layers": 2, "n_refiner_layers": 1, "cap_feat_dim": 128,
        "axes_dims": [32, 48, 48], "axes_lens": [64, 64, 64], "rope_theta": 256.0, "ffn_dim_multiplier": 1.0,
        "z_image_modulation": True, "time_scale": 1000.0}


def filled(module):
    """Random weights such that signals neither vanish nor explode."""
    for name, parameter in module.named_parameters():
        noise = torch.randn_like(parameter)
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(torch.ones_like(parameter) if name.endswith("weight") else noise * 0.02)
    return module


@pytest.fixture
def tiny_zimage(comfy, monkeypatch):
    """A float Z-Image with random weights; ComfyUI is told that Z-Image has its sizes."""
    model_class = comfy.supported_models.ZImage
    monkeypatch.setattr(model_class, "unet_config", {"image_model": "lumina2", "dim": TINY["dim"]})
    detect = comfy.model_detection.detect_unet_config

    def detect_tiny(state_dict, key_prefix, *args, **kwargs):
        found = detect(state_dict, key_prefix, *args, **kwargs)
        # What was read off the file stays; what ComfyUI knows of the real sizes only is added.
        return {**TINY, **found} if found and found.get("dim") == TINY["dim"] else found

    monkeypatch.setattr(comfy.model_detection, "detect_unet_config", detect_tiny)
    config = model_class({"image_model": "lumina2", "patch_size": 2, "in_channels": 16, "qk_norm": True, **TINY})
    config.set_inference_dtype(torch.float32, None)
    return filled(config.get_model({}, "").diffusion_model.float())


@pytest.fixture
def zimage_file(tiny_zimage, formats, tmp_path):
    """A mixed ConvRot file of ``tiny_zimage``: NVFP4, INT8 where this ComfyUI has it, the rest in float."""
    entries = {}
    for key, value in tiny_zimage.state_dict().items():
        layer = key.removesuffix("weight")
        if value.dim() != 2 or not any(part in key for part in ("attention", "feed_forward", "cap_embedder")):
            entries[key] = value.clone()
        elif "w2" in key and "int8" in formats:
            entries.update({layer + name: tensor for name, tensor in int8_layer(value, 64).items()})
        else:
            entries.update({layer + name: tensor for name, tensor in nvfp4_layer(value, 64).items()})
    path = tmp_path / "zimage_convrot.safetensors"
    save_file({key: value.contiguous() for key, value in entries.items()}, path)
    return path


def plainly_quantized(model, entries):
    """A float copy of ``model`` whose NVFP4 layers went through NVFP4 without a rotation: the measure for one with."""
    changed = copy.deepcopy(model)
    for name, layer in changed.named_modules():
        if entries.get(f"{name}.weight", torch.empty(0)).dtype == torch.uint8:
            values = QuantizedTensor.from_float(layer.weight.detach(), "TensorCoreNVFP4Layout").dequantize()
            layer.weight = torch.nn.Parameter(values, requires_grad=False)
    return changed


def lora_of(names):
    """(state dict as trainers write it, name -> dense delta) for the layers ``names`` -> (out, in)."""
    entries, deltas = {}, {}
    for name, (rows, columns) in names.items():
        up, down = torch.randn(rows, 4), torch.randn(4, columns) / columns ** 0.5
        entries[f"diffusion_model.{name}.lora_B.weight"], entries[f"diffusion_model.{name}.lora_A.weight"] = up, down
        deltas[name] = up @ down
    return entries, deltas


def with_deltas(model, deltas, strength):
    changed = copy.deepcopy(model)
    for name, delta in deltas.items():
        rows = slice(None)
        for index, part in enumerate(("to_q", "to_k", "to_v")):
            if name.endswith(part):
                name, rows = name.replace(part, "qkv"), slice(256 * index, 256 * (index + 1))
        with torch.no_grad():
            changed.get_submodule(name).weight[rows] += strength * delta
    return changed


def picture(model):
    generator = torch.Generator().manual_seed(3)
    latent = torch.randn(1, 16, 8, 8, generator=generator)
    text = torch.randn(1, 12, TINY["cap_feat_dim"], generator=generator)
    with torch.inference_mode():
        return model(latent, torch.tensor([0.4]), text, 12, None)


def loaded(comfy, patcher):
    comfy.model_management.load_models_gpu([patcher])
    return patcher.model.diffusion_model


def test_a_mixed_file_runs_takes_lora_from_the_stock_loader_and_is_saved(comfy, tiny_zimage, zimage_file, tmp_path):
    patcher = comfy.sd.load_diffusion_model(str(zimage_file))
    base = picture(loaded(comfy, patcher))
    plain = plainly_quantized(tiny_zimage, load_file(zimage_file))
    assert error(base, picture(tiny_zimage)) < 1.2 * error(picture(plain), picture(tiny_zimage))
    rows = patcher.model.diffusion_model.layers[0].feed_forward.w1.weight.shape[0]
    lora, deltas = lora_of({
        "layers.0.attention.to_q": (256, 256), "layers.0.attention.to_v": (256, 256),
        "layers.1.attention.out": (256, 256), "layers.0.feed_forward.w1": (rows, 256),
        "layers.1.feed_forward.w2": (256, rows)})
    patched, _ = comfy.sd.load_lora_for_models(patcher, None, lora, 0.8, 0)
    wanted = picture(with_deltas(tiny_zimage, deltas, 0.8))
    effect = picture(loaded(comfy, patched))
    # What is left is the first quantization and the stochastic rounding of the baked weights.
    assert error(effect, wanted) < 0.5 * error(base, wanted)
    assert torch.equal(picture(loaded(comfy, patcher)), base)
    comfy.sd.save_checkpoint(str(tmp_path / "merged.safetensors"), patched)
    merged = comfy.sd.load_diffusion_model(str(tmp_path / "merged.safetensors"))
    assert error(picture(loaded(comfy, merged)), effect) < 1e-5


def test_a_model_saved_unchanged_is_the_file_it_was_loaded_from(comfy, zimage_file, tmp_path):
    patcher = comfy.sd.load_diffusion_model(str(zimage_file))
    comfy.sd.save_checkpoint(str(tmp_path / "again.safetensors"), patcher)
    prefix = "model.diffusion_model."
    again = {key.removeprefix(prefix): value for key, value in load_file(tmp_path / "again.safetensors").items()}
    original = load_file(zimage_file)
    assert same_entries({key: again.get(key) for key in original}, original)


def test_the_loader_s_output_is_good_for_another_prompt_after_everything_was_unloaded(comfy, zimage_file):
    patcher = comfy.sd.load_diffusion_model(str(zimage_file))
    lora, _ = lora_of({"layers.0.attention.to_q": (256, 256), "layers.1.attention.out": (256, 256)})
    patched, _ = comfy.sd.load_lora_for_models(patcher, None, lora, 1.0, 0)
    first = picture(loaded(comfy, patched))
    for _ in range(3):
        comfy.model_management.unload_all_models()
        assert torch.equal(picture(loaded(comfy, patched)), first)


@pytest.fixture
def unet(comfy):
    """(a function that builds a small SDXL-like UNet from operations, its latent, time and text inputs)."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    def build(operations):
        return UNetModel(image_size=32, in_channels=4, out_channels=4, model_channels=64, num_res_blocks=[1, 1],
                         transformer_depth=[0, 1], channel_mult=[1, 2], transformer_depth_middle=1, context_dim=128,
                         use_linear_in_transformer=True, num_head_channels=32, transformer_depth_output=[0, 0, 1, 1],
                         use_spatial_transformer=True, legacy=False, num_classes="sequential", adm_in_channels=64,
                         operations=operations, dtype=torch.float32)

    return build, (torch.randn(2, 4, 16, 16), torch.tensor([10.0, 500.0]), torch.randn(2, 7, 128), torch.randn(2, 64))


def test_an_sdxl_pack_of_int8_convolutions_and_nvfp4_linears_runs(comfy, formats, unet):
    if "kernel" not in formats:
        pytest.skip("this ComfyUI loads no INT8 convolutions")
    build, (latent, time, text, label) = unet
    plain = filled(build(comfy.ops.disable_weight_init))
    entries, kinds = {}, set()
    for key, value in plain.state_dict().items():
        layer, channels = key.removesuffix("weight"), value.shape[1] if value.dim() > 1 else 0
        size = next((size for size in (64, 16, 4) if channels and channels % size == 0), None)
        if key.endswith(".weight") and value.dim() in (2, 4) and size and "time_embed" not in key:
            make = int8_layer if value.dim() == 4 else nvfp4_layer
            entries.update({layer + name: tensor for name, tensor in make(value, size).items()})
            kinds.add(value.dim())
        else:
            entries[key] = value
    assert kinds == {2, 4}
    model = build(comfy.ops.mixed_precision_ops({}, torch.float32, disabled={"nvfp4"}))
    model.load_state_dict(dict(entries), strict=True)
    with torch.inference_mode():
        wanted = plain(latent, time, text, y=label)
        bound = error(plainly_quantized(plain, entries)(latent, time, text, y=label), wanted)
        assert error(model(latent, time, text, y=label), wanted) < 1.2 * bound
    assert same_entries(model.state_dict(), entries)


def test_an_sdxl_file_with_packed_cross_attention_is_recognised(comfy):
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    unet = UNetModel(image_size=32, in_channels=4, out_channels=4, model_channels=320, num_res_blocks=[2, 2, 2],
                     transformer_depth=[0, 0, 2, 2, 10, 10], channel_mult=[1, 2, 4], transformer_depth_middle=10,
                     use_linear_in_transformer=True, context_dim=2048, num_head_channels=64, num_classes="sequential",
                     transformer_depth_output=[0, 0, 0, 2, 2, 2, 10, 10, 10], use_spatial_transformer=True,
                     legacy=False, adm_in_channels=2816, device="meta", dtype=torch.float16,
                     operations=comfy.ops.disable_weight_init)
    # One element each: the detection looks at names and shapes.
    entries = {key: torch.zeros(1, dtype=torch.float16).expand(value.shape) for key, value in unet.state_dict().items()}
    for key in [key for key in entries if key.endswith(("attn2.to_k.weight", "label_emb.0.0.weight"))]:
        rows, columns = entries[key].shape
        entries[key] = torch.zeros(1, dtype=torch.uint8).expand(rows, columns // 2)
        entries[key.removesuffix("weight") + "comfy_quant"] = settings_tensor(format="nvfp4", convrot=True)
    found = comfy.model_detection.model_config_from_unet(entries, "")
    assert type(found) is comfy.supported_models.SDXL
    assert found.quant_config == {"mixed_ops": True}
