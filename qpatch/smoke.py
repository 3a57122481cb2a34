"""A module that does nothing: ``qpatch status`` imports it to prove that the finder is live.

The hook ``smoke`` of the catalogue replaces :func:`mended`; what a fresh import of this module
answers is therefore the proof, not a flag that somebody set.
"""


def mended():
    """False as written here; True once the import hook has seen this module."""
    return False
