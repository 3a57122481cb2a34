"""qpatch: mends quantized image models in ComfyUI as their modules are imported.

This module runs in every Python process of the environment it is installed in (``qpatch.pth``,
``qpatch.start``). It therefore imports nothing by itself, never raises and never prints; all
that :func:`activate` does is put one finder on ``sys.meta_path``.
"""

__version__ = "0.1.0"

#: What went wrong in start-up, for ``qpatch status``; None when nothing did.
activation_error = None


def activate():
    """Put qpatch's finder in place and mend targets that are imported already.

    The entry point of ``qpatch.pth`` and ``qpatch.start``; its name is frozen, because a
    start-up file of one release can outlive it and meet the next. Safe to call again: a venv
    runs its ``.pth`` files twice, and a ``.start`` file may run as well. ``QPATCH=0`` in the
    environment makes it do nothing at all.
    """
    global activation_error
    try:
        # os is loaded long before site reads a .pth file: this is a look-up, not an import.
        import os

        if os.environ.get("QPATCH", "").strip().lower() in ("0", "off", "false", "no"):
            return
        from . import finder

        finder.install()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Not only Exception: a SystemExit that leaves a .pth file ends the interpreter.
        activation_error = error
