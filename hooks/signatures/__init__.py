"""What known failures look like in a log of ComfyUI, beside the hooks that mend them.

Data only: nothing here imports torch. A failure is recognised by its message, and where one message has
several causes by the frames of its traceback too. A hook without a signature mends something that leaves
no message (``SILENT`` says so).
"""

from .compat import COMPAT
from .environment import ENVIRONMENT
from .loading import LOADING
from .lora import LORA
from .quantized import QUANTIZED
from .signature import Signature

__all__ = ["SIGNATURES", "SILENT", "Signature"]

#: In the order in which they are tried: one line is one failure.
SIGNATURES: tuple[Signature, ...] = (*LOADING, *COMPAT, *LORA, *QUANTIZED, *ENVIRONMENT)

#: Hook -> what a person sees where there is no message.
SILENT = {
    "qwen-modulation": "a LoRA on the modulation layers of Nunchaku Qwen-Image has no effect",
    "quant-lora": "a LoRA on an NVFP4, INT8 or other coarse model has little effect",
    "convrot-int8": "a LoRA on an INT8 ConvRot model gives noise (two days of ComfyUI in June 2026)",
    "convrot-conv2d": "an SDXL model with INT8 convolutions gives noise",
    "convrot-bake": "LoRA on ConvRot weights is slow at low VRAM; off by default",
    "comfy-compat-lora-key-map": "a LoRA key meant for another model is taken",
    "comfy-compat-other-packs": "another pack has replaced a patch; the log of qpatch names it",
    "comfy-compat-qwen-lora-loader": "another pack has replaced a patch; the log of qpatch names it",
    "comfy-compat-qwen-moves": "Nunchaku Qwen-Image moves to the CPU and back before each sampling",
    "comfy-compat-quant-parameter": "quantized weights are not recognised, and a LoRA is added to their integers",
}
