"""The formats that files are written in: how a layer is named, what its tensors are called, which adapters fit in.

To add one: an entry in ``FORMATS``. tests/unit/tools/test_conversion.py then writes every producer's files in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..families import Family
from ..keys import Role, Target
from ..suffixes import INTERLEAVED

#: Names in diffusers, where they are not those of ComfyUI.
DIFFUSERS = {
    "attention.out": "attention.to_out.0",
    "attention.q_norm": "attention.norm_q",
    "attention.k_norm": "attention.norm_k",
    "x_embedder": "all_x_embedder.2-1",
    "final_layer.linear": "all_final_layer.2-1.linear",
    "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
}

#: Fused modules that ComfyUI's own model has too; the other ones are fused by Nunchaku alone.
_COMFYUI_FUSED = frozenset({"attention.qkv"})

#: Modules whose rows Nunchaku's quantized layer keeps interleaved, see layer.py.
_INTERLEAVED = frozenset({"img_mod.1", "txt_mod.1"})

#: Roles whose tensors are called otherwise in a file than in this package.
_SUFFIXES = {
    Role.dora: "dora_scale", Role.oft_r: "oft_R.weight", Role.oft_scaled: "oft_R.scaled_oft",
    Role.ia3_weight: "weight", Role.ia3_on_input: "on_input",
    **{Role(f"glora_{name}"): f"{name}.weight" for name in ("a1", "a2", "b1", "b2")},
}


@dataclass(frozen=True)
class Format:
    """One way of writing a file.

    ``prefix``     in front of the module's name; ``flat``: dots of the name as underscores.
    ``suffixes``   role -> end of the key, where it is not the usual one.
    ``native``     whether modules are called as in ComfyUI, where diffusers has other names.
    ``diffusers``  whether it is for diffusers, which reads no biases, and no alphas beside anything but plain factors.
    ``fuses``      whether layers are fused as Nunchaku's modules are; ``keeps_fused``: modules that may stay fused;
                   ``separates``: but not where they are nothing but separate layers written together.
    ``carries``    kinds of adapters that it can hold as they are; None: every kind.
    ``alpha``      whether alpha is written also where it says nothing (scale 1).
    ``readers``    who reads it, for people.
    """

    name: str
    prefix: str
    readers: str
    suffixes: Mapping[Role, str] = field(default_factory=dict)
    flat: bool = False
    native: bool = False
    diffusers: bool = False
    fuses: bool = False
    keeps_fused: frozenset[str] = frozenset()
    separates: bool = False
    carries: frozenset[str] | None = None
    alpha: bool = False

    def holds(self, kind: str) -> bool:
        """Whether an adapter of this kind can be written as it is."""
        return self.carries is None or kind in self.carries

    def keeps(self, module: str) -> bool:
        """Whether a fused module, by its name inside the block, may be written as one layer."""
        return self.fuses or module in self.keeps_fused

    def interleaves(self, module: str) -> bool:
        """Whether rows of the up factor of this module are written in Nunchaku's order."""
        return self.fuses and module in _INTERLEAVED

    def key(self, family: Family, target: Target, role: Role) -> str:
        """The key of one tensor."""
        module = family.module(target.module)
        name = dict(module.parts)[target.part][0] if target.part is not None else module.name
        if not self.native:
            name = DIFFUSERS.get(name, name)
        stem = target.module.removesuffix(module.name) + name
        end = self.suffixes.get(role) or _SUFFIXES.get(role) or str(role)
        if role is Role.up and self.interleaves(module.name):
            end = f"{INTERLEAVED}.weight"
        return f"{self.prefix}{stem.replace('.', '_') if self.flat else stem}.{end}"


_PEFT = {Role.down: "lora_A.weight", Role.up: "lora_B.weight"}
_KOHYA = {Role.down: "lora_down.weight", Role.up: "lora_up.weight"}

FORMATS: dict[str, Format] = {format.name: format for format in (
    Format("comfyui", "diffusion_model.", "ComfyUI, diffusers and qpatch (ai-toolkit's spelling)", _PEFT,
           keeps_fused=_COMFYUI_FUSED, separates=True),
    Format("diffusers", "transformer.", "diffusers, PEFT and ComfyUI",
           {**_PEFT, Role.up_bias: "lora_B.bias", Role.dora: "lora_magnitude_vector.weight"},
           diffusers=True, carries=frozenset({"lora"})),
    Format("kohya", "lora_unet_", "kohya's tools, musubi-tuner, diffusers and qpatch", _KOHYA, flat=True,
           native=True, keeps_fused=_COMFYUI_FUSED, alpha=True),
    Format("nunchaku", "diffusion_model.",
           "qpatch: q, k and v fused, w3 before w1, modulations in Nunchaku's row order", _PEFT, native=True,
           fuses=True, carries=frozenset({"lora", "bias"})),
)}
