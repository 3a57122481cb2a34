"""A stand-in for comfy.ops from ComfyUI 0.27 on: how it loads, runs, patches and saves quantized layers.

Keeps the contracts and the faults: ``convrot`` of NVFP4 is ignored and not written back, ``comfy_quant`` must
be a uint8 tensor of a JSON object, a module-level loader and writer are looked up by name at each call, there
is no quantized convolution.
"""

import functools
import json

import torch
from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

QUANT_ALGOS = {
    "nvfp4": {"comfy_tensor_layout": "TensorCoreNVFP4Layout", "storage_t": torch.uint8,
              "parameters": {"weight_scale", "weight_scale_2", "input_scale"}, "quantize_input": True},
    "int8_tensorwise": {"comfy_tensor_layout": "TensorWiseINT8Layout", "storage_t": torch.int8,
                        "parameters": {"weight_scale"}, "quantize_input": False},
}


def _quantized_apply(module, fn, recurse=True):
    for key, parameter in module._parameters.items():
        if parameter is not None:
            module.register_parameter(key, torch.nn.Parameter(fn(parameter), requires_grad=False))
    return module


def _load_quantized_module(module, super_load, state_dict, prefix, local_metadata, strict, missing_keys,
                           unexpected_keys, error_msgs, load_extra_params=False):
    weight = state_dict.pop(f"{prefix}weight")
    settings = state_dict.pop(f"{prefix}comfy_quant", None)
    loaded = [f"{prefix}weight"]
    if settings is None:
        module.weight = torch.nn.Parameter(weight.to(module.factory_kwargs["dtype"]), requires_grad=False)
    else:
        settings = json.loads(settings.numpy().tobytes())
        module.quant_format = settings.get("format")
        module._full_precision_mm = module.quant_format in module._disabled_formats
        algorithm = QUANT_ALGOS[module.quant_format]
        module.layout_type = algorithm["comfy_tensor_layout"]
        scale = state_dict.pop(f"{prefix}weight_scale")
        if module.quant_format == "nvfp4":
            tensor_scale = state_dict.pop(f"{prefix}weight_scale_2")
            scales = {"scale": tensor_scale, "block_scale": scale.view(torch.float8_e4m3fn)}
        else:
            scales = {"scale": scale}
            if settings.get("convrot"):
                scales.update(convrot=True, convrot_groupsize=int(settings.get("convrot_groupsize", 256)))
        params = get_layout_class(module.layout_type).Params(
            **scales, orig_dtype=module.factory_kwargs["dtype"], orig_shape=module._orig_shape)
        quantized = QuantizedTensor(weight.to(algorithm["storage_t"]), module.layout_type, params)
        module.weight = torch.nn.Parameter(quantized, requires_grad=False)
        if f"{prefix}input_scale" in state_dict:
            loaded.append(f"{prefix}input_scale")
            module.input_scale = torch.nn.Parameter(state_dict.pop(f"{prefix}input_scale"), requires_grad=False)
    super_load(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
    missing_keys[:] = [key for key in missing_keys if key not in loaded]


def _quantized_weight_state_dict(module, sd, prefix, extra_quant_conf=None, extra_quant_params=()):
    if module.bias is not None:
        sd[f"{prefix}bias"] = module.bias
    if not isinstance(module.weight, QuantizedTensor):
        sd[f"{prefix}weight"] = module.weight
        return sd
    sd.update(module.weight.state_dict(f"{prefix}weight"))
    settings = {"format": module.quant_format}
    if module.quant_format == "int8_tensorwise" and module.weight._params.convrot:
        settings.update(convrot=True, convrot_groupsize=module.weight._params.convrot_groupsize)
    sd[f"{prefix}comfy_quant"] = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
    for name in extra_quant_params:
        if getattr(module, name, None) is not None:
            sd[f"{prefix}{name}"] = getattr(module, name)
    return sd


class manual_cast:
    class Conv2d(torch.nn.Conv2d):
        def forward(self, input):
            return self._conv_forward(input, self.weight, self.bias)


def mixed_precision_ops(quant_config={}, compute_dtype=torch.bfloat16, full_precision_mm=False, disabled=()):
    class MixedPrecisionOps(manual_cast):
        _compute_dtype = compute_dtype

        class Linear(torch.nn.Module):
            _disabled_formats = disabled

            def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
                super().__init__()
                self.factory_kwargs = {"device": device, "dtype": compute_dtype}
                self.in_features, self.out_features = in_features, out_features
                self._orig_shape = (out_features, in_features)
                self.bias = torch.nn.Parameter(torch.empty(out_features, dtype=compute_dtype)) if bias else None

            def _load_from_state_dict(self, *args):
                _load_quantized_module(self, super()._load_from_state_dict, *args, load_extra_params=True)

            def state_dict(self, *args, destination=None, prefix="", **kwargs):
                sd = destination if destination is not None else {}
                return _quantized_weight_state_dict(self, sd, prefix, extra_quant_params=("input_scale",))

            def forward(self, input):
                algorithm = QUANT_ALGOS.get(getattr(self, "quant_format", None), {"quantize_input": False})
                if not algorithm["quantize_input"] or self._full_precision_mm:
                    return torch.nn.functional.linear(input, self.weight, self.bias)
                rows = QuantizedTensor.from_float(
                    input.reshape(-1, input.shape[-1]), self.layout_type, scale=getattr(self, "input_scale", None))
                return torch.nn.functional.linear(rows, self.weight, self.bias).reshape(*input.shape[:-1], -1)

            def convert_weight(self, weight, inplace=False, **kwargs):
                return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight

            def set_weight(self, weight, inplace_update=False, seed=None, return_weight=False, **kwargs):
                again = getattr(self.weight, "requantize_from_float", None)  # not in 0.24 to 0.26
                again = again or functools.partial(QuantizedTensor.from_float, layout_cls=self.layout_type)
                made = again(weight, scale="recalculate", stochastic_rounding=seed)
                if return_weight:
                    return made
                self.weight = torch.nn.Parameter(made, requires_grad=False)

            def _apply(self, fn, recurse=True):
                return _quantized_apply(self, fn, recurse)

    return MixedPrecisionOps
