"""Stand-in for ComfyUI-nunchaku's Qwen-Image of the time when ComfyUI passed guidance; it returns what it was given."""

import torch
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel, apply_rotary_emb  # noqa: F401


class NunchakuQwenImageTransformerBlock(torch.nn.Module):
    def forward(self, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb, image_rotary_emb=None,
                timestep_zero_index=None):
        return encoder_hidden_states, hidden_states, timestep_zero_index


class NunchakuQwenImageTransformer2DModel(QwenImageTransformer2DModel):
    def _forward(self, x, timesteps, context, attention_mask=None, guidance=None, ref_latents=None,
                 transformer_options={}, control=None, **kwargs):
        return dict(locals())
