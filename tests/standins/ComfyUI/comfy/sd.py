"""Stand-in for comfy.sd: what LoRA nodes call."""

import logging

import comfy.lora


def load_lora_for_models(model, clip, lora, strength_model, strength_clip, lora_metadata=None):
    key_map = {}
    if model is not None:
        key_map = comfy.lora.model_lora_keys_unet(model.model, key_map)
    if clip is not None:
        key_map = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, key_map)
    loaded = comfy.lora.load_lora(lora, key_map)
    used, results = set(), []
    for one, strength in ((model, strength_model), (clip, strength_clip)):
        results.append(one and one.clone())
        if one is not None:
            used.update(results[-1].add_patches(loaded, strength))
    if lora_metadata and results[0] is not None:
        results[0].set_attachments("lora_metadata", lora_metadata)
    for key in loaded:
        if key not in used:
            logging.warning("NOT LOADED %s", key)
    return tuple(results)


def load_bypass_lora_for_models(model, clip, lora, strength_model, strength_clip):
    """Upstream adds the adapter in the layer's forward; the result for a plain layer is the same."""
    return load_lora_for_models(model, clip, lora, strength_model, strength_clip)
