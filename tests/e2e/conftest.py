"""A folder for the stand-in targets of one test, and child processes that run in it."""

import shutil
import textwrap
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parent / "support"


class Bench:
    """``bench.write`` puts files into the folder; ``bench.run`` runs code there, with ``probe`` importable."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.prelude = ""
        self.bring("probe.py")

    def bring(self, name):
        """Copy a file of support/ into the folder, for children to import."""
        shutil.copy(SUPPORT / name, self.folder)

    def write(self, **files):
        """Module name (dots for folders, which become packages) -> source text."""
        for name, text in files.items():
            path = self.folder.joinpath(*name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            for parent in path.relative_to(self.folder).parents[:-1]:
                (self.folder / parent / "__init__.py").touch()
            path.write_text(textwrap.dedent(text))

    def watch(self, *patterns, **how):
        """Let each child register a hook on ``patterns`` first (``probe.watch``)."""
        arguments = [*map(repr, patterns), *(f"{name}={value!r}" for name, value in how.items())]
        self.prelude += f"import probe; probe.watch({', '.join(arguments)})\n"

    def run(self, python, code, **how):
        """Run ``code`` in a child of the environment ``python``; its standard output, stripped."""
        return self.finished(python, code, **how).stdout.strip()

    def finished(self, python, code, **how):
        """As :meth:`run`, but the finished process."""
        return python.run(self.prelude + textwrap.dedent(code), cwd=self.folder, **how)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.fixture
def stormy(bench):
    """A bench of twelve targets and twelve modules that are none, in two packages, with storm.py at hand."""
    bench.bring("storm.py")
    source = "def f(x):\n    return x\n"
    bench.write(**{f"pkg.target{number}": source for number in range(12)},
                **{f"other.plain{number}": source for number in range(12)})
    bench.watch(*(f"pkg.target{number}" for number in range(12)))
    # A deadlock ends the child with the stacks of all threads instead of the test run's own time limit.
    bench.prelude += "import faulthandler; faulthandler.dump_traceback_later(60, exit=True)\n"
    bench.prelude += "import importlib, sys, threading; from storm import layers_of_ours, storm\n"
    return bench
