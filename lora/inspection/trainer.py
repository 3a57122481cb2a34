"""Who made a file: from what its metadata says, else from how its keys are spelled.

Several programs spell keys alike; then all of them are named, and ``sure`` is False.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..keys import FLAGS, Role, split_suffix, strip_prefix
from .metadata import parsed

#: Keys that are looked at: a file spells all of its keys alike.
_LOOKED_AT = 2000

_FACTORS = {Role.down, Role.up}
_FULL = {Role.diff, Role.diff_b, Role.set_weight}


@dataclass(frozen=True)
class Maker:
    """``name`` of the program, or of those that it may be; ``why`` says what that was seen from."""

    name: str
    sure: bool
    why: str


@dataclass(frozen=True)
class Style:
    """How the keys of a file are spelled: the most common prefix and adapter's name, what their ends look like.

    ``native``: with ComfyUI's own names of Z-Image's attention, which diffusers splits and renames.
    ``modulation``: some modulation layer is among them. ``flags``: tensors that describe the whole file.
    """

    prefix: str
    infix: str | None
    roles: frozenset[Role]
    ends: frozenset[str]
    native: bool
    modulation: bool
    flags: bool


def style(keys: Iterable[str]) -> Style:
    """The style of ``keys``; those whose end is no adapter's do not count."""
    prefixes, infixes, roles, ends, names = Counter(), Counter(), set(), set(), set()
    keys = list(keys)
    for key in keys[:_LOOKED_AT]:
        split = split_suffix(key)
        if split is None:
            continue
        written, role, infix = split
        stem = strip_prefix(written)
        prefixes[written.removesuffix(stem)] += 1
        roles.add(role)
        if role in _FACTORS:
            infixes[infix] += 1
        ends.add(key[len(written):].replace(f".{infix}", ".*"))
        names.add(stem.replace("_", "."))
    common = prefixes.most_common(1)[0][0] if prefixes else ""
    return Style(
        common, infixes.most_common(1)[0][0] if infixes else None, frozenset(roles), frozenset(ends),
        native=any(name.endswith((".attention.qkv", ".attention.out")) for name in names),
        modulation=any(".mod." in name or ".modulation." in name for name in names),
        flags=not FLAGS.isdisjoint(keys),
    )


def maker(metadata: Mapping[str, str], keys: Iterable[str]) -> Maker:
    """The program that wrote a file with this ``metadata`` and these ``keys``."""
    said = _from_metadata(metadata)
    if said is not None:
        return said
    spelled = style(keys)
    for sure, name, why, fits in SPELLINGS:
        if fits(spelled):
            return Maker(name, sure, why)
    return Maker("unknown", False, "its metadata and the spelling of its keys are of no known program")


def _from_metadata(metadata) -> Maker | None:
    if "qpatch.format" in metadata:
        return Maker(metadata.get("qpatch.made_by", "qpatch"), True, "metadata qpatch.format")
    software = parsed(metadata.get("software"))
    if isinstance(software, dict) and software.get("name"):
        return Maker(f"{software['name']} {software.get('version', '')}".strip(), True, "metadata software")
    if any(key.startswith("ot_") for key in metadata):
        branch = metadata.get("ot_branch")
        return Maker("OneTrainer" + (f" (branch {branch})" if branch else ""), True, "metadata ot_*")
    module = metadata.get("ss_network_module", "")
    if module.startswith("lycoris"):
        return Maker("LyCORIS in sd-scripts or musubi-tuner", True, f"metadata ss_network_module = {module}")
    if any(part in module for part in ("lora_qwen_image", "lora_zimage", "networks.loha", "networks.lokr")):
        return Maker("musubi-tuner", True, f"metadata ss_network_module = {module}")
    if module:
        return Maker("musubi-tuner or another of kohya's trainers", False, f"metadata ss_network_module = {module}")
    if "lora_adapter_metadata" in metadata:
        return Maker("diffusers or SimpleTuner", False, "metadata lora_adapter_metadata")
    return None


_A, _DOWN = ".lora_A.weight", ".lora_down.weight"

#: (sure, name, why, whether a style is of this spelling), the special ones first.
SPELLINGS: tuple[tuple[bool, str, str, Callable[[Style], bool]], ...] = (
    (True, "blissful-tuner", "use_rslora_flag, use_dora_flag or dora_layer tensors",
     lambda s: s.flags or ".dora_layer.weight" in s.ends),
    (True, "VideoX-Fun", "keys begin with lora_unet__ (two underscores)", lambda s: s.prefix == "lora_unet__"),
    (True, "DiffSynth-Studio", "keys begin with pipe.dit.", lambda s: s.prefix == "pipe.dit."),
    (False, "DiffSynth-Studio or ModelScope", "bare names with lora_A.default",
     lambda s: s.prefix == "" and s.infix == "default"),
    (False, "lightx2v (Lightning)", "lora_down on bare names, no modulation layers",
     lambda s: s.prefix == "" and _DOWN in s.ends and not s.modulation),
    (False, "OneTrainer (original format)", "bare names with lora_A", lambda s: s.prefix == "" and _A in s.ends),
    (False, "an old version of diffusers", ".lora.down or lora_linear_layer in the keys",
     lambda s: any(end.startswith((".lora.", ".lora_linear_layer.")) for end in s.ends)),
    (False, "OneTrainer (legacy format)", "lora_down on names that begin with transformer.",
     lambda s: s.prefix == "transformer." and _DOWN in s.ends),
    (False, "diffusers, SimpleTuner, OneTrainer or FlyMyAI", "keys begin with transformer.",
     lambda s: s.prefix == "transformer."),
    (False, "InvokeAI", "keys begin with model.diffusion_model.", lambda s: s.prefix == "model.diffusion_model."),
    (False, "PEFT", "keys begin with base_model.model.", lambda s: s.prefix.startswith("base_model.")),
    (False, "ai-toolkit (DoRA)", "a magnitude beside diffusion_model. names", lambda s: ".magnitude" in s.ends),
    (False, "an extract by ComfyUI, or ai-toolkit (full)", "diff or set_weight tensors",
     lambda s: s.prefix == "diffusion_model." and bool(s.roles & _FULL)),
    (False, "an extract by ComfyUI, or a converter for it", "diffusion_model. names with lora_down",
     lambda s: s.prefix == "diffusion_model." and _DOWN in s.ends),
    (False, "diffusion-pipe", "diffusion_model. with ComfyUI's own names",
     lambda s: s.prefix == "diffusion_model." and s.native),
    (False, "OneTrainer or SimpleTuner (ComfyUI format)", "diffusion_model. names with lora_A and alpha",
     lambda s: s.prefix == "diffusion_model." and _A in s.ends and Role.alpha in s.roles),
    (False, "ai-toolkit, diffusion-pipe or musubi-tuner's converter", "keys begin with diffusion_model.",
     lambda s: s.prefix == "diffusion_model."),
    (False, "an export for ComfyUI (bdsqlsz, Anime-Z, musubi-tuner's Z-Image converter)",
     "lora_unet_ with ComfyUI's own names", lambda s: s.prefix == "lora_unet_" and s.native),
    (False, "musubi-tuner or OneTrainer (kohya format)", "keys begin with lora_unet_",
     lambda s: s.prefix == "lora_unet_"),
    (False, "LyCORIS (SimpleTuner, ai-toolkit's old LoKr format, sd-scripts)", "keys begin with lycoris_",
     lambda s: s.prefix == "lycoris_"),
    (False, "OneTrainer (PEFT names, flat)", "keys begin with lora_transformer_",
     lambda s: s.prefix == "lora_transformer_"),
)
