"""A random walk over what people and ComfyUI do with the clones of one patcher.

After each step the model, as it stands for the patcher that is loaded, gives what a model gives that
was freshly composed from that patcher's list; at the end the base is bitwise the original.
"""

import gc
import os

import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from qpatch import lora

from . import effect, world
from .cases import load

STRENGTHS = st.sampled_from((-0.02, 0.01, 0.02))
#: How long the walk is; QPATCH_TEST_WALK multiplies the number of walks, for a night.
EXAMPLES, STEPS = 4 * int(os.environ.get("QPATCH_TEST_WALK", "1")), 20


class Walker(RuleBasedStateMachine):
    """``pair`` is the model that is walked on, ``twin`` an equal one that is composed from scratch for comparison."""

    pair: effect.Pair
    twin: effect.Pair
    files: list
    patchers = Bundle("patchers")

    @initialize(target=patchers)
    def start(self):
        self.loaded, self.hooked = None, None
        return self.pair.quantized, ()

    @rule(target=patchers, chosen=patchers)
    def clone(self, chosen):
        return chosen[0].clone(), chosen[1]

    @rule(target=patchers, chosen=patchers, number=st.integers(0, 2), strength=STRENGTHS)
    def add_a_lora(self, chosen, number, strength):
        return load(chosen[0], self.files[number], strength), (*chosen[1], (number, strength))

    @rule(target=patchers, chosen=patchers, strength=STRENGTHS)
    def change_the_last_strength(self, chosen, strength):
        patcher, loras = self.pair.quantized, (*chosen[1][:-1], *[(number, strength) for number, _ in chosen[1][-1:]])
        for number, one in loras:
            patcher = load(patcher, self.files[number], one)
        return patcher, loras

    @rule(chosen=patchers)
    def run(self, chosen):
        self.pair.run(chosen[0])
        self.loaded = chosen

    @rule(chosen=consumes(patchers))
    def forget(self, chosen):
        """A node ran again and its old output is gone."""
        if self.loaded is chosen:
            # ComfyUI then takes the parent for what is loaded.
            self.loaded = None
        del chosen
        gc.collect()

    @rule()
    def unload_everything(self):
        import comfy.model_management

        comfy.model_management.unload_all_models()
        self.loaded = None

    @rule()
    def unload_a_part(self):
        if self.loaded is not None:
            self.loaded[0].partially_unload(torch.device("cpu"), 1)

    @rule(chosen=patchers)
    def look_at_the_state_dict(self, chosen):
        """Many nodes do; a loaded patcher ejects and injects around it."""
        with chosen[0].use_ejected():
            chosen[0].model.state_dict()

    @rule(chosen=patchers)
    def ask_for_its_weights(self, chosen):
        """As merging and extraction nodes do, whichever patcher is loaded."""
        chosen[0].get_key_patches()
        chosen[0].model_state_dict()

    @rule(chosen=patchers)
    def detach(self, chosen):
        chosen[0].detach(unpatch_all=False)
        if self.loaded is not None and chosen[0] is self.loaded[0]:
            self.loaded = None

    @invariant()
    def what_stands_is_what_the_loaded_patcher_wants(self):
        if getattr(self, "loaded", None) is None:
            return
        lora.compose(self.twin.model, [(self.files[number].tensors, strength) for number, strength in self.loaded[1]])
        wanted = world.evaluate(self.twin.quantized, self.twin.inputs)
        assert torch.equal(world.evaluate(self.loaded[0], self.pair.inputs), wanted)

    def teardown(self):
        lora.reset(self.twin.model)
        # The machine still holds its patchers, one of which may be loaded.
        self.unload_everything()
        assert self.pair.bare()
