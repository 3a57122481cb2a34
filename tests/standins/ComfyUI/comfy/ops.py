"""Stand-in for comfy.ops: a Linear that has no parameters until its state dict is loaded."""

import torch

import comfy.memory_management


class CastWeightBiasOp:
    comfy_cast_weights = False
    weight_function = []
    bias_function = []


class disable_weight_init:
    class Linear(torch.nn.Linear, CastWeightBiasOp):
        def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
            own_loading = type(self)._load_from_state_dict is not disable_weight_init.Linear._load_from_state_dict
            if own_loading or not comfy.memory_management.aimdo_enabled:
                super().__init__(in_features, out_features, bias, device, dtype)
                return
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features = in_features, out_features
            self.weight = None
            self.bias = None
            self.comfy_need_lazy_init_bias = bias
            self.weight_comfy_model_dtype = self.bias_comfy_model_dtype = dtype

        def reset_parameters(self):
            return None

        def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
            if not comfy.memory_management.aimdo_enabled:
                return super()._load_from_state_dict(
                    state_dict, prefix, metadata, strict, missing, unexpected, errors)
            for name in ("weight", "bias"):
                value = state_dict.get(prefix + name)
                if value is not None:
                    # The checkpoint's dtype stays; the declared one is not used.
                    setattr(self, name, torch.nn.Parameter(value.clone(), requires_grad=False))
            if self.weight is None:
                # Upstream's fault: a missing weight is made with its axes exchanged.
                shape = (self.in_features, self.out_features)
                self.weight = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
                missing.append(prefix + "weight")
            if self.bias is None and getattr(self, "comfy_need_lazy_init_bias", False):
                self.bias = torch.nn.Parameter(torch.zeros(self.out_features), requires_grad=False)
                missing.append(prefix + "bias")

    class RMSNorm(torch.nn.RMSNorm, CastWeightBiasOp):
        pass


class manual_cast(disable_weight_init):
    class Linear(disable_weight_init.Linear):
        comfy_cast_weights = True

    class RMSNorm(disable_weight_init.RMSNorm):
        comfy_cast_weights = True
