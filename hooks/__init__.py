"""What is patched: one file for each upstream thing. The engine knows these modules by name only.

A hook module has two functions, and the engine does the rest (toggles, the fingerprint,
all-or-nothing application, states, log lines):

``examine(module) -> Finding``
    Look at the freshly executed target, without changing it, and answer
    ``needed(reason)``, ``not_needed(reason)`` (upstream behaves by itself) or
    ``incompatible(reason)`` (it is not what this hook knows). Probe behaviour on a tiny
    input where that is safe; read ``vars(module)`` rather than ``hasattr``.
``patches(module) -> list[Patch]``
    The patches of :mod:`qpatch.patching` that mend the target. Called only after ``needed``.

A replacement adapts its input and calls the original. State lives in the object concerned.
"""
