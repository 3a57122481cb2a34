"""Hypothesis for all tests of this folder: no deadline, because a busy machine is no fault of the code."""

from hypothesis import settings

settings.register_profile("lora-default", deadline=None)
settings.load_profile("lora-default")
