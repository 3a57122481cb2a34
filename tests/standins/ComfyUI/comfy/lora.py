"""Stand-in for comfy.lora: names of a model's weights in LoRA files, parsing, and baking."""

import logging

import torch

import comfy.weight_adapter


def _diffusers_names(config):
    """Z-Image's names of diffusers -> weight, or (weight, rows)."""
    names, dim = {}, config["dim"]
    blocks = [f"layers.{i}" for i in range(config["n_layers"])]
    blocks += [f"{kind}_refiner.{i}" for kind in ("noise", "context") for i in range(2)]
    for block in blocks:
        for place, part in enumerate("qkv"):
            fused = f"diffusion_model.{block}.attention.qkv.weight"
            names[f"{block}.attention.to_{part}"] = fused, (0, place * dim, dim)
        names[f"{block}.attention.to_out.0"] = f"diffusion_model.{block}.attention.out.weight"
        for name in ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "adaLN_modulation.0"):
            names[f"{block}.{name}"] = f"diffusion_model.{block}.{name}.weight"
    return names


# Upstream's fault: one default for all models ever seen.
def model_lora_keys_unet(model, key_map={}):
    keys = [key for key in model.state_dict() if key.startswith("diffusion_model.")]
    key_map.update((key, key) for key in keys if not key.endswith(".weight"))
    for key in [key for key in keys if key.endswith(".weight")]:
        name = key.removeprefix("diffusion_model.").removesuffix(".weight")
        key_map["lora_unet_" + name.replace(".", "_")] = key
        key_map["diffusion_model." + name] = key
        if model.family == "qwen-image":
            key_map[name] = key_map["transformer." + name] = key_map["lycoris_" + name.replace(".", "_")] = key
    if model.family == "z-image":
        for name, key in _diffusers_names(model.model_config.unet_config).items():
            key_map[name] = key_map["diffusion_model." + name] = key_map["transformer." + name] = key
            key_map["lycoris_" + name.replace(".", "_")] = key
    return key_map


def model_lora_keys_clip(model, key_map={}):
    for key in model.state_dict():
        key_map["text_encoders." + key.removesuffix(".weight")] = key
    return key_map


def load_lora(lora, to_load, log_missing=True):
    patches, used = {}, set()
    for stem, key in to_load.items():
        alpha = float(lora[f"{stem}.alpha"]) if f"{stem}.alpha" in lora else None
        for adapter in comfy.weight_adapter.adapters:
            found = adapter.read(stem, lora, alpha)
            if found is not None:
                patches[key] = found
        for suffix, kind in (("diff", "diff"), ("set_weight", "set")):
            if f"{stem}.{suffix}" in lora:
                patches[key] = (kind, (lora[f"{stem}.{suffix}"],))
        if f"{stem}.diff_b" in lora:
            patches[key.removesuffix(".weight") + ".bias"] = ("diff", (lora[f"{stem}.diff_b"],))
        used.update(name for name in lora if name.startswith(stem + "."))
    for name in lora if log_missing else ():
        if name not in used:
            logging.warning("lora key not loaded: %s", name)
    return patches


def calculate_weight(patches, weight, key, original_weights=None):
    """The weight [float] with all patches of one key in it."""
    weight = weight.double()
    for strength, patch, strength_model, offset, _function in patches:
        rows = weight if offset is None else weight.narrow(*offset)
        rows.mul_(strength_model)
        if isinstance(patch, list):
            # Another model's weight and the patches on it, as merging hands them over.
            (base, convert), *others = patch
            rows.add_(calculate_weight(others, convert(base, inplace=True), key).double(), alpha=strength)
        elif isinstance(patch, comfy.weight_adapter.WeightAdapterBase):
            rows.add_(patch.delta(), alpha=strength)
        elif patch[0] == "diff":
            rows.add_(patch[1][0].double(), alpha=strength)
        else:
            rows.copy_(patch[1][0])
    return weight.to(torch.float32)
