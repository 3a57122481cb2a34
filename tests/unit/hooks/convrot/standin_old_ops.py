"""A stand-in for comfy.ops before ComfyUI 0.24: loading and saving are methods of the Linear made at each call."""

import json

import torch
from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

QUANT_ALGOS = {"nvfp4": {"comfy_tensor_layout": "TensorCoreNVFP4Layout"}}


def mixed_precision_ops(quant_config={}, compute_dtype=torch.bfloat16, full_precision_mm=False, disabled=()):
    class MixedPrecisionOps:
        class Linear(torch.nn.Module):
            def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
                super().__init__()
                self.in_features, self.out_features = in_features, out_features

            def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys,
                                      unexpected_keys, error_msgs):
                weight = state_dict.pop(f"{prefix}weight")
                settings = json.loads(state_dict.pop(f"{prefix}comfy_quant").numpy().tobytes())
                self.quant_format = settings["format"]
                self.layout_type = QUANT_ALGOS[self.quant_format]["comfy_tensor_layout"]
                params = get_layout_class(self.layout_type).Params(
                    scale=state_dict.pop(f"{prefix}weight_scale_2"),
                    block_scale=state_dict.pop(f"{prefix}weight_scale").view(torch.float8_e4m3fn),
                    orig_dtype=compute_dtype, orig_shape=(self.out_features, self.in_features))
                self.weight = torch.nn.Parameter(QuantizedTensor(weight, self.layout_type, params), requires_grad=False)

            def state_dict(self, *args, destination=None, prefix="", **kwargs):
                sd = destination if destination is not None else {}
                sd.update(self.weight.state_dict(f"{prefix}weight"))
                text = json.dumps({"format": self.quant_format}).encode()
                sd[f"{prefix}comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
                return sd

            def forward(self, input):
                return torch.nn.functional.linear(input, self.weight)

            def convert_weight(self, weight, inplace=False, **kwargs):
                return weight.dequantize()

            def set_weight(self, weight, inplace_update=False, seed=None, return_weight=False, **kwargs):
                made = QuantizedTensor.from_float(
                    weight, self.layout_type, scale="recalculate", stochastic_rounding=seed)
                self.weight = torch.nn.Parameter(made, requires_grad=False)

    return MixedPrecisionOps
