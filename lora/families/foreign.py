"""LoRAs of models that this package does not compose: enough of their names to say what a file is."""

from __future__ import annotations

import re

#: (what it is, regex searched in a module name). The first that hits decides, so the special come first.
SIGNATURES = (
    ("FLUX", re.compile(r"single_transformer_blocks[._]\d"
                        r"|transformer_blocks[._]\d+[._](ff|ff_context|norm1|norm1_context)[._]")),
    ("FLUX, Chroma or HunyuanVideo", re.compile(r"(^|[._])(double|single)_blocks[._]\d")),
    ("Stable Diffusion 3", re.compile(r"joint_blocks[._]\d|transformer_blocks[._]\d+[._]attn2?[._]add_out")),
    ("SDXL or Stable Diffusion 1.5",
     re.compile(r"(^|[._])(down_blocks|up_blocks|mid_block|input_blocks|output_blocks|middle_block)[._]")),
    ("Wan", re.compile(r"(^|[._])blocks[._]\d+[._](self_attn|cross_attn|ffn)[._]")),
    ("LTX-Video", re.compile(r"transformer_blocks[._]\d+[._]attn[12][._]")),
    ("Lumina 2",
     re.compile(r"layers[._]\d+[._](adaLN_modulation[._]1|norm1[._]linear|attn[._]to_|feed_forward[._]linear_)")),
)


def recognise(stem: str) -> str | None:
    """What model the module name ``stem`` belongs to, if it is one of those known here."""
    for title, pattern in SIGNATURES:
        if pattern.search(stem):
            return title
    return None
