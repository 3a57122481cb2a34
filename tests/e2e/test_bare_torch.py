"""An environment as the README's first command makes it: torch, safetensors, and neither numpy nor matplotlib nor tqdm."""

import producers
import pytest

BLOCKER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "matplotlib", "tqdm", "comfy_kitchen"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def bare_torch(fresh):
    fresh.see_parent()
    (fresh.site / "aaa_blocker.pth").write_text("import blocker\n")
    (fresh.site / "blocker.py").write_text(BLOCKER)
    done = fresh.run("import numpy", check=False)
    assert done.returncode == 1 and "No module named 'numpy'" in done.stderr
    return fresh


def test_the_selftest_proves_all_of_it(bare_torch):
    done = bare_torch.command("-m", "qpatch", "selftest", timeout=300)
    assert "proved" in done.stdout and done.stderr == "", done.stdout + done.stderr


def test_files_are_inspected_converted_and_merged(bare_torch, tmp_path):
    for name, seed in (("one", 1), ("two", 2)):
        producers.make("musubi", "z-image", rank=3, blocks=1, seed=seed).write(tmp_path / f"{name}.safetensors")
    for words in (["inspect", "one.safetensors"], ["convert", "one.safetensors", "-o", "c.safetensors", "--to", "kohya"],
                  ["merge", "one.safetensors:0.5", "two.safetensors", "-o", "m.safetensors"],
                  ["diff", "one.safetensors", "m.safetensors"], ["inspect", "one.safetensors", "--plot", "one.html"]):
        done = bare_torch.command("-m", "qpatch", "lora", *words, cwd=tmp_path, check=False)
        # torch itself warns that it has no numpy.
        assert done.returncode == 0 and "Traceback" not in done.stderr, (words, done.stdout, done.stderr)


def test_a_plot_that_needs_matplotlib_says_what_to_install(bare_torch, tmp_path):
    producers.make("musubi", "z-image", rank=3, blocks=1).write(tmp_path / "one.safetensors")
    done = bare_torch.command("-m", "qpatch", "lora", "inspect", "one.safetensors", "--plot", "one.png", cwd=tmp_path,
                              check=False)
    assert done.returncode == 1 and "matplotlib" in done.stderr and "pip install" in done.stderr
    assert not (tmp_path / "one.png").exists() and "Traceback" not in done.stderr
