"""Hook ``comfy-compat-other-packs``: what a node pack replaces while it loads does not end qpatch's patch there.

A pack loaded later may replace a function that qpatch has patched. When ComfyUI has loaded a pack, each
patch that was lost to it is looked at again: what the pack has put there is examined like any target,
and where it has the fault the patch is put around it and calls through to it. Otherwise it stays as it is.
"""

import inspect

from qpatch import engine

from . import Repair, Spot


def _may_replace(original, module):
    return "node packs may replace what qpatch has patched"


def _then_look_again(original, module):
    async def load_custom_node(*args, **kwargs):
        try:
            return await original(*args, **kwargs)
        finally:
            engine.renew()

    def load_custom_node_at_once(*args, **kwargs):
        try:
            return original(*args, **kwargs)
        finally:
            engine.renew()

    return load_custom_node if inspect.iscoroutinefunction(original) else load_custom_node_at_once


REPAIR = Repair(
    Spot("load_custom_node", _may_replace, _then_look_again, absent="this is not ComfyUI's nodes.py"),
    fine="",
)
examine, patches = REPAIR.examine, REPAIR.patches
