"""``._pth`` files and site folders."""

from pathlib import Path

import pytest

from qpatch import places

PORTABLE = """../ComfyUI
python312.zip
.

# Uncomment to run site.main() automatically
import site
"""

PLAIN = """python312.zip
.

# Uncomment to run site.main() automatically
#import site
"""


@pytest.mark.parametrize(("text", "imports_site", "folders"), [
    (PORTABLE, True, ("../ComfyUI", "python312.zip", ".")),
    (PLAIN, False, ("python312.zip", ".")),
    (PORTABLE.replace("\n", "\r\n"), True, ("../ComfyUI", "python312.zip", ".")),
    ("\ufeffpython312.zip\nimport site\n", True, ("python312.zip",)),
    ("Lib\\site-packages\n  import site  # for pip\n", True, ("Lib\\site-packages",)),
    ("python312.zip\nimport sitecustomize\n", False, ("python312.zip",)),
    ("", False, ()),
])
def test_a_pth_that_governs_an_embedded_python_is_read_as_the_interpreter_reads_it(text, imports_site, folders):
    read = places.parse_underscore_pth(Path("python312._pth"), text)
    assert (read.imports_site, read.folders) == (imports_site, folders)


@pytest.mark.parametrize("name", ["python._pth", "python312._pth"])
def test_the_pth_is_found_beside_the_executable_under_either_name(tmp_path, name):
    (tmp_path / name).write_text(PORTABLE)
    found = places.underscore_pth(tmp_path / "python.exe")
    assert found.path == tmp_path / name and found.imports_site


def test_an_ordinary_python_has_no_such_file(tmp_path):
    assert places.underscore_pth(tmp_path / "python.exe") is None


def test_a_virtual_environment_is_known_by_its_configuration_file(tmp_path):
    (tmp_path / "bin").mkdir()
    assert places.venv_root(tmp_path / "bin" / "python") is None
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\n")
    assert places.venv_root(tmp_path / "bin" / "python") == tmp_path


def test_the_same_folder_spelt_twice_is_one(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert places.unique([tmp_path / "a", tmp_path / "link", tmp_path / "a" / ".." / "a"]) == [tmp_path / "a"]
