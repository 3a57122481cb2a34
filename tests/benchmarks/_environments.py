"""Virtual environments for benchmarks, made as the tests make theirs, and figures with their spread."""

import importlib.util
import shutil
import statistics
from pathlib import Path

HERE = Path(__file__).resolve().parent


def _tests_conftest():
    spec = importlib.util.spec_from_file_location("conftest_of_the_tests", HERE.parent / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


conftest = _tests_conftest()


def wheel(folder: Path) -> Path:
    """The wheel of this checkout, built below ``folder``."""
    (folder / "source").mkdir()
    return conftest.build_wheel(conftest.copy_of_the_source(folder / "source"), folder / "wheel")


def environment(folder: Path, python: str, *wheels):
    """A fresh environment of the interpreter ``python`` with ``wheels`` in it."""
    env = conftest.Env(folder, python)
    if wheels:
        env.install(*wheels)
    return env


def copy_distribution(package: str, folder: Path) -> None:
    """Copy an installed pure-Python package and the start-up files beside it into ``folder``."""
    source = Path(importlib.util.find_spec(package).origin).parent
    shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in source.parent.glob(f"{package}*"):
        if file.suffix in (".pth", ".start"):
            shutil.copy(file, folder)


def spread(values) -> str:
    """Median and quartiles of ratios."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:5.2f} [{low:.2f} {high:.2f}]"


def ratios(ours, theirs):
    """Ratio of each pair that was measured in the same round."""
    return [one / other for one, other in zip(ours, theirs)]
