"""The meta-path finder: notices that a target is being imported.

Loaded at every interpreter start, so it holds no more than the look-up and imports only what the
interpreter itself has loaded. What is done about a target is in shadow.py, loaded when the first
one is met.
"""

import sys

from . import __version__

#: Last component of a target's name -> the patterns that end in it. A pattern is a full module
#: name, or ``*.`` and a tail (ComfyUI names a custom node by its folder's path). It repeats
#: what catalogue.py says, because that module is too large to load at every start; a test
#: keeps the two equal.
TARGETS = {
    "base": ("comfy_kitchen.tensor.base",),
    "common": ("*.model_patcher.common",),
    "controlnet": ("comfy.controlnet",),
    "flux": ("*.wrappers.flux",),
    "linear": ("nunchaku.models.linear", "nunchaku.models.text_encoders.linear"),
    "lora": ("comfy.lora",),
    "model": ("comfy.ldm.qwen_image.model",),
    "model_detection": ("comfy.model_detection",),
    "model_patcher": ("comfy.model_patcher", "*.model_patcher"),
    "nodes": ("nodes",),
    "ops": ("comfy.ops",),
    "qwenimage": ("*.models.qwenimage", "*.model_configs.qwenimage"),
    "sd": ("comfy.sd",),
    "smoke": ("qpatch.smoke",),
    "supported_models_base": ("comfy.supported_models_base",),
    "transformer_zimage": ("nunchaku.models.transformers.transformer_zimage",),
    "utils": ("nunchaku.models.utils", "comfy.utils"),
    "zimage": ("*.models.zimage", "*.model_patcher.zimage", "*.model_configs.zimage"),
}

#: Targets found with a loader that cannot be watched: module name -> what kind of loader.
unwatched = {}


def matches(name, patterns):
    """Whether the module name ``name`` fits one of ``patterns``."""
    for pattern in patterns:
        if name == pattern or (pattern[0] == "*" and name.endswith(pattern[1:])):
            return True
    return False


def is_target(name):
    """Whether ``name`` is one that a target can have; a key of ``sys.modules`` may be something else than a text."""
    return isinstance(name, str) and matches(name, TARGETS.get(name.rpartition(".")[2], ()))


class Finder:
    """Answers for target modules only; every other name costs one look-up in a dict."""

    #: How a second copy of qpatch (user site and venv, editable and wheel) knows this one.
    qpatch_finder = __version__

    # Static, because importlib fetches it anew for each import: that spares a bound method each time.
    @staticmethod
    def find_spec(name, path=None, target=None):
        """The spec that the finders behind this one give for a target, its loader watched; else None."""
        last = name.rpartition(".")[2]
        if last not in TARGETS or not matches(name, TARGETS[last]):
            return None
        shadow = load_shadow()
        return None if shadow is None else shadow.find(name, path, target)


def load_shadow():
    """The module ``qpatch.shadow``; None if it cannot be loaded. Nobody else may import it.

    importlib calls finders while it holds the global import lock, and that may be a thread which
    wants this module. One that has begun to load it without that lock would wait for the lock,
    and the other for the module: so the lock is taken first here, always.
    """
    import _imp

    _imp.acquire_lock()
    try:
        from . import shadow

        return shadow
    except Exception as error:
        import qpatch

        qpatch.activation_error = error
        return None
    finally:
        _imp.release_lock()


def is_ours(finder):
    """The version of the copy of qpatch that ``finder`` belongs to; None for anybody else's."""
    return getattr(type(finder), "qpatch_finder", None)


def install():
    """Insert the finder unless one stands there, and offer targets imported before it came."""
    standing = [other for other in sys.meta_path if is_ours(other)]
    if not standing:
        sys.meta_path.insert(0, Finder())
    elif not isinstance(standing[0], Finder):
        # Another copy of qpatch was first; two that patch the same modules would be one too many.
        return
    for name in list(sys.modules):
        if is_target(name):
            from . import engine

            engine.catch_up()
            return
