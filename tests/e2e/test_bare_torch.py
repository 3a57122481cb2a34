"""An environment as the README's first command makes it: torch and safetensors, no numpy, matplotlib or tqdm."""

import producers
import pytest

#: What Python takes for modules that are not there.
BLOCKER = "import sys; sys.modules.update(dict.fromkeys(('numpy', 'matplotlib', 'tqdm', 'comfy_kitchen')))\n"


@pytest.fixture(scope="module")
def bare_torch(tmp_path_factory, wheel, installed):
    env = type(installed)(tmp_path_factory.mktemp("bare_torch") / "venv")
    env.install(wheel)
    env.see_parent()
    (env.site / "aaa_blocker.pth").write_text(BLOCKER)
    done = env.run("import numpy", check=False)
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr
    return env


def test_the_selftest_proves_all_of_it(bare_torch):
    done = bare_torch.command("-m", "qpatch", "selftest", timeout=300)
    assert "proved" in done.stdout and done.stderr == "", done.stdout + done.stderr


def qpatch_lora(env, folder, *words):
    return env.command("-m", "qpatch", "lora", *words, cwd=folder, check=False)


@pytest.fixture
def folder(tmp_path):
    for name, seed in (("one", 1), ("two", 2)):
        producers.make("musubi", "z-image", rank=3, blocks=1, seed=seed).write(tmp_path / f"{name}.safetensors")
    return tmp_path


@pytest.mark.parametrize("words", [
    ["inspect", "one.safetensors"], ["diff", "one.safetensors", "two.safetensors:0.5"],
    ["inspect", "one.safetensors", "--plot", "one.html"],
])
def test_files_are_looked_at(bare_torch, folder, words):
    done = qpatch_lora(bare_torch, folder, *words)
    # torch itself warns that it has no numpy.
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("missing, words", [
    ("matplotlib", ["inspect", "one.safetensors", "--plot", "out.png"]),
    ("numpy", ["convert", "one.safetensors", "-o", "out.safetensors", "--to", "kohya"]),
    ("numpy", ["merge", "one.safetensors:0.5", "two.safetensors", "-o", "out.safetensors"]),
])
def test_what_needs_another_package_says_what_to_install_and_leaves_nothing(bare_torch, folder, missing, words):
    before = sorted(folder.iterdir())
    done = qpatch_lora(bare_torch, folder, *words)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "pip install" in done.stderr.splitlines()[-1] and missing in done.stderr.splitlines()[-1]
    assert sorted(folder.iterdir()) == before
