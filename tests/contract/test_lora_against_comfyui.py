"""The LoRA reader against a real ComfyUI (QPATCH_TEST_COMFYUI): its key map and its weight adapters.

The interpreter that runs the tests has to be able to import that ComfyUI.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import dense_reference
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qpatch.lora import lowrank
from qpatch.lora.adapters import build
from qpatch.lora.keys import Role, Target, resolve

COMFYUI = os.environ.get("QPATCH_TEST_COMFYUI")
CHILD = Path(__file__).with_name("comfyui_lora_child.py")

pytestmark = [
    pytest.mark.comfyui,
    pytest.mark.skipif(not COMFYUI, reason="QPATCH_TEST_COMFYUI does not name a ComfyUI folder"),
]

#: Kinds of dense_reference that ComfyUI reads, and its spelling of the roles that differ from their names.
KINDS = ("lora", "lora_conv", "lokr", "lokr_w2_whole", "lokr_both", "lokr_two_ranks", "lokr_full", "loha", "glora",
         "glora_old", "dora", "dora_columns", "dora_lokr", "oft", "boft", "diff", "diff_b", "set_weight")
SPELLED = {"down": "lora_down.weight", "up": "lora_up.weight", "dora": "dora_scale",
           **{f"glora_{name}": f"{name}.weight" for name in ("a1", "a2", "b1", "b2")}}
SHAPES = ((24, 40), (40, 24), (32, 32))


def child(*arguments):
    command = [sys.executable, str(CHILD), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR" not in done.stderr, done.stderr


def cases():
    """(name, kind, shape, alpha, strength) of everything compared. set_weight ignores the strength in ComfyUI."""
    for kind in KINDS:
        for shape in SHAPES:
            for alpha in (1.5, None):
                # ComfyUI's BOFT fails without alpha, and its OFT takes 0 for "no bound", as dense_reference does.
                for strength in (1.0,) if kind == "set_weight" else (1.0, -0.6):
                    name = f"{kind} {shape[0]}x{shape[1]} alpha {alpha} strength {strength}"
                    yield name, kind, shape, alpha, strength


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """Case -> (sample, base, strength, ComfyUI's weight, ComfyUI's change of the bias)."""
    folder = tmp_path_factory.mktemp("comfyui")
    samples, stored = {}, {}
    for seed, (name, kind, (out, inp), alpha, strength) in enumerate(cases()):
        rng = np.random.default_rng(seed)
        # ComfyUI's rotations compute in float32 whatever they are given.
        dtype = torch.float32 if kind in ("oft", "boft") else torch.float64
        base = rng.normal(size=(out, inp))
        sample = dense_reference.KINDS[kind](rng, out, inp, 3, alpha, lambda array: torch.tensor(array, dtype=dtype))
        samples[name] = sample, base, strength
        stored[f"{name}/base"] = torch.from_numpy(base).to(dtype)
        for role, tensor in sample.tensors.items():
            stored[f"{name}/layer.{SPELLED.get(role, role)}"] = tensor.contiguous()
    table = {name: strength for name, (_, _, strength) in samples.items()}
    save_file(stored, folder / "cases.safetensors", {"cases": json.dumps(table)})
    child("weights", COMFYUI, folder / "cases.safetensors", folder / "out.safetensors")
    found = load_file(folder / "out.safetensors")
    return {name: (*sample, found[f"{name}/weight"], found[f"{name}/bias"]) for name, sample in samples.items()}


@pytest.mark.parametrize("name", [case[0] for case in cases()])
def test_adapter_changes_the_weight_as_comfyui_does(computed, name):
    sample, base, strength, weight, bias = computed[name]
    tensors = {Role(role): tensor for role, tensor in sample.tensors.items()}
    delta = build(Target("transformer_blocks.0.attn.to_out.0"), tensors).delta()
    weight_before = torch.from_numpy(base)
    found = weight_before + changed(delta, weight_before, strength)
    assert torch.linalg.vector_norm(found - weight) <= 3e-6 * torch.linalg.vector_norm(weight)
    found = 0.0 if delta.bias is None else strength * delta.bias.double()
    assert torch.allclose(torch.as_tensor(found, dtype=torch.float64).expand_as(bias), bias.double(), rtol=1e-6)


def changed(delta, base, strength):
    if delta.replace is not None:
        return strength * (delta.replace - base)
    if delta.rebase is not None:
        return lowrank.to_dense(delta.rebase(base.float(), strength)).double()
    if delta.terms:
        return strength * lowrank.to_dense(delta.terms).double()
    return torch.zeros_like(base) if delta.dense is None else strength * lowrank.to_dense(delta.dense).double()


@pytest.fixture(scope="module")
def key_map(tmp_path_factory):
    out = tmp_path_factory.mktemp("keys") / "keys.json"
    child("keys", COMFYUI, out)
    return json.loads(out.read_text())


#: ComfyUI's plain modules that Nunchaku fuses: parameter -> target.
FUSED = {"attn.to_q": "attn.to_qkv[q]", "attn.to_k": "attn.to_qkv[k]", "attn.to_v": "attn.to_qkv[v]",
         "attn.add_q_proj": "attn.add_qkv_proj[q]", "attn.add_k_proj": "attn.add_qkv_proj[k]",
         "attn.add_v_proj": "attn.add_qkv_proj[v]", "feed_forward.w1": "feed_forward.w13[w1]",
         "feed_forward.w3": "feed_forward.w13[w3]"}


def target_of(parameter, offset, rows):
    """The target that a parameter of ComfyUI's unquantized model is, as text."""
    module = parameter.removeprefix("diffusion_model.").removesuffix(".weight")
    if offset is not None:
        return f"{module}[{'qkv'[offset // rows]}]"
    for plain, fused in FUSED.items():
        if module.endswith(plain):
            return module.removesuffix(plain) + fused
    return module


@pytest.mark.parametrize("family, fewest", [("qwen-image", 150), ("z-image", 250)])
def test_every_module_name_that_comfyui_accepts_means_the_same_layer_here(key_map, family, fewest):
    compared = 0
    for name, (parameter, offset, rows) in key_map[family].items():
        # Biases and bare parameters (pad tokens) are in the map under names that no LoRA trainer writes.
        if not parameter.endswith(".weight") or name.startswith(("unet.", "lora_prior")):
            continue
        resolved = resolve(f"{name}.lora_down.weight", family)
        assert str(resolved.target) == target_of(parameter, offset, rows), (name, resolved.unknown)
        compared += 1
    assert compared >= fewest
