"""Files written by convert, read by a real ComfyUI (QPATCH_TEST_COMFYUI) and a real diffusers (if installed)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import producers
import pytest
from safetensors.torch import load_file, save_file

from qpatch.lora import open_lora
from qpatch.lora.conversion import FORMATS, convert

COMFYUI = os.environ.get("QPATCH_TEST_COMFYUI")
CHILD = Path(__file__).with_name("comfyui_lora_child.py")
FAMILIES = ("qwen-image", "z-image")


def written(producer, family, name, folder):
    result = convert(open_lora(producers.make(producer, family, rank=4, alpha=2.0).tensors), FORMATS[name])
    save_file(result.tensors, folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors"


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """family -> names of modules that ComfyUI takes LoRA for."""
    out = tmp_path_factory.mktemp("keys") / "keys.json"
    command = [sys.executable, str(CHILD), "keys", COMFYUI, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.mark.comfyui
@pytest.mark.skipif(not COMFYUI, reason="QPATCH_TEST_COMFYUI does not name a ComfyUI folder")
@pytest.mark.parametrize("name", ["comfyui", "diffusers", "kohya"])
@pytest.mark.parametrize("producer", ["musubi", "ai-toolkit", "peft", "lightning"])
def test_comfyui_has_a_place_for_every_layer(known, producer, name, tmp_path):
    for family in FAMILIES:
        stems = {key.removesuffix(end) for key in load_file(written(producer, family, name, tmp_path))
                 for end in (".lora_A.weight", ".lora_down.weight") if key.endswith(end)}
        missing = {stem for stem in stems if stem not in known[family]}
        if (family, name) == ("z-image", "kohya"):
            # What the command says of this format: ComfyUI knows the fused name only.
            assert missing and all("_attention_to_" in stem for stem in missing)
        else:
            assert stems and not missing


@pytest.mark.parametrize("name", ["comfyui", "diffusers", "kohya"])
@pytest.mark.parametrize("producer", ["musubi", "ai-toolkit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_diffusers_reads_every_layer_with_its_scale(family, producer, name, tmp_path):
    pipeline = pytest.importorskip("diffusers.loaders.lora_pipeline", reason="diffusers is not installed")
    mixin = {"qwen-image": pipeline.QwenImageLoraLoaderMixin, "z-image": pipeline.ZImageLoraLoaderMixin}[family]
    path = written(producer, family, name, tmp_path)
    state = mixin.lora_state_dict(load_file(path))
    wanted = {}
    for adapter in open_lora(path).layers.values():
        (term,) = adapter.delta().terms
        wanted[round((term.scale * term.up.double() @ term.down.double()).norm().item(), 4)] = adapter
    found = {round((state[key.replace("lora_A", "lora_B")].double() @ tensor.double()).norm().item(), 4)
             for key, tensor in state.items() if "lora_A" in key}
    assert found == set(wanted)
    blocks = [key for key in state if "lora_A" in key and (".0." in key)]
    starts = ("transformer_blocks.0.", "layers.0.", "noise_refiner.0.", "context_refiner.0.", "t_embedder")
    assert blocks and all(key.startswith(tuple("transformer." + start for start in starts)) for key in blocks)
