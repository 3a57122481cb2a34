"""Stand-in for ComfyUI-nunchaku: the parts that build a Z-Image model."""

from .nodes.models.zimage import NunchakuZImageDiTLoader

NODE_CLASS_MAPPINGS = {"NunchakuZImageDiTLoader": NunchakuZImageDiTLoader}
