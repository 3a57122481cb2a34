"""Hook ``lora-loader``: every LoRA node works on Nunchaku Qwen-Image and Z-Image.

The design is in docs/hooks/lora-loader.md.

One module for each upstream module that is patched (loading: comfy.sd, key_map: comfy.lora,
file_names: comfy.utils, patchers: ComfyUI-nunchaku's patchers), and what they share: stack (the LoRAs
of a patcher), running (bringing a model to the stack of the patcher that runs), opened, loose, models,
messages.
"""
