"""Stand-in for the loader node. Its module name ends in ``models.zimage`` too, and it is no target."""

from ...model_configs.zimage import NunchakuZImage


class NunchakuZImageDiTLoader:
    config = NunchakuZImage
