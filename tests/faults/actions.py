"""Everything that changes what is in a model, as (states before, action, states that are right after a failure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qpatch import lora

from . import stacks


@dataclass
class Action:
    """``prepare`` brings a model to the start; ``run`` is what fails; ``ends``: (old state, new state)."""

    prepare: Callable
    run: Callable
    ends: tuple


def actions(root) -> dict[str, Action]:
    """For a bare ``root``, which is left bare."""
    first, second = lora.open_lora(stacks.file(1)), lora.open_lora(stacks.file(2, producer="lightning", alpha=1.0))
    one, both = [(first, 1.0)], [(second, 0.5), (first, -1.0)]
    bare = stacks.State(root)

    def state(*calls):
        for call in calls:
            call()
        found = stacks.State(root)
        lora.reset(root)
        return found

    def compose(stack):
        return lambda: lora.compose(root, stack, log=False)

    def put_back():
        lora.compose(root, one, log=False)
        lora.set_aside(root)

    def rescale():
        lora.set_strengths(root, [0.25, 3.0])

    with_one, with_both = state(compose(one)), state(compose(both))
    rescaled = state(compose(both), rescale)
    plan = lora.plan(root, one)
    return {
        "compose": Action(lambda: None, compose(one), (bare, with_one)),
        "apply": Action(lambda: None, lambda: plan.apply(log=False), (bare, with_one)),
        "compose another stack": Action(compose(one), compose(both), (with_one, with_both)),
        "compose nothing": Action(compose(one), compose([]), (with_one, bare)),
        "compose other strengths": Action(compose(both), compose([(second, 0.25), (first, 3.0)]),
                                          (with_both, rescaled)),
        "put back": Action(put_back, compose(one), (bare, with_one)),
        "set_strengths": Action(compose(both), rescale, (with_both, rescaled)),
        "set_aside": Action(compose(both), lambda: lora.set_aside(root), (with_both, bare)),
        "reset": Action(compose(both), lambda: lora.reset(root), (with_both, bare)),
    }


NAMES = ("compose", "apply", "compose another stack", "compose nothing", "compose other strengths", "put back",
         "set_strengths", "set_aside", "reset")


def check_after(root, action: Action, bare: stacks.State, what: str) -> None:
    """``action`` has failed: one of its two states, and everything works as if it had never been."""
    old, new = action.ends
    assert old.is_of(root) or new.is_of(root) or bare.is_of(root), what
    assert root.__dict__.get("_qpatch_lora") is None or not root._qpatch_lora.lock._is_owned(), what
    lora.reset(root)
    bare.check_same_objects(root)
    action.prepare()
    action.run()
    assert new.is_of(root), what
    lora.reset(root)
    bare.check_same_objects(root)
