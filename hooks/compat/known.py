"""The known breaks between releases, as data, and which of them an installation has.

Nothing is read here but the versions that the caller passes: ``qpatch doctor`` finds those on disk.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from qpatch import catalogue
from qpatch.doctor.packages import release

#: What becomes of a known break on an installation.
MENDED, NOT_NEEDED, NOT_MENDED = "mended", "not needed", "not mended"

COMFYUI, PACK, NUNCHAKU, KITCHEN = "comfyui", "comfyui-nunchaku", "nunchaku", "comfy-kitchen"
LORA_LOADER, HSWQ = "comfyui-qwenimageloraloader", "comfyui-hswq-loader-and-tools"
TITLES = {COMFYUI: "ComfyUI", PACK: "ComfyUI-nunchaku", NUNCHAKU: "nunchaku", KITCHEN: "comfy-kitchen",
          LORA_LOADER: "ComfyUI-QwenImageLoraLoader", HSWQ: "ComfyUI-HSWQ-Loader-and-Tools"}


@dataclass(frozen=True)
class Known:
    """One break. ``where``: name -> (first version, last version) that have it, all of them together; None: open.

    ``what``: what a person sees. ``hooks``: which mend it. ``when``: a condition that versions do not
    show. ``remedy``: what to do where no hook mends it.
    """

    what: str
    where: Mapping[str, tuple[str | None, str | None]]
    hooks: tuple[str, ...] = ()
    when: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Row:
    """A known break on one installation. ``why``: the hooks that mend it, why it is not here, or what to do."""

    state: str
    what: str
    why: str
    hooks: tuple[str, ...] = field(default=())


def _compat(*things: str) -> tuple[str, ...]:
    return tuple("comfy-compat-" + thing for thing in things)


ANY = (None, None)
BREAKS: tuple[Known, ...] = (
    Known("Z-Image: 'NoneType' object has no attribute 'dtype' while the model is built",
          {COMFYUI: ("0.15.0", None), PACK: ("1.2.0", None)}, ("lazy-linear", "zimage-fuse"), "with dynamic VRAM on"),
    Known("Z-Image: 'NoneType' object has no attribute 'dtype', in fuse_to_svdquant_linear",
          {COMFYUI: ("0.15.0", None), PACK: ("1.1.0", "1.1.0")},
          when="with dynamic VRAM on", remedy="update ComfyUI-nunchaku to 1.2.1"),
    Known("Z-Image, Qwen-Image: 'mat1 and mat2 must have the same dtype' with a float32 or float16 file",
          {COMFYUI: ("0.15.0", None), PACK: ANY}, _compat("plain-dtype"), "with dynamic VRAM on"),
    Known("Z-Image: 'ComfyNunchakuZImageAttention' object has no attribute 'qk_norm'",
          {COMFYUI: ("0.29.0", None), PACK: ("1.1.0", "1.1.0")}, _compat("zimage-attention")),
    Known("Z-Image: a batch of images is wrong from the second image on, or stops with an assertion",
          {PACK: ("1.2.0", None)}, _compat("zimage-batch")),
    Known("Z-Image: no attribute 'weight_function' when a part of a model with a LoRA is unloaded",
          {PACK: ("1.2.1", None)}, _compat("svdq-lowvram")),
    Known("Z-Image: torch.compile or LoRA extraction stops at an unexpected keyword argument",
          {COMFYUI: ("0.15.0", None), PACK: ("1.2.0", None)}, _compat("patcher-calls")),
    Known("Z-Image: LoRA files with parts of q, k, v or w1, w3 only, LoKr or norms stop with an error;"
          " kohya names, fused qkv and DoRA's scale have no effect", {PACK: ("1.2.0", None)}, ("lora-loader",)),
    Known("Z-Image: 'Unexpected key' when models are merged or subtracted; Qwen-Image: merging has no effect, and LoRA"
          " extraction writes whole weights", {PACK: ANY}, ("lora-loader",)),
    Known("Qwen-Image: LoRA files loaded with ComfyUI's nodes have no effect", {PACK: ANY},
          ("lora-loader", "qwen-modulation")),
    Known("Qwen-Image: cannot import name 'apply_rotary_emb', the node is missing",
          {COMFYUI: ("0.23.0", "0.24.0"), PACK: ANY}, _compat("rotary")),
    Known("Qwen-Image: reference images are taken for guidance, or an argument is unexpected",
          {COMFYUI: ("0.6.0", None), PACK: ("1.0.0", "1.1.0")}, _compat("qwen-calls")),
    Known("Qwen-Image: the model goes to the CPU and back before each sampling, and is not counted as loaded",
          {COMFYUI: ("0.15.0", None), PACK: ANY}, _compat("qwen-moves")),
    Known("FLUX: nodes do not find img_in, patch_size and the like on the model", {PACK: ANY}, _compat("flux-wrapper")),
    Known("FLUX and Qwen-Image LoRA nodes: 'NoneType' object is not callable, in copy.deepcopy",
          {COMFYUI: ("0.4.0", None)}, _compat("config-copy")),
    Known("a LoRA tensor of a wrong shape stops the workflow", {COMFYUI: ("0.15.0", None)}, _compat("lora-shape")),
    Known("LoRA keys of one model are taken for those of the next", {COMFYUI: ("0.15.0", None)},
          _compat("lora-key-map")),
    Known("merging, LoRA hooks and LoRA extraction of quantized models: no attribute 'weight_scale'",
          {COMFYUI: ("0.15.0", None)}, _compat("quant-keys")),
    Known("copying a quantized model: 'Attempted to call copy_() on an invalid python storage'",
          {KITCHEN: ("0.2.10", None)}, _compat("quant-copy")),
    Known("a Control-LoRA on a model with INT8 or NVFP4 weights: black pictures, or shapes that cannot be multiplied",
          {COMFYUI: ("0.15.0", None), KITCHEN: ("0.2.10", None)}, _compat("control-lora")),
    Known("NVFP4 ConvRot files give noise, take a LoRA in the wrong basis and lose ConvRot when they are saved",
          {COMFYUI: ("0.15.0", None), KITCHEN: ("0.2.10", None)}, ("convrot",)),
    Known("INT8 ConvRot Conv2d layers give noise", {COMFYUI: ("0.24.0", None), KITCHEN: ("0.2.22", None)},
          ("convrot-conv2d",)),
    Known("NVFP4 and other coarse formats: a LoRA has little effect, and a little more of another each time",
          {COMFYUI: ("0.15.0", None), KITCHEN: ("0.2.10", None)}, ("quant-lora",)),
    Known("ComfyUI-QwenImageLoraLoader's own mend of the Z-Image crash misses the node pack, and drops a declared bias",
          {LORA_LOADER: ("2.4.0", None), PACK: ANY}, ("lazy-linear", "zimage-fuse", *_compat("other-packs"))),
    Known("ComfyUI-QwenImageLoraLoader's nodes put LoRA on Qwen-Image's modulation layers in the wrong order of rows",
          {LORA_LOADER: ANY, PACK: ANY}, remedy="load such files with ComfyUI's own LoRA loader, which qpatch mends"),
    Known("ComfyUI-HSWQ's purge takes its wraps off, and a cached model then runs without them",
          {HSWQ: (None, "3.4.4")}, remedy="update ComfyUI-HSWQ-Loader-and-Tools, or load its files with ComfyUI's own"
          " loader, which qpatch mends"),
)


def breaks(versions: Mapping[str, str | None], off: Mapping[str, str] | None = None) -> list[Row]:
    """What each known break comes to on an installation with these ``versions``.

    ``versions``: name (a key of TITLES) -> version, None or absent where it is not installed. A
    version without a number in it is taken for one that has the break. ``off``: hooks that do not
    act there -> why.
    """
    return [_row(known, versions, off or {}) for known in BREAKS]


def _row(known: Known, versions, off) -> Row:
    what = f"{known.what} ({known.when})" if known.when else known.what
    spared = next((why for name, span in known.where.items() if (why := _spared(name, span, versions.get(name)))), None)
    if spared:
        return Row(NOT_NEEDED, what, spared)
    here = tuple(hook.name for hook in catalogue.HOOKS if hook.name in known.hooks)
    idle = [f"{name}: {off[name]}" for name in here if name in off]
    if idle:
        return Row(NOT_MENDED, what, "; ".join(idle), here)
    if here:
        return Row(MENDED, what, "by " + ", ".join(here), here)
    return Row(NOT_MENDED, what, known.remedy or "this release of qpatch has no mend for it")


def _spared(name: str, span, version: str | None) -> str | None:
    """Why a component of this version does not have the break; None if it has it."""
    title, (first, last) = TITLES[name], span
    if version is None:
        return f"{title} is not here"
    have = release(version)
    if have and first and have < release(first):
        return f"{title} {version} is older than {first}"
    if have and last and have > release(last):
        return f"{title} {version} is newer than {last}"
    return None
