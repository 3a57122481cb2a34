"""LoRA for Nunchaku-quantized models: file -> keys -> adapters -> terms -> placement -> plan -> modules.

Pure torch and safetensors. This package knows neither ComfyUI nor nunchaku nor the import
engine; it works on any module tree whose classes keep the contracts of those libraries.

``compose(model, [(path, strength), ...])`` puts LoRAs in, ``set_strengths`` changes their strengths,
``reset`` takes them out, ``composed`` tells what is in. ``plan`` shows what would happen. Every refusal is a
``LoraError``.
"""

from importlib import import_module

#: Public name -> module it is in. Loaded on first use, because names and headers of files can be read without torch.
_WHERE = {
    "Plan": "planning", "plan": "planning", "compose": "planning",
    "composed": "composition", "reset": "composition", "set_aside": "composition", "set_strengths": "composition",
    "Loaded": "state",
    "family_of": "placement",
    "LoraFile": "files", "open_lora": "files",
    "Report": "report", "FileReport": "report", "Applied": "report",
    "LoraError": "errors", "FileError": "errors", "UnknownFamily": "errors", "ShapeError": "errors",
    "NonFiniteError": "errors", "UnsupportedAdapter": "errors", "IncompleteAdapter": "errors", "PlanError": "errors",
    "BusyError": "errors",
}

__all__ = sorted(_WHERE)


def __getattr__(name):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)


def __dir__():
    return sorted({*globals(), *_WHERE})
