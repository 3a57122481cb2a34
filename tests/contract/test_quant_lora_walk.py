"""Hook quant-lora: random walks over what people and a real ComfyUI (QPATCH_TEST_COMFYUI) do with a patcher's clones.

After each step the loaded model gives, bit by bit, what a model gives that was loaded once, freshly, with
the patches of that patcher; at the end the base is the original.
"""

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from quant_lora_layers import Model, layer, lora
from quant_lora_twins import CPU, available, real

comfy, vram = real.comfy, real.vram

pytestmark = pytest.mark.comfyui

#: Large enough that dynamic VRAM does not bring a layer over as a whole (from 16 KiB on).
OUT, IN = 256, 256
STRENGTHS = st.sampled_from((-1.0, 0.0, 0.3, 1.0))
#: QPATCH_TEST_WALK multiplies the number of walks, for a night.
EXAMPLES, STEPS = 20 * int(os.environ.get("QPATCH_TEST_WALK", "1")), 25


class World:
    """Layers of all formats, changes for them, and models built of the same layers anew."""

    def __init__(self, comfy, device=CPU):
        self.comfy, self.device, self.formats = comfy, device, available(comfy)
        self.x = torch.randn(3, IN).to(device)
        self.layers = {name: layer(comfy, name, out=OUT, inp=IN) for name in self.formats}
        self.bits = {name: made.weight._qdata.clone() for name, made in self.layers.items()}
        sizes = ((1, 0.002), (4, 0.05), (16, 0.6))
        self.changes = [lora(comfy, rank, size, out=OUT, inp=IN)[0] for rank, size in sizes]
        full = ("diff", (torch.randn(OUT, IN) * 0.02,))
        up, down, *rest = self.changes[1].weights
        dora = comfy.weight_adapter.LoRAAdapter(set(), (up, down, None, None, torch.ones(OUT, 1), None))
        self.changes += [full, dora]

    def model(self):
        """A model of new modules around the same tensors, and its patcher."""
        fresh = {}
        for name, old in self.layers.items():
            made = layer(self.comfy, name, out=OUT, inp=IN)
            made.weight = torch.nn.Parameter(old.weight.data, requires_grad=False)
            made.bias = torch.nn.Parameter(old.bias.data.clone(), requires_grad=False)
            fresh[name] = made
        classes = self.comfy.model_patcher
        cls = classes.ModelPatcher if self.device == CPU else classes.ModelPatcherDynamic
        return cls(Model(fresh), self.device, CPU)

    def outputs(self, model) -> dict:
        with torch.no_grad():
            return {name: made(self.x) for name, made in model.diffusion_model.items()}


class Walker(RuleBasedStateMachine):
    world: World
    patchers = Bundle("patchers")

    @initialize(target=patchers, mode=st.sampled_from(("side", "auto", "bake")))
    def start(self, mode):
        os.environ["QPATCH_QUANT_LORA"] = mode
        self.base = self.world.model()
        self.loaded, self.whole = None, True
        self.base.partially_load(self.world.device, 1e32)
        self.original = self.world.outputs(self.base.model)
        self.base.detach()
        return self.base

    @rule(target=patchers, chosen=patchers, name=st.integers(0, 7), number=st.integers(0, 4), strength=STRENGTHS)
    def patch(self, chosen, name, number, strength):
        clone = chosen.clone()
        name = self.world.formats[name % len(self.world.formats)]
        clone.add_patches({f"diffusion_model.{name}.weight": self.world.changes[number]}, strength)
        return clone

    @rule(target=patchers, chosen=patchers, number=st.integers(0, 2), strength=STRENGTHS)
    def patch_all(self, chosen, number, strength):
        clone = chosen.clone()
        clone.add_patches({f"diffusion_model.{name}.weight": self.world.changes[number] for name in self.world.formats},
                          strength)
        return clone

    @rule(target=patchers, chosen=patchers)
    def clone(self, chosen):
        return chosen.clone()

    @rule(chosen=patchers, memory=st.sampled_from((1e32, 1e32, 20000.0, 0.1)))
    def run(self, chosen, memory):
        """As ComfyUI brings another clone of a model into use."""
        if self.loaded is not chosen and self.loaded is not None:
            self.loaded.detach(unpatch_all=False)
        chosen.partially_load(self.world.device, memory)
        self.loaded, self.whole = chosen, memory > 1e30

    @rule(chosen=consumes(patchers))
    def forget(self, chosen):
        if chosen is not self.loaded:
            del chosen
            gc.collect()

    @rule(amount=st.sampled_from((1.0, 9000.0, 1e32)))
    def unload_a_part(self, amount):
        if self.loaded is not None and self.world.device == CPU:
            self.loaded.partially_unload(CPU, amount)
            self.whole = False

    @rule()
    def unload(self):
        if self.loaded is not None:
            self.loaded.detach()
            self.loaded = None

    @rule()
    def save(self):
        # Before 0.21 ComfyUI writes no quantized model that is not loaded whole, with a LoRA or without.
        if self.loaded is not None and hasattr(self.world.comfy.model_patcher, "LazyCastingParamPiece"):
            with torch.inference_mode():
                for value in self.loaded.state_dict_for_saving().values():
                    value.to("cpu")

    @invariant()
    def what_stands_is_what_the_loaded_patcher_wants(self):
        if getattr(self, "loaded", None) is None:
            return
        fresh = self.world.model()
        fresh.patches = {key: list(patches) for key, patches in self.loaded.patches.items()}
        fresh.partially_load(self.world.device, 1e32)
        wanted, found = self.world.outputs(fresh.model), self.world.outputs(self.loaded.model)
        for name in self.world.formats:
            # What is baked but does not lie on the device is added to the dequantized weight, at each use.
            if self.whole or f"diffusion_model.{name}.weight" not in fresh.backup:
                assert torch.equal(found[name], wanted[name]), name

    def teardown(self):
        if not hasattr(self, "base"):
            return
        if self.loaded is not None:
            self.loaded.detach(unpatch_all=False)
        self.base.partially_load(self.world.device, 1e32)
        found = self.world.outputs(self.base.model)
        assert all(torch.equal(found[name], self.original[name]) for name in self.world.formats)
        for name, made in self.base.model.diffusion_model.items():
            assert made.weight._qdata.equal(self.world.bits[name]) and not hasattr(made, "qpatch_branch")


@pytest.mark.parametrize("dynamic", (False, True), ids=("classic", "dynamic"))
def test_random_walks_over_clones_runs_and_unloads_never_lose_track(comfy, request, monkeypatch, dynamic):
    monkeypatch.setenv("QPATCH_QUANT_LORA", "side")
    torch.manual_seed(0)
    device = request.getfixturevalue("vram").device if dynamic else CPU
    machine = type("Walk", (Walker,), {"world": World(comfy, device)})
    run_state_machine_as_test(machine, settings=settings(
        max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck)))
