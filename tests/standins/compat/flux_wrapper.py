"""Stand-in for ComfyUI-nunchaku's wrapper around the FLUX model."""

import torch


class ComfyFluxWrapper(torch.nn.Module):
    def __init__(self, model, config):
        super().__init__()
        self.model = model
        self.dtype = next(model.parameters()).dtype
        self.config = config
        self.loras = []
