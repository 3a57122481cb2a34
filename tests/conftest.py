"""Fixtures that all tests share: the built wheel, fresh virtual environments, child processes."""

import os
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What is tested is the installed package. `python -m pytest` puts the repository in front, where
# qpatch/ lies without hooks/ and lora/ in it.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]


@cache
def interpreters():
    """Version -> executable of each Python from 3.10 up that this machine has.

    Looked for in QPATCH_TEST_PYTHONS (executables, separated as in PATH), on PATH and among
    pyenv's; the one that runs the tests comes first.
    """
    named = [Path(name) for name in os.environ.get("QPATCH_TEST_PYTHONS", "").split(os.pathsep) if name]
    on_path = [Path(found) for minor in range(10, 20) if (found := shutil.which(f"python3.{minor}"))]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for python in [Path(sys.executable), *named, *on_path, *sorted(pyenv.glob("3.1?.*/bin/python3"))]:
        done = subprocess.run(
            [python, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True,
        )
        # A shim of a version manager can stand on PATH for a version that is not there.
        if done.returncode == 0:
            found.setdefault(done.stdout.strip(), str(python))
    return found


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel, built from this checkout (or named by QPATCH_TEST_WHEEL)."""
    named = os.environ.get("QPATCH_TEST_WHEEL")
    if named:
        return Path(named)
    return build_wheel(copy_of_the_source(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel"))


def copy_of_the_source(folder):
    """What the package is built from, copied: setuptools leaves its work behind and would use it again."""
    for name in ("qpatch", "hooks", "lora"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "qpatch.pth", "qpatch.start"):
        shutil.copy(ROOT / name, folder)
    return folder


def build_wheel(source, out, env=None):
    """Build the wheel of the project in ``source`` into ``out``; its path."""
    # The installed setuptools if it will do: an isolated build fetches one.
    here = ["--no-isolation"] if int(version("setuptools").partition(".")[0]) >= 77 else []
    command = [sys.executable, "-m", "build", "--wheel", *here, "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session", name="copy_of_the_source")
def copy_of_the_source_fixture():
    return copy_of_the_source


@pytest.fixture(scope="session", name="build_wheel")
def build_wheel_fixture():
    return build_wheel


@pytest.fixture(scope="session", name="interpreters")
def interpreters_fixture():
    return interpreters()


class Env:
    """A virtual environment: ``env.python``, ``env.site`` and child processes in it."""

    def __init__(self, folder: Path, base_python: str = sys.executable):
        subprocess.run([base_python, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.folder = folder
        self.base = Path(base_python).resolve()
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        told = self.run("import sys, sysconfig; print('%d.%d' % sys.version_info[:2]); "
                        "print(sysconfig.get_path('purelib'))")
        self.version, site = told.stdout.split("\n", 1)
        self.site = Path(site.strip())

    def install(self, *what):
        """pip install into this environment, without dependencies and without an index."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--no-deps", "--no-index",
                   "--quiet", "--disable-pip-version-check", *map(str, what)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def uninstall(self, name):
        """pip uninstall from this environment."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "uninstall", "--yes", "--quiet",
                   "--disable-pip-version-check", name]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def copy_qpatch(self, folder):
        """Put what is installed here of qpatch into another folder."""
        for path in self.site.glob("qpatch*"):
            target = Path(folder) / path.name
            shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)

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
def empty(tmp_path):
    """A fresh environment without anything in it."""
    return Env(tmp_path / "venv")


@pytest.fixture
def fresh(tmp_path, wheel):
    """A fresh environment with the wheel, for tests that change it."""
    env = Env(tmp_path / "venv")
    env.install(wheel)
    return env


@pytest.fixture(scope="session", params=sorted(interpreters()))
def each_python(request, tmp_path_factory, wheel):
    """A fresh environment with nothing but the wheel in it, for each Python (shared: do not change it)."""
    env = Env(tmp_path_factory.mktemp(f"python{request.param}") / "venv", interpreters()[request.param])
    env.install(wheel)
    return env


@pytest.fixture(scope="session")
def bare(tmp_path_factory, each_python):
    """An environment like ``each_python`` without qpatch, but with some .pth file (shared)."""
    env = Env(tmp_path_factory.mktemp("bare") / "venv", str(each_python.python))
    # Some Pythons load a codec to read any .pth file at all; that is not qpatch's doing.
    (env.site / "zz.pth").write_text("# nothing\n")
    return env
