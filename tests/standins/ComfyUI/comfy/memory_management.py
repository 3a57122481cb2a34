"""Stand-in: the switch of dynamic VRAM."""

aimdo_enabled = False
