"""Hook ``smoke``: the proof of life. See :mod:`qpatch.smoke`."""

from qpatch.finding import needed
from qpatch.patching import Wrap


def examine(module):
    return needed("proves that modules are patched as they load")


def patches(module):
    return [Wrap(module, "mended", lambda original: lambda: True)]
