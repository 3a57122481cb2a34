"""Stand-in for comfy.lora: the shared default of the key maps, and the misfits that stop a workflow."""

import torch


def model_lora_keys_clip(model, key_map={}):
    return model_lora_keys_unet(model, key_map)


def model_lora_keys_unet(model, key_map={}):
    for key in model.state_dict():
        key_map["lora_" + key] = key
    return key_map


def calculate_weight(patches, weight, key, intermediate_dtype=torch.float32, original_weights=None):
    for strength, what, strength_model, offset, function in patches:
        whole = weight
        if offset is not None:
            weight = weight.narrow(*offset)
        if strength_model != 1.0:
            weight *= strength_model
        if hasattr(what, "weights"):
            weight = what.calculate_weight(weight, key, strength)
        elif what[0] == "diff":
            if what[1][0].shape == weight.shape:
                weight += strength * what[1][0]
        elif what[0] == "set":
            weight.copy_(what[1][0])
        elif what[0] == "model_as_lora":
            weight += strength * (what[1][0] - original_weights[key][0][0])
        if offset is not None:
            weight = whole
    return weight


class LoRAAdapter:
    """weights: up, down, alpha, mid, dora_scale, reshape."""

    name = "lora"

    def __init__(self, *weights):
        self.weights = weights

    def calculate_weight(self, weight, key, strength):
        up, down, alpha, mid, _, _ = self.weights
        scale = 1.0 if alpha is None else alpha / down.shape[0]
        if mid is not None:
            down = torch.mm(mid, down)
        try:
            weight += strength * scale * torch.mm(up, down).reshape(weight.shape)
        except RuntimeError:
            pass
        return weight
