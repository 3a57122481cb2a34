"""Loaded by child processes of the tests: many threads at once, and what stands on a function afterwards."""

import sys
import threading

# Threads give way to each other as often as can be.
sys.setswitchinterval(1e-6)


def storm(count, work):
    """Run ``work(number)`` in ``count`` threads that start together; the list of what they raised."""
    gate, raised = threading.Barrier(count), []

    def run(number):
        gate.wait()
        try:
            work(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def layers_of_ours(function):
    """How often the hook ``probe`` has wrapped ``function``."""
    count = 0
    while function is not None:
        count += vars(function).get("__qpatch__") == "probe"
        function = vars(function).get("__wrapped__")
    return count
