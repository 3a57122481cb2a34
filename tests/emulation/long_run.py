"""Many switches between five LoRA stacks by ComfyUI's nodes, on one Nunchaku model.

QPATCH_TEST_SWITCHES=10000 makes many.
"""

import gc
import os
import random
import tracemalloc

import torch
from faults.long_run import PYTHON, growth

from .cases import Restoring, load
from .effect import example, only

SWITCHES = int(os.environ.get("QPATCH_TEST_SWITCHES", 12))


class LongRunCases(Restoring):
    """Needs a fixture ``pairs`` (see cases.Restoring)."""

    def test_switching_between_five_clones_with_loras_leaves_no_memory_behind_and_ends_at_the_base(self, pairs):
        pair, chance, measured = pairs("qwen-image"), random.Random(0), []
        files = [only(example("qwen-image", seed=seed), "to_out.0", "img_mod.1", "img_in") for seed in range(3)]
        outputs = {}

        def stack(number):
            patcher = pair.quantized
            for place, file in enumerate(files[:1 + number % 3]):
                patcher = load(patcher, file, 0.01 * (number + place + 1))
            return patcher

        clones = [stack(number) for number in range(5)]
        tracemalloc.start()
        try:
            for done in range(SWITCHES):
                number = chance.randrange(5)
                if done % 7 == 0:
                    # The node runs again: a new clone with the same LoRAs takes the place of the old one.
                    clones[number] = stack(number)
                output = pair.run(clones[number])
                assert torch.equal(outputs.setdefault(number, output), output)
                if done % max(SWITCHES // 30, 1) == 0:
                    assert torch.equal(pair.run(pair.quantized), pair.base)
                    gc.collect()
                    measured.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert growth(measured) < PYTHON, measured
