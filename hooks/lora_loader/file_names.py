"""Hook on comfy.utils: note which file a dict of tensors was read from, for log lines."""

from __future__ import annotations

import os
from collections.abc import Mapping

from qpatch.finding import incompatible, needed
from qpatch.patching import Wrap

from . import opened


def examine(module):
    if "load_torch_file" not in vars(module):
        return incompatible("comfy.utils has no load_torch_file: log lines will call LoRAs by their number")
    return needed("LoRAs are called by their file's name in log lines")


def patches(module):
    return [Wrap(module, "load_torch_file", noting_the_name)]


def noting_the_name(original):
    def load_torch_file(ckpt, *args, **kwargs):
        loaded = original(ckpt, *args, **kwargs)
        tensors = loaded[0] if isinstance(loaded, tuple) else loaded
        if isinstance(tensors, Mapping):
            opened.remember(tensors, os.path.basename(os.fspath(ckpt)))
        return loaded

    return load_torch_file
