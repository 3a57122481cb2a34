"""The LoRAs of a patcher, as ComfyUI clones it and as its hooks come and go."""

from types import SimpleNamespace

from qpatch.hooks.lora_loader import stack
from qpatch.hooks.lora_loader.stack import Entry, Stack


class Named:
    """A LoRA as far as a stack looks at it."""

    def __init__(self, name):
        self.name = name

    def copy(self):
        return self


A, B = Named("a"), Named("b")


def patcher(hooks=None, registered=()):
    return SimpleNamespace(current_hooks=hooks, hook_patches=dict.fromkeys(registered))


def hook(reference, strength):
    return SimpleNamespace(hook_ref=reference, strength=strength)


def test_a_clone_has_a_list_of_its_own():
    one = Stack([Entry(A, 0.5)], {"ref": Entry(B, 1.0)})
    twin = one.on_model_patcher_clone()
    twin.entries.append(Entry(B, 1.0))
    twin.scheduled.clear()
    assert one.entries == [Entry(A, 0.5)] and one.scheduled == {"ref": Entry(B, 1.0)}


def test_what_is_wanted_is_the_list_in_the_order_of_the_nodes():
    assert Stack([Entry(A, 0.5), Entry(B, -1.0), Entry(A, 2.0)]).wanted(patcher()) == [(A, 0.5), (B, -1.0), (A, 2.0)]


def test_a_scheduled_lora_has_the_product_of_its_strength_and_the_hook_s():
    own = Stack([Entry(A, 1.0)], {"ref": Entry(B, 0.5)})
    now = SimpleNamespace(hooks=[hook("ref", 0.4)])
    assert own.wanted(patcher(now, ["ref"])) == [(A, 1.0), (B, 0.2)]


def test_a_registered_lora_that_is_not_in_effect_keeps_its_place_at_strength_zero():
    own = Stack([], {"ref": Entry(B, 0.5)})
    assert own.wanted(patcher(None, ["ref"])) == [(B, 0.0)]


def test_a_lora_whose_hook_is_no_longer_registered_is_not_wanted():
    assert Stack([], {"ref": Entry(B, 0.5)}).wanted(patcher(None, [])) == []


def test_a_clone_does_not_believe_that_it_was_injected():
    twin = SimpleNamespace(is_injected=True)
    stack.not_injected(None, twin)
    assert twin.is_injected is False
