"""Calls whose meaning changed between releases of ComfyUI, ComfyUI-nunchaku and comfy-kitchen."""

from .signature import Signature

COMPAT = (
    Signature(
        "rotary", r"cannot import name 'apply_rotary_emb' from 'comfy\.ldm\.qwen_image\.model'",
        "ComfyUI 0.23 and 0.24 lack a function that ComfyUI-nunchaku imports, so its Qwen-Image loader is missing.",
        hooks=("comfy-compat-rotary",), remedy="or update ComfyUI: the function has come back",
    ),
    Signature(
        "patcher-calls",
        r"(?:ZImageModelPatcher|NunchakuModelPatcher)\.(\w+)\(\) got an unexpected keyword argument '(\w+)'",
        "ComfyUI calls {0} of ComfyUI-nunchaku's patcher with {1}, which the pack does not know (torch.compile, LoRA"
        " extraction and saving do that).",
        hooks=("comfy-compat-patcher-calls",),
    ),
    Signature(
        "qwen-calls", r"_?forward\(\) got (?:an unexpected keyword argument|multiple values for argument) '(\w+)'",
        "Nunchaku Qwen-Image was called with {0}, which it does not know or got twice: the order of arguments changed"
        " between releases.",
        frames=r"(?i)qwen_?image", hooks=("comfy-compat-qwen-calls",),
    ),
    Signature(
        "qwen-calls-named",
        r"NunchakuQwenImage\w+\.\w+\(\) got (?:an unexpected keyword argument|multiple values for argument) '(\w+)'",
        "Nunchaku Qwen-Image was called with {0}, which it does not know or got twice: the order of arguments changed"
        " between releases.",
        hooks=("comfy-compat-qwen-calls",),
    ),
    Signature(
        "qwen-calls-list", r"'list' object has no attribute '(\w+)'",
        "Nunchaku Qwen-Image took the list of reference pictures for another argument ({0} was wanted of it): the order"
        " of arguments changed between releases.",
        frames=r"(?i)qwen_?image", hooks=("comfy-compat-qwen-calls",),
    ),
    Signature(
        "other-patcher", r"(\w+)\.(\w+)\(\) got an unexpected keyword argument '(\w+)'",
        "ComfyUI calls {1} of {0}, a model patcher of some node pack, with {2}, which the pack was written without.",
        holds=lambda found: "Patcher" in found.group(1), remedy="update the node pack that the traceback names",
    ),
    Signature(
        "config-copy", r"'NoneType' object is not callable",
        "A node copies a model with copy.deepcopy, and the model's configuration answers None for every name it"
        " lacks, also for those that deepcopy asks for.",
        frames=r"in (?:deepcopy|_reconstruct|_deepcopy_dict)\b", hooks=("comfy-compat-config-copy",),
    ),
    Signature(
        "disabled-list", r"'list' object has no attribute 'add'",
        "A node pack gives ComfyUI a list of disabled formats where it wants a set.",
        frames=r"mixed_precision_ops", hooks=("comfy-compat-disabled-list",),
    ),
    Signature(
        "core-moved", r"'\w+' object has no attribute 'diffusion_model'",
        "ComfyUI changed the class that holds a model, and ComfyUI-nunchaku was written for the one before.",
        frames=r"(?i)nunchaku",
        remedy="update ComfyUI and ComfyUI-nunchaku; a home-made stub for the attribute hides the fault and gives wrong"
               " pictures",
    ),
    Signature(
        "node-arguments", r"\b(Nunchaku\w+)\.(\w+)\(\) missing \d+ required positional arguments?: (.*)",
        "{1} of the node {0} was called without {2}: the workflow or the calling pack is from another release of the"
        " node's pack.",
        remedy="update the pack, then delete the node in the workflow and add it again",
    ),
    Signature(
        "core-module-missing", r"No module named '(comfy\.[\w.]+)'",
        "A node pack imports {0}, which this release of ComfyUI does not have.",
        remedy="update ComfyUI, or install the release of the pack that was made for yours",
    ),
    Signature(
        "dynamic-hooks", r"Hooks not implemented in ModelPatcherDynamic",
        "A scheduled LoRA strength, or another node that works through hooks, met a model that is loaded with dynamic"
        " VRAM, which knows no hooks.",
        remedy="start ComfyUI with --disable-dynamic-vram (older releases: without --fast) for that workflow",
    ),
    Signature(
        "original-weights", r"got an unexpected keyword argument 'original_weights?'",
        "ComfyUI hands original_weights to a LoRA function of a node pack that was written before that existed.",
        hooks=("comfy-compat-original-weights",), remedy="or update the node pack that the traceback names",
    ),
    Signature(
        "quant-copy", r"Attempted to call copy_\(\) on an invalid python storage",
        "Something copies a layer with a quantized weight by copy.deepcopy, which torch cannot do.",
        hooks=("comfy-compat-quant-copy",),
    ),
    Signature(
        "quant-keys", r"object has no attribute '(weight_scale(?:_2)?|comfy_quant|input_scale)'",
        "Merging, LoRA hooks or LoRA extraction of a quantized model look for {0} on a layer, where it is no"
        " attribute.",
        frames=r"get_key_patches|get_attr|model_patcher", hooks=("comfy-compat-quant-keys",),
    ),
)
