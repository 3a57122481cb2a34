"""Stand-in for comfy.ldm.qwen_image.model: how ComfyUI calls a Qwen-Image model and its blocks."""

import torch


def apply_rotary_emb(x, freqs_cis):
    return "ComfyUI's own"


class QwenImageTransformerBlock(torch.nn.Module):
    def forward(self, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, temb, image_rotary_emb=None,
                timestep_zero_index=None, transformer_options={}):
        return encoder_hidden_states, hidden_states


class QwenImageTransformer2DModel(torch.nn.Module):
    def forward(self, x, timestep, context, attention_mask=None, ref_latents=None, additional_t_cond=None,
                transformer_options={}, **kwargs):
        return self._forward(x, timestep, context, attention_mask, ref_latents, additional_t_cond, transformer_options,
                             **kwargs)

    def _forward(self, x, timesteps, context, attention_mask=None, ref_latents=None, additional_t_cond=None,
                 transformer_options={}, control=None, **kwargs):
        return x
