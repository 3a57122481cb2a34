"""A small model of quantized layers, LoRAs for it, and patchers that carry them."""

import torch

OUT, IN = 64, 256


class Model(torch.nn.Module):
    def __init__(self, comfy, dtype=torch.float32):
        # Here: where comfy_kitchen is not installed the tests are skipped, not broken.
        from comfy_kitchen.tensor import QuantizedTensor

        super().__init__()
        for name in ("a", "b"):
            values = (torch.randn(OUT, IN) * 0.03).to(dtype)
            quantized = QuantizedTensor.from_float(values, "TensorCoreNVFP4Layout")
            setattr(self, name, comfy.Linear(quantized, torch.randn(OUT, dtype=dtype)))
        self.norm = torch.nn.LayerNorm(OUT, dtype=dtype)

    def forward(self, x):
        return self.norm(self.a(x)) + self.b(x)


def adapter(comfy, rank=4, rows=OUT):
    return comfy.Adapter("lora", torch.randn(rows, rank) * 0.01, torch.randn(rank, IN), None, None, None, None)


def dense(one):
    return one.weights[0].double() @ one.weights[1].double()


def on(patcher, changes, strength=1.0, fit=1e32):
    clone = patcher.clone()
    clone.add_patches(changes, strength)
    clone.partially_load(clone.load_device, fit)
    return clone


def forwards(model):
    return [name for name, module in model.named_modules() if "forward" in vars(module)]
