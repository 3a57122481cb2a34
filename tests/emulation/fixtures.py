"""Fixtures of the cases, the same in every world."""

import sys
from pathlib import Path

import pytest
import torch

from qpatch import lora
from qpatch.hooks import lora_loader


class Clip:
    """A text encoder as ComfyUI's loading function sees it: something with keys of its own, that takes patches."""

    def __init__(self, given):
        self.given = given
        self.tensors = {f"text_encoders.layer.{name}.weight": torch.ones(2, 2) for name in ("lora_down", "lora_up")}
        self.cond_stage_model = torch.nn.Module()
        self.cond_stage_model.layer = torch.nn.Linear(2, 2, bias=False)

    def clone(self):
        return Clip(self.given)

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        self.given.append(sorted(f"text_encoders.{key.removesuffix('.weight')}.{role}.weight" for key in patches
                                 for role in ("lora_down", "lora_up")))
        return list(patches)


@pytest.fixture
def clip():
    return Clip([])


@pytest.fixture
def count_calls():
    """A function that runs something and lists the Python calls into the LoRA hooks and qpatch.lora."""
    folders = tuple(str(Path(package.__file__).parent) for package in (lora_loader, lora))

    def count(run):
        seen = []

        def watch(frame, event, _argument):
            if event == "call" and frame.f_code.co_filename.startswith(folders):
                seen.append(frame.f_code.co_name)

        sys.setprofile(watch)
        try:
            run()
        finally:
            sys.setprofile(None)
        return seen

    return count
