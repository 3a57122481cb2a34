"""Comparing what files import with what is there, without importing."""

import pytest

from qpatch.doctor import static_imports

LIBRARY = {
    "lib/__init__.py": "_import_structure = {'lazy': ['Lazy']}\n",
    "lib/plain.py": "import os\nfrom json import loads as read\nCONSTANT: int = 1\nif os:\n    def function(): ...\n"
                    "class Class: ...\nfor loop in (): ...\nread_of = lambda: only_read\n",
    "lib/star.py": "from os.path import *\n",
    "lib/dynamic.py": "def __getattr__(name): ...\n",
    "lib/compiled.cpython-312-x86_64-linux-gnu.so": "",
    "lib/sub/__init__.py": "",
}


@pytest.fixture
def missing(tmp_path):
    for name, text in LIBRARY.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def ask(source: str) -> list[str]:
        pack = tmp_path / "pack"
        pack.mkdir()
        (pack / "nodes.py").write_text(source)
        return [str(found) for found in static_imports.missing(pack, tmp_path / "site" / "lib")]

    return ask


@pytest.mark.parametrize("source", [
    "import lib", "import lib.plain", "from lib import plain, sub, Lazy", "from lib.plain import *",
    "from lib.plain import CONSTANT, function, Class, loop, os, read", "from lib.star import anything",
    "from lib.dynamic import anything", "from lib.compiled import anything", "import other.absent",
    "from .lib import absent", "from library import absent",
])
def test_what_is_there_or_may_be_there_is_not_reported(missing, source):
    assert missing(source) == []


@pytest.mark.parametrize(("source", "expected"), [
    ("import lib.absent", "lib.absent (wanted by nodes.py)"),
    ("from lib.absent import x", "lib.absent (wanted by nodes.py)"),
    ("from lib import absent", "lib.absent (wanted by nodes.py)"),
    ("from lib.plain import loads", "lib.plain.loads (wanted by nodes.py)"),
    ("from lib.plain import only_read", "lib.plain.only_read (wanted by nodes.py)"),
    ("def late():\n    from lib.plain import absent as here", "lib.plain.absent (wanted by nodes.py)"),
    ("try:\n    import lib.absent\nexcept ValueError:\n    pass", "lib.absent (wanted by nodes.py)"),
])
def test_what_is_not_there_is_named_with_the_file_that_wants_it(missing, source, expected):
    assert missing(source) == [expected]


@pytest.mark.parametrize("handler", ["ImportError", "ModuleNotFoundError", "(ImportError, OSError)", "Exception", ""])
def test_an_import_whose_failure_the_file_expects_is_not_reported(missing, handler):
    assert missing(f"try:\n    from lib.absent import x\nexcept {handler}:\n    x = None\n") == []


def test_a_file_that_this_python_cannot_parse_is_passed_over(missing):
    assert missing("from lib import absent\nthis is no Python\n") == []
