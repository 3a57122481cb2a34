"""Which models the hook takes: those whose diffusion model holds Nunchaku layers of a family that qpatch.lora knows."""

from __future__ import annotations

from qpatch import lora

#: What a patcher must be able to do for us; ComfyUI's have had it since well before 0.15.
ABILITIES = ("set_attachments", "get_attachment", "set_injections", "add_callback_with_key", "clone")


def diffusion_model(base):
    """The diffusion model of ``base`` (ComfyUI's model object) without torch.compile's shell; None if there is none."""
    shell = getattr(base, "diffusion_model", None)
    return getattr(shell, "_orig_mod", shell)


def family(patcher):
    """The LoRA family of the model under ``patcher``, or None if qpatch leaves it to ComfyUI."""
    model = diffusion_model(getattr(patcher, "model", None))
    if model is None or not all(hasattr(patcher, name) for name in ABILITIES):
        return None
    return lora.family_of(model)
