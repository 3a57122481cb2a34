"""Small stand-ins for what qpatch mends, as texts: they are written to a temporary folder and imported from there.

They keep the contracts and the fault that the hooks are about, and nothing else of the real
packages: ``comfy.ops`` builds a Linear without parameters, ``nunchaku`` and a node pack read them.
"""

MEMORY_MANAGEMENT = '''\
aimdo_enabled = True
'''

OPS = '''\
"""A Linear that gets its parameters with the state dict, as under dynamic VRAM."""
import torch


class disable_weight_init:
    class Linear(torch.nn.Linear):
        comfy_cast_weights = True

        def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features = in_features, out_features
            self.weight = self.bias = None
            self.comfy_need_lazy_init_bias = bias
            self.weight_comfy_model_dtype = self.bias_comfy_model_dtype = dtype
'''

LINEAR = '''\
"""Quantized layers, made of a Linear of which dtype and device of the weight are read."""
import torch
from torch import nn


class SVDQW4A4Linear(nn.Module):
    def __init__(self, in_features, out_features, rank=32, bias=True, precision="int4",
                 act_unsigned=False, torch_dtype=torch.bfloat16, device=None):
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.precision, self.torch_dtype, self.act_unsigned = precision, torch_dtype, act_unsigned

        def empty(*shape, dtype=torch_dtype):
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

        self.qweight = empty(out_features, in_features // 2, dtype=torch.int8)
        self.bias = empty(out_features) if bias else None
        self.wscales = empty(in_features // 64, out_features)
        self.smooth_factor = empty(in_features)
        self.proj_down = empty(in_features, rank)
        self.proj_up = empty(out_features, rank)

    @classmethod
    def from_linear(cls, linear, **kwargs):
        torch_dtype = kwargs.pop("torch_dtype", linear.weight.dtype)
        return cls(linear.in_features, linear.out_features, bias=linear.bias is not None,
                   torch_dtype=torch_dtype, device=linear.weight.device, **kwargs)
'''

PACK = '''\
from .models.zimage import load_model
'''

ZIMAGE = '''\
"""A model whose Linears are exchanged for quantized ones before its state dict is loaded."""
import torch
from torch import nn
from comfy.ops import disable_weight_init as ops

from nunchaku.models.linear import SVDQW4A4Linear


def add_comfy_cast_weights_attr(svdq_linear, comfy_linear):
    if hasattr(comfy_linear, "comfy_cast_weights"):
        svdq_linear.comfy_cast_weights = comfy_linear.comfy_cast_weights
        svdq_linear.weight = None


def fuse_to_svdquant_linear(comfy_linear1, comfy_linear2, **kwargs):
    assert comfy_linear1.bias is None and comfy_linear2.bias is None
    torch_dtype = kwargs.pop("torch_dtype", comfy_linear1.weight.dtype)
    fused = SVDQW4A4Linear(
        comfy_linear1.in_features, comfy_linear1.out_features + comfy_linear2.out_features, bias=False,
        torch_dtype=torch_dtype, device=comfy_linear1.weight.device, **kwargs)
    add_comfy_cast_weights_attr(fused, comfy_linear1)
    return fused


class ComfyNunchakuZImageAttention(nn.Module):
    def __init__(self, qkv, out, **kwargs):
        super().__init__()
        self.qkv = SVDQW4A4Linear.from_linear(qkv, **kwargs)
        self.out = SVDQW4A4Linear.from_linear(out, **kwargs)


def load_model():
    """(attention, w13, the Linears they were made of)."""
    shapes = {"qkv": (128, 384, False), "out": (128, 128, True), "w1": (128, 256, False), "w3": (128, 256, False)}
    plain = {name: ops.Linear(*shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    attention = ComfyNunchakuZImageAttention(plain["qkv"], plain["out"], rank=16)
    w13 = fuse_to_svdquant_linear(plain["w1"], plain["w3"], rank=16, torch_dtype=torch.float16)
    return attention, w13, plain
'''

#: What ComfyUI does with a node pack: its name is its path, and only its submodules go through the finders.
MAIN = '''\
import importlib.util, json, os, sys

home = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(home, "ComfyUI"), os.path.join(home, "site")]
folder = os.path.join(home, "ComfyUI", "custom_nodes", "ComfyUI-nunchaku")
name = folder.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"))
pack = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)


def facts(layer):
    return {"in": layer.in_features, "out": layer.out_features, "dtype": str(layer.proj_down.dtype),
            "device": str(layer.qweight.device), "bias": layer.bias is not None}


try:
    attention, w13, plain = pack.load_model()
except Exception as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
else:
    print(json.dumps({"qkv": facts(attention.qkv), "out": facts(attention.out), "w13": facts(w13),
                      "untouched": all(linear.weight is None for linear in plain.values())}))
'''

#: A LoRA for parts of two fused layers, composed into a model of stand-in layers. The packed factors are
#: read back by the kernel's index formula, element by element, and multiplied out in float64.
LORA = '''\
import json, os, sys

home = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(home, "ComfyUI"), os.path.join(home, "site")]
import torch
from torch import nn
from nunchaku.models.linear import SVDQW4A4Linear
from qpatch import lora


# safetensors' own save_file needs numpy, which neither it nor torch brings along.
def save(tensors, file):
    table, data = {}, b""
    for key, tensor in tensors.items():
        start, data = len(data), data + bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        table[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, len(data)]}
    header = json.dumps(table).encode()
    with open(file, "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header + data)


def unpacked(factor, down):
    channels, rank = factor.shape
    i = torch.arange(channels * rank)
    fragment, inside = i // 256, i % 256
    n, k = inside // 4 % 2 * 8 + inside // 32, inside // 2 % 2 * 8 + inside // 8 % 4 * 2 + inside % 2
    of_channels, of_ranks = fragment // (rank // 16) * 16, fragment % (rank // 16) * 16
    plain = torch.zeros((rank, channels) if down else (channels, rank), dtype=torch.float64)
    rows, columns = (of_ranks, of_channels) if down else (of_channels, of_ranks)
    plain[rows + n, columns + k] = factor.reshape(-1).double()
    return plain


def product(layer):
    return unpacked(layer.proj_up.detach(), False) @ unpacked(layer.proj_down.detach(), True)


torch.manual_seed(0)
block, model = nn.Module(), nn.Module()
block.attention, block.feed_forward = nn.Module(), nn.Module()
block.attention.qkv = SVDQW4A4Linear(128, 384, rank=16, bias=False)
block.feed_forward.w13 = SVDQW4A4Linear(128, 512, rank=16, bias=False)
# By this layer a Z-Image block is told from a Lumina 2 block.
block.adaLN_modulation = nn.Sequential(nn.Linear(64, 512))
model.layers = nn.ModuleList([block])
layers = {"qkv": block.attention.qkv, "w13": block.feed_forward.w13}
for layer in layers.values():
    layer.proj_down.normal_(), layer.proj_up.normal_()

# Part of a layer in the file: where its rows stand in the fused one (w3 before w1), its rank and its alpha.
PARTS = {"attention.to_q": ("qkv", 0, 128, 8, 4.0), "attention.to_v": ("qkv", 256, 128, 20, 20.0),
         "feed_forward.w1": ("w13", 256, 256, 4, 8.0), "feed_forward.w3": ("w13", 0, 256, 16, 1.0)}
wanted = {name: torch.zeros(layer.out_features, 128, dtype=torch.float64) for name, layer in layers.items()}
tensors = {}
for part, (name, row, rows, rank, alpha) in PARTS.items():
    down, up, key = torch.randn(rank, 128), torch.randn(rows, rank), "diffusion_model.layers.0." + part
    tensors.update({key + ".lora_down.weight": down, key + ".lora_up.weight": up, key + ".alpha": torch.tensor(alpha)})
    wanted[name][row:row + rows] = alpha / rank * up.double() @ down.double()
file = os.path.join(home, "lora.safetensors")
save(tensors, file)

before = {name: (layer.proj_down, layer.proj_up, product(layer)) for name, layer in layers.items()}


def error(strength):
    return max(float((product(layer) - before[name][2] - strength * wanted[name]).norm()
                     / (strength * wanted[name]).norm()) for name, layer in layers.items())


lora.compose(model, [(file, 0.5)], log=False)
errors = [error(0.5)]
lora.set_strengths(model, [1.25])
errors.append(error(1.25))
lora.reset(model)
same = all(layer.proj_down is before[name][0] and layer.proj_up is before[name][1]
           and torch.equal(product(layer), before[name][2]) for name, layer in layers.items())
print(json.dumps({"errors": errors, "restored": same}))
'''

#: Path below the temporary folder -> text.
FILES = {
    "ComfyUI/comfy/__init__.py": "",
    "ComfyUI/comfy/memory_management.py": MEMORY_MANAGEMENT,
    "ComfyUI/comfy/ops.py": OPS,
    "ComfyUI/custom_nodes/ComfyUI-nunchaku/__init__.py": PACK,
    "ComfyUI/custom_nodes/ComfyUI-nunchaku/models/__init__.py": "",
    "ComfyUI/custom_nodes/ComfyUI-nunchaku/models/zimage.py": ZIMAGE,
    "site/nunchaku/__init__.py": "",
    "site/nunchaku/models/__init__.py": "",
    "site/nunchaku/models/linear.py": LINEAR,
    "main.py": MAIN,
    "lora.py": LORA,
}
