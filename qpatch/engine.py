"""What happens when a target has been imported: each hook that wants it gets its turn.

Imported when the first target is met, never at start-up. All errors of hooks end here: they
become the state ``failed`` with a traceback, and the import goes on (``QPATCH_STRICT=1`` lets
them through).
"""

import traceback

from . import finder, finding, log, patching, states, targets, toggles

_complained = False
#: (hook, name, module) -> the turn that is under way. No lock: hooks run foreign code, which may fork or come back.
_in_hand: dict[tuple, object] = {}


def loaded(name: str, module):
    """Offer ``module``, whose body has just run, to the hooks that want a module of this name.

    Returns the first error of a hook if ``QPATCH_STRICT`` lets errors through, else None.
    """
    _complain_once()
    failures = [_offer(hook, target, name, module) for hook, target in targets.wanting(name)]
    failure = next((error for error in failures if error is not None), None)
    return failure if toggles.strict() else None


def _offer(hook, target, name, module):
    """One hook's turn; the error that it ended in, or None."""
    key, turn = (hook.name, name, id(module)), object()
    if _in_hand.setdefault(key, turn) is not turn:
        return None
    try:
        _attempt(hook, target, name, module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Not only Exception: a hook tries upstream's code, and that must not end the process here.
        _failed(hook, target, name, module)
        return error
    finally:
        _in_hand.pop(key, None)
    return None


def _attempt(hook, target, name, module) -> None:
    missing = targets.missing(target, module)
    if missing and not target.exact and len(missing) == len(target.defines):
        # A module of the same tail that has nothing of the target: another one altogether.
        return
    reason = toggles.why_disabled(hook)
    if reason is not None:
        states.record(hook, target, name, module, states.DISABLED, reason)
        return
    if missing:
        found = finding.incompatible(f"{name} does not define {', '.join(missing)}")
    else:
        implementation = _implementation(target)
        found = implementation.examine(module)
    if found.verdict == finding.NEEDED:
        _mend(hook, target, name, module, found, implementation)
    elif not _already_mended(hook, target, name, module):
        states.record(hook, target, name, module, found.verdict, found.reason)
        say = log.warning if found.verdict == finding.INCOMPATIBLE else log.debug
        say(f"{hook.name} {found.verdict} for {name}: {found.reason}")


def _implementation(target):
    # Not import_module: some Pythons take the module's lock there also for a module that is loaded, and a
    # process forked while another thread holds it would wait for that thread for ever.
    return __import__(target.implementation, fromlist=("examine",))


def _mend(hook, target, name, module, found, implementation) -> None:
    patches = list(implementation.patches(module))
    if not patches:
        reason = f"{found.reason}, and there is nothing to patch"
        states.record(hook, target, name, module, finding.INCOMPATIBLE, reason)
        return
    for patch in patches:
        patch.by = hook.name
    patching.put(patches)
    states.record(hook, target, name, module, states.APPLIED, found.reason, patches=patches)
    (log.debug if hook.internal else log.info)(f"{hook.name} applied to {name}")


def _already_mended(hook, target, name, module) -> bool:
    """Whether the target behaves because of us: a reload keeps what the new body does not define."""
    before = states.last(hook, target, name)
    return before is not None and before.module is module and before.patches and before.state == states.APPLIED


def _failed(hook, target, name, module) -> None:
    text = traceback.format_exc()
    line = text.strip().rpartition("\n")[2]
    states.record(hook, target, name, module, states.FAILED, line, error=text)
    log.warning(f"{hook.name} failed on {name} and left it as it was: {line}"
                " (traceback: qpatch status, or QPATCH_LOG=debug)")
    log.debug(text)


def catch_up() -> None:
    """Offer every target in ``sys.modules`` that no hook has met; raises only with ``QPATCH_STRICT``."""
    failure = None
    for name, module in targets.in_sys_modules():
        if targets.asleep(module):
            # A lazy module whose body has not run: forcing it here would be an import nobody asked for.
            finder.load_shadow().watch(targets.contents(module)["__spec__"])
        elif not targets.running(module) and not states.met(name, module):
            error = loaded(name, module)
            failure = failure or error
    if failure is not None:
        raise failure


def renew() -> None:
    """Offer the modules of lost patches again: what somebody put there is examined, and wrapped if it has the fault."""
    for attempt in states.lost():
        losses = "; ".join(attempt.losses())
        _offer(attempt.hook, attempt.target, attempt.module_name, attempt.module)
        again = states.last(attempt.hook, attempt.target, attempt.module_name)
        if again.state == states.APPLIED:
            again.reason += f"; put around what had replaced it: {losses}"


def _complain_once() -> None:
    global _complained
    if not _complained:
        _complained = True
        for text in toggles.complaints():
            log.warning(text)
