"""Child program: what a real ComfyUI makes of LoRA keys and adapters. Knows nothing of the package under test.

    python comfyui_lora_child.py weights COMFYUI cases.safetensors out.safetensors
    python comfyui_lora_child.py keys COMFYUI out.json
"""

import json
import sys


def start(comfyui):
    """Import ComfyUI as a library, on the CPU."""
    sys.path.insert(0, comfyui)
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.lora

    return comfy.lora


def weights(comfyui, cases, out):
    """For each case: its tensors through load_lora, its base weight through calculate_weight, in the base's dtype."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    lora = start(comfyui)
    results = {}
    with safe_open(cases, "pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}
        table = json.loads(file.metadata()["cases"])
    for name, strength in table.items():
        tensors = {key.removeprefix(name + "/"): value for key, value in stored.items() if key.startswith(name + "/")}
        base = tensors.pop("base")
        patches = lora.load_lora(tensors, {"layer": "layer.weight"}, log_missing=False)
        for parameter, value in (("weight", base), ("bias", torch.zeros_like(base[:, 0]))):
            patch = patches.get(f"layer.{parameter}")
            if patch is not None:
                value = lora.calculate_weight([(strength, patch, 1.0, None, None)], value.clone(), f"layer.{parameter}",
                                              intermediate_dtype=base.dtype)
            results[f"{name}/{parameter}"] = value
    save_file(results, out)


def fake(model_class, network, config):
    """An object that ComfyUI's key map takes for a model of ``model_class`` with the parameters of ``network``."""
    import torch

    class Fake(model_class):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.model_config = type("Config", (), {"unet_config": config})()

        def state_dict(self):
            return {"diffusion_model." + key: None for key in network.state_dict()}

    return Fake()


def keys(comfyui, out):
    """LoRA module name -> [parameter, row offset or None, rows or None] of ComfyUI's own map, for both families."""
    lora = start(comfyui)
    import comfy.ldm.lumina.model
    import comfy.ldm.qwen_image.model
    import comfy.model_base
    import comfy.ops

    made = {"device": "meta", "operations": comfy.ops.disable_weight_init}
    z_config = {"dim": 256, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "qk_norm": True, "cap_feat_dim": 64,
                "axes_dims": [32, 48, 48], "axes_lens": [32, 32, 32], "z_image_modulation": True, "in_channels": 16}
    q_config = {"num_layers": 2, "num_attention_heads": 2, "joint_attention_dim": 64}
    models = {
        "z-image": fake(comfy.model_base.Lumina2, comfy.ldm.lumina.model.NextDiT(**z_config, **made), z_config),
        "qwen-image": fake(comfy.model_base.QwenImage,
                           comfy.ldm.qwen_image.model.QwenImageTransformer2DModel(**q_config, **made), q_config),
    }
    table = {name: {key: place(value) for key, value in lora.model_lora_keys_unet(model, {}).items()
                    if place(value)[0] in model.state_dict()} for name, model in models.items()}
    with open(out, "w") as stream:
        json.dump(table, stream)


def place(value):
    if isinstance(value, tuple):
        parameter, (_, offset, rows) = value
        return [parameter, offset, rows]
    return [value, None, None]


if __name__ == "__main__":
    {"weights": weights, "keys": keys}[sys.argv[1]](*sys.argv[2:])
