"""docs/compatibility.md and the command that makes its table."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from qpatch.catalogue import HOOKS
from qpatch.repairs import REPAIRS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "compatibility.md"


@pytest.fixture
def matrix():
    spec = importlib.util.spec_from_file_location("compat_matrix", ROOT / "tests" / "contract" / "matrix.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkouts(tmp_path):
    """Two ComfyUI folders and a pack, as far as the command reads them itself."""
    for number in ("0.9.0", "0.31.0"):
        (tmp_path / "checkouts" / number / "comfy").mkdir(parents=True)
        (tmp_path / "checkouts" / number / "comfyui_version.py").write_text(f'__version__ = "{number}"\n')
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "pyproject.toml").write_text('[project]\nname = "ComfyUI-nunchaku"\nversion = "1.2.1"\n')
    marks = "<!-- matrix: made by tests/contract/matrix.py -->", "<!-- end of matrix -->"
    (tmp_path / "doc.md").write_text(f"before\n{marks[0]}\nold\n{marks[1]}\nafter\n")
    return tmp_path


def test_every_repair_is_described():
    described = re.findall(r"^\| `([a-z-]+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(described) == sorted(REPAIRS)


def test_the_table_in_the_document_is_of_the_hooks_of_this_release():
    rows = set(re.findall(r"^\| ([a-z][a-z0-9-]+) \|", DOCUMENT.read_text(), re.MULTILINE)) - {"hook", "repair"}
    assert rows and rows <= {hook.name for hook in HOOKS}
    assert {"comfy-compat-" + thing for thing in REPAIRS} <= rows


def test_the_command_writes_a_column_for_each_release_in_order_of_version(matrix, checkouts, monkeypatch):
    found = {"0.9.0": {"lazy-linear": "applied", "never": "waiting"},
             "0.31.0": {"lazy-linear": "not-needed", "never": "waiting"}}
    monkeypatch.setattr(matrix, "states", lambda comfyui, nunchaku, pack: found[comfyui.name])
    monkeypatch.setattr(sys, "argv", ["matrix.py", str(checkouts / "checkouts"), "--nunchaku", "n/1.2.1",
                                      "--pack", str(checkouts / "pack"), "--write", str(checkouts / "doc.md")])
    matrix.main()
    text = (checkouts / "doc.md").read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "### ComfyUI-nunchaku 1.2.1, nunchaku 1.2.1" in text
    assert "| hook | 0.9.0 | 0.31.0 |" in text and "| lazy-linear | A | – |" in text
    assert "never" not in text


def test_a_folder_without_checkouts_is_refused(matrix, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["matrix.py", str(tmp_path), "--nunchaku", "n", "--pack", "p"])
    with pytest.raises(SystemExit, match="holds no ComfyUI folder"):
        matrix.main()
