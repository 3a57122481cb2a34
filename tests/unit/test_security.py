"""What docs/security.md says never happens does not stand in the source."""

import ast
from pathlib import Path

import pytest

import qpatch

PACKAGE = Path(qpatch.__file__).resolve().parent
INSTALLED = [PACKAGE, *(Path(place) for name in ("hooks", "lora")
                        for place in __import__(f"qpatch.{name}", fromlist=["__path__"]).__path__)]
SOURCES = sorted({path.resolve() for folder in INSTALLED for path in folder.rglob("*.py")})

NETWORK = {"socket", "ssl", "http", "urllib", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "xmlrpc",
           "webbrowser"}
FOREIGN_CODE = {"pickle", "cPickle", "dill", "marshal", "shelve", "ctypes", "cffi", "code", "codeop", "runpy",
                "subprocess", "multiprocessing", "threading", "_thread", "sched", "asyncio", "concurrent",
                "atexit", "signal"}

#: Module of ours -> what it may import of these, and why.
ALLOWED = {
    "doctor/installation.py": {"urllib.parse", "urllib.request.url2pathname"},  # file: addresses; opens none
    "selftest/children.py": {"subprocess"},  # proves the installed copy in child interpreters
    "shadow.py": {"_thread._local"},  # storage of each thread; starts none
    "convrot/rotation.py": {"threading.Lock"},
    "state.py": {"threading"},  # a lock
    "source.py": {"threading", "ctypes"},  # a lock; memory of a tensor to read into
    "mapping.py": {"signal"},  # the number of a signal, for the system
    "inspection/gram.py": {"threading"},  # memory of each thread
    "inspection/workers.py": {"concurrent.futures.ThreadPoolExecutor"},  # of qpatch lora inspect
    "cli/lora.py": {"signal"},  # what ends the command lets it clean up
}


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield node.module if node.module == "urllib.parse" else f"{node.module}.{alias.name}"


def called(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


@pytest.fixture(scope="module")
def trees():
    assert len(SOURCES) > 150
    return {path: ast.parse(path.read_text("utf-8")) for path in SOURCES}


def place(path):
    """Name below the innermost of the folders: in an editable install hooks and lora stand elsewhere."""
    return min((path.relative_to(folder).as_posix() for folder in INSTALLED if folder in path.parents), key=len)


def test_nothing_reaches_for_the_network_for_pickles_or_for_other_processes(trees):
    found = {(place(path), name) for path, tree in trees.items() for name in imported(tree)
             if name.partition(".")[0] in NETWORK | FOREIGN_CODE}
    assert {(where, name) for where, name in found if name not in ALLOWED.get(where, ())} == set()


def test_nothing_runs_text_as_code(trees):
    banned = {"eval", "exec", "compile", "torch.load", "builtins.eval", "builtins.exec", "os.system", "os.popen",
              "os.fork", "Thread", "Timer", "threading.Thread", "threading.Timer"}
    found = {(place(path), name) for path, tree in trees.items() for name in called(tree) if name in banned}
    assert found == set()


def test_start_up_loads_only_what_the_interpreter_has_loaded(trees):
    for name, allowed in (("__init__.py", {"os"}), ("finder.py", {"sys", "_imp"})):
        assert set(imported(trees[PACKAGE / name])) - {"qpatch"} == allowed
