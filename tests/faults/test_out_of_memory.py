"""Out of memory at each allocation of everything that changes a model: it is as it was, or done, and goes on working.

QPATCH_TEST_STEP=1 tries every allocation; by default it is every 11th, another one for each action.
"""

import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from faults import stacks
from faults.actions import NAMES, actions, check_after

STEP = int(os.environ.get("QPATCH_TEST_STEP", 11))


class Exhausted(TorchDispatchMode):
    """Fails at the ``n``-th operation that allocates memory; with ``after``, at all of them from there on."""

    def __init__(self, n, error, after=False):
        super().__init__()
        self.left, self.error, self.after = n, error, after

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.numel()]
        if any(_address(tensor) not in given for tensor in made):
            self.left -= 1
            if self.left == 0 or self.after and self.left < 0:
                raise self.error("injected")
        return result


def _address(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.fixture(scope="module", params=["int4", "nvfp4"])
def world(request):
    root = stacks.model(precision=request.param)
    return root, actions(root), stacks.State(root)


@pytest.mark.parametrize("after", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("name", NAMES)
def test_a_failed_allocation_leaves_the_old_state_or_the_new_one(world, name, after):
    root, known, bare = world
    action = known[name]
    error = torch.OutOfMemoryError if after else MemoryError
    for n in range(1 + NAMES.index(name) % STEP, 10_000, STEP):
        action.prepare()
        try:
            with Exhausted(n, error, after) as memory:
                action.run()
        except error:
            check_after(root, action, bare, f"allocation {n} of {name}")
        else:
            assert memory.left > 0
            assert action.ends[1].is_of(root)
            break
    lora_free(root, bare)
    # These compute nothing, so that they succeed when there is no memory left at all.
    assert n > STEP or name in ("compose nothing", "reset", "set_aside", "put back", "set_strengths",
                                "compose other strengths")


def lora_free(root, bare):
    from qpatch import lora

    lora.reset(root)
    bare.check_same_objects(root)
