"""Hook ``lazy-linear``, nunchaku's transformer_zimage: ``_convert_z_image_ff`` on lazy Linears.

It makes a diffusers FeedForward out of Z-Image's w1, w2 and w3, as the source of quantized layers,
and gives it dtype and device of w1's weight. It wants an object of diffusers' own class and builds
a large module, so it is judged by what it reads rather than by trying it.
"""

from qpatch.finding import needed, not_needed
from qpatch.patching import Wrap

from .lazy_lend import lazy, lend, twin

NAME = "_convert_z_image_ff"


def examine(module):
    code = getattr(vars(module).get(NAME), "__code__", None)
    if code is None or not {"w1", "weight"} <= set(code.co_names):
        return not_needed(f"there is no {NAME} here that reads w1.weight")
    return needed(f"{NAME} takes dtype and device from w1.weight")


def patches(module):
    return [Wrap(module, NAME, _mended)]


def _mended(original):
    def _convert_z_image_ff(z_ff, *args, **kwargs):
        if not lazy(getattr(z_ff, "w1", None)):
            return original(z_ff, *args, **kwargs)
        lent = twin(z_ff)
        lent.w1 = lend(z_ff.w1)
        return original(lent, *args, **kwargs)

    return _convert_z_image_ff
