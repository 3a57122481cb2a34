"""An interruption at any line of chosen code, as Ctrl-C would bring it."""

import sys


class Interrupt:
    """Raises KeyboardInterrupt at the ``n``-th line that is executed in the files whose paths begin with a ``place``.

    ``left``: how many lines were not reached; 0 if the interruption came.
    """

    def __init__(self, n, *places):
        self.left = n
        self._places = places

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _trace(self, frame, event, arg):
        code = frame.f_code
        # Not in "holding": tracing also stops between the end of a with block and the release of its lock, where a
        # signal never arrives. Real signals are sent in test_interrupts.py.
        if not code.co_filename.startswith(self._places) or code.co_name == "holding":
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace
