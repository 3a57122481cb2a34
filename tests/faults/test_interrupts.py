"""Ctrl-C anywhere in what changes a model: it is as it was, or done; nothing is locked; everything works afterwards.

QPATCH_TEST_STEP=1 tries every line; by default it is every 197th, beginning elsewhere for each action.
"""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from faults import stacks
from faults.actions import NAMES, actions, check_after
from faults.interrupt import Interrupt
from qpatch import lora

STEP = int(os.environ.get("QPATCH_TEST_STEP", 197))
PACKAGE = str(Path(lora.__file__).parent)


@pytest.fixture(scope="module")
def world():
    root = stacks.model()
    return root, actions(root), stacks.State(root)


@pytest.mark.parametrize("name", NAMES)
def test_an_interruption_at_any_line_leaves_the_old_state_or_the_new_one(world, name):
    root, known, bare = world
    action = known[name]
    for n in range(1 + NAMES.index(name) * STEP // len(NAMES), 1_000_000, STEP):
        action.prepare()
        try:
            with Interrupt(n, PACKAGE) as interrupt:
                action.run()
        except KeyboardInterrupt:
            check_after(root, action, bare, f"line {n} of {name}")
        else:
            assert interrupt.left > 0 and action.ends[1].is_of(root)
            break
    assert n > STEP
    lora.reset(root)
    bare.check_same_objects(root)


#: Sends itself SIGINT after a random time again and again; prints how many arrived inside of an action.
STORM = """
    import random, signal, sys, threading, time
    sys.path[:0] = {paths}
    from faults import stacks
    from faults.actions import NAMES, actions, check_after
    from qpatch import lora

    seed, tries = map(int, sys.argv[1:])
    chance, root, hits = random.Random(seed), stacks.model(), 0
    known, bare = actions(root), stacks.State(root)
    for number in range(tries):
        action = known[NAMES[number % len(NAMES)]]
        action.prepare()
        began = time.perf_counter()
        action.run()
        length = time.perf_counter() - began
        lora.reset(root)
        action.prepare()
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, length))
            action.run()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            hits += 1
        check_after(root, action, bare, f"try {{number}} of seed {{seed}}")
        # Another thread finds no lock that was left behind.
        other = threading.Thread(target=lora.reset, args=(root,))
        other.start()
        other.join(30)
        assert not other.is_alive(), "locked"
    print("hits", hits)
"""
#: SIGALRM comes when a timer says so; it does what SIGINT does.
PREPARE = "    import signal\n    signal.signal(signal.SIGALRM, signal.default_int_handler)\n"


def storm(seed, tries):
    here = Path(__file__).parent
    code = textwrap.dedent(PREPARE + STORM.format(paths=[str(here.parent), str(here.parent / "unit" / "lora")]))
    return subprocess.run([sys.executable, "-c", code, str(seed), str(tries)], capture_output=True, text=True,
                          timeout=1800)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="timers that send signals are POSIX's")
def test_real_signals_at_random_moments_leave_the_old_state_or_the_new_one():
    done = storm(seed=0, tries=45)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 5


def test_a_real_sigint_from_another_process_ends_a_composition_and_nothing_else():
    """As a user's Ctrl-C: the model is bare or composed, and the next call works."""
    here = Path(__file__).parent
    code = textwrap.dedent(f"""
        import os, signal, subprocess, sys
        sys.path[:0] = {[str(here.parent), str(here.parent / "unit" / "lora")]}
        from faults import stacks
        from qpatch import lora

        # A job in the background of a shell is started with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        root = stacks.model()
        bare, file = stacks.State(root), stacks.file()

        def stop(done, total):
            if done == 2:
                subprocess.run(["kill", "-INT", str(os.getpid())])

        try:
            lora.compose(root, [(file, 1.0)], progress=stop)
        except KeyboardInterrupt:
            print("interrupted", bare.is_of(root), lora.composed(root))
        lora.compose(root, [(file, 1.0)])
        lora.reset(root)
        bare.check_same_objects(root)
        print("well")
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["interrupted True ()", "well"], done.stderr
