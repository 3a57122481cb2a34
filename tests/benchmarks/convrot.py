"""ConvRot: the rotation against comfy_kitchen's, baking a LoRA stage by stage, and what an INT8 convolution rotates.

    python tests/benchmarks/convrot.py [--rounds 15] [--threads 1] [rotation] [bake] [convolution]

CPU time of the calling thread. Variants take turns within each round and are compared by the ratios within
the rounds: median and quartiles. The control is the same variant taken twice.
"""

import argparse
import statistics
import time

import torch
from comfy_kitchen.tensor import QuantizedTensor, get_layout_class

from qpatch.hooks.convrot import config, kitchen, layouts
from qpatch.hooks.convrot.basis import requantized, stored_values, with_stored_values
from qpatch.hooks.convrot.rotation import rotate, rotate_channels

SIZE = 256
SHAPES = {"weight 3840 x 3840": (3840, 3840), "weight 10240 x 3840": (10240, 3840),
          "activation 4096 x 3840": (4096, 3840)}
#: Of SDXL at 1024 x 1024: outputs, inputs, side of the kernel, side of the image, group size.
CONVOLUTIONS = ((320, 320, 3, 64, 64), (640, 640, 3, 32, 64), (1280, 1280, 3, 32, 256), (1280, 2560, 3, 16, 256),
                (1280, 640, 1, 32, 64))


def taken(variants: dict, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each variant, by round; one round before them does not count."""
    times = {name: [] for name in variants}
    for index in range(rounds + 1):
        for name, run in variants.items():
            began = time.thread_time()
            run()
            if index:
                times[name].append((time.thread_time() - began) * 1e3)
    return times


def ratio(above: list[float], below: list[float]) -> str:
    pairs = sorted(a / b for a, b in zip(above, below))
    quarter = len(pairs) // 4
    return f"{statistics.median(pairs):.2f} ({pairs[quarter]:.2f} to {pairs[-quarter - 1]:.2f})"


def rotation(rounds: int) -> None:
    try:
        from comfy_kitchen.tensor.int8_utils import _build_hadamard, _rotate_activation, _rotate_weight
    except ImportError:
        print("  this comfy_kitchen has no rotation of its own")
        return
    for dtype in (torch.float32, torch.bfloat16):
        for name, shape in SHAPES.items():
            x = torch.randn(shape).to(dtype)
            theirs = _rotate_activation if name.startswith("activation") else _rotate_weight

            def kitchen_rotates(x=x, theirs=theirs):
                theirs(x, _build_hadamard(SIZE, device=x.device, dtype=x.dtype), SIZE)

            times = taken({"ours": lambda x=x: rotate(x, SIZE), "kitchen": kitchen_rotates, "copy": x.clone,
                           "again": kitchen_rotates}, rounds)
            median = {variant: statistics.median(values) for variant, values in times.items()}
            print(f"  {str(dtype)[6:]:9} {name:22} ours {median['ours']:7.2f} ms, kitchen {median['kitchen']:7.2f} ms, "
                  f"ours / kitchen {ratio(times['ours'], times['kitchen'])}, "
                  f"control {ratio(times['again'], times['kitchen'])}, "
                  f"ours / copy {median['ours'] / median['copy']:.1f}")


def bake(rounds: int) -> None:
    """A rank-32 LoRA on a 3840 x 3840 weight in bfloat16: by way of the model's basis, and in the rotated one."""
    out = width = 3840
    up, down = torch.randn(out, 32) * 0.05, torch.randn(32, width) * 0.05
    layouts_found = {"NVFP4": config.NVFP4_LAYOUT, "INT8": config.INT8_LAYOUT}
    for name, base in layouts_found.items():
        try:
            weight = QuantizedTensor.from_float(torch.randn(out, width), layouts.rotated(base, SIZE)).to(torch.bfloat16)
        except KeyError:
            continue
        dense, values = weight.dequantize(), stored_values(weight)
        turned = rotate(down, SIZE)
        stages = {
            "around: un-rotate and read": weight.dequantize,
            "around: add": lambda dense=dense: dense + (up @ down).to(dense.dtype),
            "around: rotate and requantize": lambda weight=weight, dense=dense: requantized(weight, dense),
            "direct: read": lambda weight=weight: stored_values(weight),
            "direct: rotate the factor": lambda: rotate(down, SIZE),
            "direct: add": lambda values=values: values.addmm_(up, turned, alpha=1e-3),
            "direct: requantize": lambda weight=weight, values=values: with_stored_values(weight, values),
        }
        times = taken(stages, max(3, rounds // 5))
        median = {stage: statistics.median(values) for stage, values in times.items()}
        for stage, milliseconds in median.items():
            print(f"  {name:5} {stage:30} {milliseconds:8.1f} ms")
        around = sum(value for stage, value in median.items() if stage.startswith("around"))
        direct = sum(value for stage, value in median.items() if stage.startswith("direct"))
        print(f"  {name:5} without baking {around:.0f} ms at each cast; with it {direct:.0f} ms once "
              f"({around / direct:.2f} times as fast)")


def convolution(rounds: int) -> None:
    """Layers of SDXL at 1024 x 1024, batch 2: rotate the image, or un-rotate the kernel, at every forward."""
    for dtype in (torch.float32, torch.bfloat16):
        for out, channels, kernel, side, size in CONVOLUTIONS:
            image = torch.randn(2, channels, side, side).to(dtype)
            weight = torch.randn(out, channels, kernel, kernel)
            weight = QuantizedTensor.from_float(weight, layouts.convolution(size)).to(dtype)
            dense, layout = weight.dequantize(), get_layout_class(weight._layout_cls)
            times = taken({
                "convolution": lambda: torch.nn.functional.conv2d(image, dense, padding=kernel // 2),
                "read the kernel": lambda: layout.stored(weight._qdata, weight._params),
                "rotate the image": lambda: rotate_channels(image, size),
                "un-rotate the kernel": lambda: rotate_channels(dense, size).contiguous(),
            }, max(3, rounds // 3))
            median = {variant: statistics.median(values) for variant, values in times.items()}
            chosen = "image" if image.numel() <= dense.numel() else "kernel"
            print(f"  {str(dtype)[6:]:9} {channels} -> {out}, {kernel} x {kernel}, {side} x {side}: "
                  + ", ".join(f"{variant} {value:.1f} ms" for variant, value in median.items())
                  + f"; rotates the {chosen}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("parts", nargs="*", default=["rotation", "bake", "convolution"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"comfy_kitchen {kitchen.version()}, torch {torch.__version__}, {arguments.threads} thread(s)")
    for part in arguments.parts:
        print(part)
        with torch.inference_mode():
            {"rotation": rotation, "bake": bake, "convolution": convolution}[part](arguments.rounds)


if __name__ == "__main__":
    main()
