"""Stand-in for ComfyUI-nunchaku 1.1's Z-Image attention under a ComfyUI whose attention has one setting more."""


class JointAttention:
    def __init__(self, heads, qk_norm):
        self.heads = heads
        self.qk_norm = qk_norm
        self.unused = "no forward reads it"

    def forward(self, x):
        return (self.heads * x, "normed") if self.qk_norm else (self.heads * x, "plain")


class ComfyNunchakuZImageAttention(JointAttention):
    def __init__(self, orig_attn, **kwargs):
        self.heads = orig_attn.heads

    def forward(self, x):
        return super().forward(x)
