"""Stand-in for the part of ComfyUI-nunchaku's models.zimage that packs positions for the fused kernel.

The real packing permutes inside fragments of 16 rows; here a row stays a row, which is all the repair
relies on: fragments follow one another in the order of the rows.
"""

import torch


def fuse_to_svdquant_linear(comfy_linear1, comfy_linear2, **kwargs):
    raise NotImplementedError


def patch_model(diffusion_model, skip_refiners, **kwargs):
    raise NotImplementedError


def pack_rotemb(table):
    return table.reshape(table.shape[0], table.shape[1], -1)


def pad_tensor(table, multiple):
    short = -table.shape[1] % multiple
    return torch.cat([table, table.new_zeros(table.shape[0], short, *table.shape[2:])], dim=1)


def fused_qkv_norm_rotary(x, qkv, q_norm_weight, k_norm_weight, freqs_cis):
    raise NotImplementedError


class RopeFuseAttentionHook:
    def __init__(self):
        self.packed_freqs_cis_cache = {}
        self.packings = 0
        self.handles = []

    def pre_forward(self, module, input_args, input_kwargs):
        args = list(input_args)
        table = args[2]
        if table is None:
            return None
        key = (table.data_ptr(), table.shape)
        packed = self.packed_freqs_cis_cache.get(key)
        if packed is None:
            self.packings += 1
            packed = pack_rotemb(pad_tensor(table[..., [1], :].squeeze(2), 256))
            self.packed_freqs_cis_cache[key] = packed
        args[2] = packed
        return tuple(args), input_kwargs

    def hook(self, module):
        self.handles.append(module.register_forward_pre_hook(self.pre_forward, with_kwargs=True))

    def unhook(self):
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.packed_freqs_cis_cache.clear()


class RopeFuseTransformerHook:
    def __init__(self, skip_refiners):
        self.skip_refiners = skip_refiners

    def pre_forward(self, module, input_args):
        self.attn_hook = RopeFuseAttentionHook()
        for layer in module.layers:
            self.attn_hook.hook(layer.attention)

    def post_forward(self, module, input_args, output):
        self.attn_hook.unhook()

    def hook(self, model):
        model.register_forward_pre_hook(self.pre_forward)
        model.register_forward_hook(self.post_forward, always_call=True)
