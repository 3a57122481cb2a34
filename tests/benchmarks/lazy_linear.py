"""Extra memory of the lazy-linear hook on a lazy Linear of Z-Image's size (3840 x 11520).

    python tests/benchmarks/lazy_linear.py [NUNCHAKU_PARENT]

Measured with the nunchaku in the folder given (any that has the real module), else with the stand-in.
The layer itself has to be allocated either way; what counts is the peak beyond it. Tensor memory
is counted by the allocator (torch.profiler), Python objects by tracemalloc. For comparison: the
same Linear with its weight, as it is without dynamic VRAM. Exit code 1 if the bound does not hold.
"""

import sys
import tracemalloc
from pathlib import Path

import torch

IN, OUT = 3840, 11520
BOUND = 1_000_000


def import_nunchaku(parent):
    """nunchaku's modules ``linear`` and ``utils``, through the import hook that qpatch has put in place."""
    sys.path.insert(0, str(parent))
    from nunchaku.models import linear, utils

    return linear, utils


def unfilled(out_features):
    """A lazy Linear 3840 -> ``out_features`` that declares a bias."""
    from qpatch.hooks.lazy_probe import UnfilledLinear

    linear = UnfilledLinear(bias=True, dtype=torch.bfloat16)
    linear.in_features, linear.out_features = IN, out_features
    return linear


def peak_of_tensors(function):
    """(result, bytes of tensors at the peak) of one call, on the CPU."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return result, peak


def peak_of_objects(function):
    """Bytes of Python objects at the peak of one call."""
    tracemalloc.start()
    try:
        result = function()
        del result
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def report(name, make) -> bool:
    """Print what ``make`` costs beyond the layer that it makes; whether that is within the bound."""
    make()
    layer, peak = peak_of_tensors(make)
    size = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
    objects = peak_of_objects(make)
    print(f"{name}: layer {size / 1e6:.1f} MB, beyond it at the peak {peak - size} bytes of tensors "
          f"and {objects} bytes of Python objects")
    return peak - size + objects < BOUND


def main():
    from qpatch import catalogue, states

    standin = Path(__file__).resolve().parents[1] / "standins" / "packages"
    linear, utils = import_nunchaku(sys.argv[1] if len(sys.argv) > 1 else standin)
    print(f"{linear.__file__}; hook lazy-linear: {states.overall(catalogue.named('lazy-linear'))[0]}")
    _, filled = peak_of_tensors(lambda: torch.nn.Linear(IN, OUT, dtype=torch.bfloat16))
    print(f"a Linear {IN} -> {OUT} with its weight, bfloat16: {filled / 1e6:.1f} MB")
    source, parts = unfilled(OUT), [unfilled(OUT // 3) for _ in range(3)]
    held = [
        report("SVDQW4A4Linear.from_linear", lambda: linear.SVDQW4A4Linear.from_linear(source)),
        report("AWQW4A16Linear.from_linear", lambda: linear.AWQW4A16Linear.from_linear(source)),
        report("fuse_linears of three", lambda: utils.fuse_linears(parts)),
    ]
    print(f"bound {BOUND / 1e6:.0f} MB: {'holds' if all(held) else 'BROKEN'}")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
