"""The hooks, as data: what each one mends, where, and which module does it.

Adding a hook: an entry here, the target's pattern in ``finder.TARGETS``, a module in hooks/.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from . import repairs

#: In place of the values of a variable that takes a number.
POSITIVE = "a positive number"


@dataclass(frozen=True)
class Target:
    """A module that a hook patches.

    ``pattern``: a full module name, or ``*.`` and a tail (see ``finder.TARGETS``).
    ``implementation``: dotted name of the module in hooks/ that patches it.
    ``defines``: names that the module must define after it ran; without one of them the hook is
    ``incompatible``. A module that fits a tail pattern and has none of them is not the target.
    """

    pattern: str
    implementation: str
    defines: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return not self.pattern.startswith("*")


@dataclass(frozen=True)
class Hook:
    """One repair, switched by its name.

    ``distributions``: what to look up for the version in reports; ``checked``: the versions it
    was run against; ``seen``: where the break was seen, as (what, first version, last version);
    ``variables``: environment variables of its own, each with the values that it knows or
    :data:`POSITIVE`; ``internal`` hooks are of qpatch itself, not listed and not switched.
    """

    name: str
    mends: str
    targets: tuple[Target, ...]
    default: bool = True
    distributions: tuple[str, ...] = ()
    checked: str = ""
    variables: Mapping[str, tuple[str, ...] | str] = field(default_factory=dict, hash=False)
    internal: bool = False
    seen: tuple[tuple[str, str, str], ...] = ()


def _repair(thing: str, row: dict) -> Hook:
    implementation = "qpatch.hooks.compat." + thing.replace("-", "_")
    targets = tuple(Target(pattern, implementation, defines) for pattern, defines in row["targets"].items())
    return Hook(name=repairs.PREFIX + thing, mends=row["mends"], targets=targets, seen=row["seen"])


HOOKS: tuple[Hook, ...] = (
    Hook(
        name="lazy-linear",
        mends="SVDQW4A4Linear.from_linear and its like on a Linear that ComfyUI has not filled yet",
        targets=(
            Target("nunchaku.models.linear", "qpatch.hooks.lazy_linear", ("SVDQW4A4Linear",)),
            Target("nunchaku.models.utils", "qpatch.hooks.lazy_fuse"),
            Target("nunchaku.models.text_encoders.linear", "qpatch.hooks.lazy_w4", ("W4Linear",)),
            Target("nunchaku.models.transformers.transformer_zimage", "qpatch.hooks.lazy_zimage_ff"),
        ),
        distributions=("nunchaku",),
        checked="nunchaku 1.2.1, 1.3.0.dev20260213",
    ),
    Hook(
        name="zimage-fuse",
        mends="fuse_to_svdquant_linear of ComfyUI-nunchaku on Linears that ComfyUI has not filled yet",
        targets=(
            Target(
                "*.models.zimage",
                "qpatch.hooks.zimage_fuse",
                ("fuse_to_svdquant_linear", "ComfyNunchakuZImageAttention"),
            ),
        ),
        distributions=("comfyui_nunchaku", "nunchaku"),
        checked="ComfyUI-nunchaku 1.2.1",
    ),
    Hook(
        name="convrot",
        mends="NVFP4 ConvRot files: weights stored in a rotated basis that ComfyUI does not undo",
        targets=(
            Target("comfy.ops", "qpatch.hooks.convrot.loader", ("mixed_precision_ops",)),
            Target("comfy.model_detection", "qpatch.hooks.convrot.detection", ("detect_unet_config",)),
        ),
        distributions=("comfy-kitchen",),
        checked="ComfyUI 0.15.1 to 0.33.0, comfy-kitchen 0.2.10 to 0.2.40",
    ),
    Hook(
        name="convrot-int8",
        mends="INT8 ConvRot Linears that lose their rotation when LoRA is baked into them",
        targets=(Target("comfy.ops", "qpatch.hooks.convrot.int8", ("mixed_precision_ops",)),),
        distributions=("comfy-kitchen",),
        checked="ComfyUI of 25 and 26 June 2026 (between 0.26 and 0.27), comfy-kitchen 0.2.11",
    ),
    Hook(
        name="convrot-conv2d",
        mends="INT8 convolutions (SDXL packs), plain and ConvRot, read as if their integers were the weight",
        targets=(Target("comfy.ops", "qpatch.hooks.convrot.conv2d", ("mixed_precision_ops",)),),
        distributions=("comfy-kitchen",),
        checked="ComfyUI 0.27.0 to 0.33.0, comfy-kitchen 0.2.16 to 0.2.40",
    ),
    Hook(
        name="convrot-bake",
        mends="LoRA on ConvRot weights added at each cast with dynamic VRAM: adds it once, at load, for more memory",
        targets=(Target("comfy.model_patcher", "qpatch.hooks.convrot.bake", ("ModelPatcher",)),),
        default=False,
        distributions=("comfy-kitchen",),
        checked="ComfyUI 0.24.0 to 0.33.0",
    ),
    Hook(
        name="quant-lora",
        mends="LoRA on quantized weights (NVFP4, MXFP8, INT4, INT8, FP8) that is rounded away: runs it beside them",
        targets=(
            Target("comfy.model_patcher", "qpatch.hooks.quant_lora.patchers", ("ModelPatcher",)),
            Target("comfy.ops", "qpatch.hooks.quant_lora.fused", ("mixed_precision_ops",)),
            Target("comfy.sd", "qpatch.hooks.quant_lora.bypass", ("load_lora_for_models",)),
        ),
        distributions=("comfyui", "comfy-kitchen"),
        checked="ComfyUI 0.15.1 to 0.33.0, comfy-kitchen 0.2.31",
        variables={"QPATCH_QUANT_LORA": ("auto", "side", "bake")},
    ),
    Hook(
        name="lora-loader",
        mends="LoRA nodes on Nunchaku Qwen-Image and Z-Image",
        targets=(
            Target("comfy.sd", "qpatch.hooks.lora_loader.loading", ("load_lora_for_models",)),
            Target("comfy.lora", "qpatch.hooks.lora_loader.key_map", ("model_lora_keys_unet",)),
            Target("comfy.utils", "qpatch.hooks.lora_loader.file_names", ("load_torch_file",)),
            Target("*.model_patcher.common", "qpatch.hooks.lora_loader.patchers", ("NunchakuModelPatcher",)),
            Target("*.model_patcher.zimage", "qpatch.hooks.lora_loader.patchers", ("ZImageModelPatcher",)),
        ),
        distributions=("comfyui", "comfyui_nunchaku", "nunchaku"),
        checked="ComfyUI 0.15.1 to 0.33.0, ComfyUI-nunchaku 1.2.1",
        variables={"QPATCH_MAX_RANK": POSITIVE},
    ),
    Hook(
        name="qwen-modulation",
        mends="LoRA on the modulation layers of Nunchaku Qwen-Image",
        targets=(
            Target("*.models.qwenimage", "qpatch.hooks.qwen_modulation", ("NunchakuQwenImageTransformerBlock",)),
        ),
        distributions=("comfyui_nunchaku",),
        checked="ComfyUI-nunchaku 1.2.1",
    ),
    Hook(
        name="smoke",
        mends="nothing: proves that the import hook is live",
        targets=(Target("qpatch.smoke", "qpatch.hooks.smoke", ("mended",)),),
        internal=True,
    ),
    *(_repair(thing, row) for thing, row in repairs.REPAIRS.items()),
)


def named(name: str) -> Hook:
    """The hook called ``name``; KeyError if there is none."""
    for hook in HOOKS:
        if hook.name == name:
            return hook
    raise KeyError(name)


def patterns() -> dict[str, tuple[str, ...]]:
    """What ``finder.TARGETS`` must say, by last component of the name."""
    table: dict[str, list[str]] = {}
    for hook in HOOKS:
        for target in hook.targets:
            found = table.setdefault(target.pattern.rpartition(".")[2], [])
            if target.pattern not in found:
                found.append(target.pattern)
    return {tail: tuple(found) for tail, found in table.items()}
