"""What a package's files import from another one, compared with what that one has, by reading both.

Import errors of node packs end in one line of a long log and a node that is not there. Reading the
sources finds the same without running anything of either side.
"""

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

from . import packages

_SOFT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


@dataclass(frozen=True)
class Missing:
    """``file`` imports ``name`` (None: the module itself) of ``module``, and it is not there."""

    file: Path
    module: str
    name: str | None

    def __str__(self):
        what = f"{self.module}.{self.name}" if self.name else self.module
        return f"{what} (wanted by {self.file.name})"


def missing(folder: Path, package: Path) -> list[Missing]:
    """What the Python files under ``folder`` import of the package in the folder ``package`` in vain.

    Imports that their file itself expects to fail (in ``try`` with an except for it) do not count.
    """
    _defines.cache_clear()
    _tree.cache_clear()
    found = []
    for file in sorted(folder.rglob("*.py")):
        if package.name in packages.text(file):
            for module, name in _imports(file, package.name):
                lacking = _lacking(package, module, name)
                if lacking is not None:
                    found.append(Missing(file, *lacking))
    return list(dict.fromkeys(found))


def _imports(file: Path, top: str):
    """Each (module, name or None) of ``top`` that ``file`` imports without a safety net."""
    tree = _tree(file)
    soft = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.Try) and _expects_failure(node)
            for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in soft:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == top)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == top:
            yield from ((node.module, alias.name) for alias in node.names if alias.name != "*")


def _expects_failure(node: ast.Try) -> bool:
    for handler in node.handlers:
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if any(kind is None or isinstance(kind, ast.Name) and kind.id in _SOFT for kind in kinds):
            return True
    return False


def _lacking(package: Path, module: str, name: str | None):
    """(module, name) of what is not there, or None."""
    file = packages.module_file(package, module)
    if file is None:
        return module, None
    if name is None or file.suffix != ".py" or packages.module_file(package, f"{module}.{name}"):
        return None
    return None if _defines(file, name) else (module, name)


@functools.cache
def _defines(file: Path, name: str) -> bool:
    """Whether the module in ``file`` may have ``name``; in doubt, yes."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.alias) and name == (node.asname or node.name.split(".")[0]) or _star(node):
            return True
    # Packages that load their names on demand keep them as strings.
    return "__getattr__" in packages.text(file) or file.name == "__init__.py" and name in packages.text(file)


def _star(node) -> bool:
    return isinstance(node, ast.alias) and node.name == "*"


@functools.lru_cache(maxsize=256)
def _tree(file: Path) -> ast.AST:
    try:
        return ast.parse(packages.text(file))
    except SyntaxError:  # written for a later Python than this one
        return ast.Module(body=[], type_ignores=[])
