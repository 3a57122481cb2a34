"""LoRA beside a quantized layer against baking it: load time, time per forward, extra memory.

    python tests/benchmarks/quant_lora.py [--formats nvfp4 int8] [--rank 32] [--tokens 1 256 4096] [--rounds 5]

Baking is what ComfyUI does to one weight, with comfy_kitchen's CPU backend: dequantize, add the product of the
factors in float32, quantize again. The pair is composed from the same factors, choice included. A CPU runs most
formats by dequantizing the weight at each forward, which hides the cost of the pair; so the pair alone is set
against a plain bfloat16 product of the layer's size too. On a GPU: --device cuda. Medians; on a CPU of the
process's own time, which a busy machine does not lengthen (OMP_NUM_THREADS=1).
"""

import argparse
import statistics
import time

import torch
from comfy_kitchen.tensor import QuantizedTensor
from torch.nn.functional import linear

from qpatch.hooks.quant_lora import branch, kept
from qpatch.hooks.quant_lora.pair import compose
from qpatch.hooks.quant_lora.splitting import split

#: (out, in)
SHAPES = ((3840, 3840), (12288, 3072))
FORMATS = {
    "nvfp4": ("TensorCoreNVFP4Layout", {}),
    "int8": ("TensorWiseINT8Layout", {"per_channel": True}),
    "int8-convrot": ("TensorWiseINT8Layout", {"per_channel": True, "convrot": True}),
    "w4a4": ("TensorCoreConvRotW4A4Layout", {}),
}


class Layer(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.out_features, self.in_features = weight.shape

    def forward(self, input):
        return linear(input, self.weight)


class Adapter:
    name = "lora"

    def __init__(self, out, inp, rank, device):
        up, down = torch.randn(out, rank, device=device) * 1e-3, torch.randn(rank, inp, device=device)
        self.weights = (up.bfloat16(), down.bfloat16(), float(rank), None, None, None)


def clock(call, rounds, device):
    """Median of the milliseconds of ``call``."""
    times, now = [], time.process_time if torch.device(device).type == "cpu" else time.perf_counter
    for _ in range(rounds):
        _wait(device)
        start = now()
        call()
        _wait(device)
        times.append((now() - start) * 1e3)
    return statistics.median(times)


def _wait(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def bake(weight, adapter):
    up, down, *_ = adapter.weights
    weight.requantize_from_float(weight.dequantize().float().addmm_(up.float(), down.float()), scale="recalculate",
                                 stochastic_rounding=1)


def beside(weight, adapter, device):
    """Split, choose, compose: all that a load does for one layer. A fresh adapter, so that nothing is kept of it."""
    found = split([(1.0, adapter, 1.0, None, None)], tuple(weight.shape))
    kept.of_terms(weight, found.placed)
    return compose(found.placed, tuple(weight.shape), torch.bfloat16, device)


def loading(weight, options):
    out, inp = weight.shape
    adapters = [Adapter(out, inp, options.rank, options.device) for _ in range(2 * options.rounds)]
    baked = clock(lambda: bake(weight, adapters[0]), options.rounds, options.device)
    composed = clock(lambda: beside(weight, adapters.pop(), options.device), options.rounds, options.device)
    return baked, composed


def forwards(layer, options):
    """tokens -> (ms without, ms with the pair, ms of the pair alone, ms of a plain product), and the pair's bytes."""
    weight = layer.weight
    out, inp = weight.shape
    pair = beside(weight, Adapter(out, inp, options.rank, options.device), options.device)
    found, dense = {}, weight.dequantize().bfloat16()
    for tokens in options.tokens:
        x = torch.randn(tokens, inp, device=options.device).bfloat16()
        layer(x)
        bare = clock(lambda: layer(x), options.rounds, options.device)
        branch.put(layer, fixed=pair)
        both = clock(lambda: layer(x), options.rounds, options.device)
        branch.remove(layer, fixed=True)
        output = linear(x, dense)
        alone = clock(lambda: pair.added_to(output, x), options.rounds, options.device)
        found[tokens] = bare, both, alone, clock(lambda: linear(x, dense), options.rounds, options.device)
    return found, pair.nbytes


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["nvfp4", "int8"])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 256, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    for name in options.formats:
        layout, settings = FORMATS[name]
        for out, inp in SHAPES:
            values = (torch.randn(out, inp, device=options.device) * 0.03).bfloat16()
            weight = QuantizedTensor.from_float(values, layout, **settings)
            layer = Layer(weight)
            with torch.inference_mode():
                baked, composed = loading(weight, options)
                timed, size = forwards(layer, options)
            print(f"{name} {out}x{inp} rank {options.rank}: load: bake {baked:.1f} ms, beside {composed:.1f} ms "
                  f"({baked / composed:.0f} times faster); "
                  f"memory {size / 2**10:.0f} KiB of {weight._qdata.nbytes / 2**10:.0f}")
            for tokens, (bare, both, alone, plain) in timed.items():
                print(f"    {tokens:5} tokens: {bare:.2f} ms, with the pair {both:.2f} ms "
                      f"({(both / bare - 1) * 100:+.1f} %); the pair alone {alone:.2f} ms, "
                      f"{alone / plain * 100:.1f} % of a plain product", flush=True)


if __name__ == "__main__":
    main()
