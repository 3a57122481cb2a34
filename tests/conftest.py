"""Fixtures that all tests share: the built wheel, fresh virtual environments, child processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What is tested is the installed package. `python -m pytest` puts the repository in front, where
# qpatch/ lies without hooks/ and lora/ in it.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel, built from this checkout (or named by QPATCH_TEST_WHEEL)."""
    named = os.environ.get("QPATCH_TEST_WHEEL")
    if named:
        return Path(named)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


class Env:
    """A virtual environment: ``env.python``, ``env.site`` and child processes in it."""

    def __init__(self, folder: Path, base_python: str = sys.executable):
        subprocess.run([base_python, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.folder = folder
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        self.site = Path(self.run("import sysconfig; print(sysconfig.get_path('purelib'))", flags=["-I"]).stdout.strip())

    def install(self, *what):
        """pip install into this environment, without dependencies and without an index."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--no-deps", "--no-index",
                   "--quiet", "--disable-pip-version-check", *map(str, what)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def see_parent(self):
        """Let this environment see the packages of the one the tests run in (torch, safetensors)."""
        # All of them: the tests may run in an environment that sees its torch through a .pth itself.
        seen = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
        (self.site / "zzz_parent.pth").write_text("\n".join(seen) + "\n")

    def run(self, code, *, flags=(), env=None, cwd=None, check=True, timeout=120):
        """Run ``code`` in a child interpreter of this environment; the finished process."""
        return self.command("-c", code, flags=flags, env=env, cwd=cwd, check=check, timeout=timeout)

    def command(self, *arguments, flags=(), env=None, cwd=None, check=True, timeout=120):
        """Run the interpreter with ``arguments``; QPATCH* and PYTHON* of the caller are not passed on."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("QPATCH", "PYTHON"))}
        done = subprocess.run(
            [str(self.python), *flags, *map(str, arguments)], env={**clean, **(env or {})}, cwd=cwd or self.folder,
            capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
        )
        if check:
            assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture(scope="session")
def installed(tmp_path_factory, wheel):
    """A fresh environment with nothing but the wheel in it (shared: do not change it)."""
    env = Env(tmp_path_factory.mktemp("installed") / "venv")
    env.install(wheel)
    return env


@pytest.fixture(scope="session")
def installed_with_torch(tmp_path_factory, wheel):
    """A fresh environment with the wheel, that sees the torch of the test environment (shared)."""
    env = Env(tmp_path_factory.mktemp("torch") / "venv")
    env.install(wheel)
    env.see_parent()
    return env


@pytest.fixture
def fresh(tmp_path, wheel):
    """A fresh environment with the wheel, for tests that change it."""
    env = Env(tmp_path / "venv")
    env.install(wheel)
    return env
