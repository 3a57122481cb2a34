"""A short long run; long_run.py makes 10,000 switches."""

from faults import long_run


def test_switching_between_five_stacks_leaves_no_memory_behind_and_ends_at_the_base():
    python, process = long_run.run(200)
    assert len(python) == 50
    assert long_run.growth(python) < long_run.PYTHON, python
    assert long_run.growth(process) < 4 * long_run.PROCESS, process


def test_a_leak_would_be_seen():
    leaking = [1_000_000 + 2_000 * number for number in range(50)]
    assert long_run.growth(leaking) >= 60_000
    assert abs(long_run.growth([1_000_000, 1_000_100] * 25)) <= 100
