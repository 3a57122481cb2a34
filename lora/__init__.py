"""LoRA for Nunchaku-quantized models: file -> keys -> adapters -> terms -> placement -> plan -> modules.

Pure torch and safetensors. This package knows neither ComfyUI nor nunchaku nor the import
engine; it works on any module tree whose classes keep the contracts of those libraries.
"""
