"""Stand-in for comfy.ops.mixed_precision_ops of a release, or a pack's wrapper, that adds to ``disabled``."""


def mixed_precision_ops(quant_config={}, compute_dtype=None, full_precision_mm=False, disabled=[]):
    disabled.add("mxfp8")
    return sorted(disabled)
