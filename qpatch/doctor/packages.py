"""Versions and files of installed packages, read from disk: nothing is imported."""

import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

try:
    import importlib_metadata as metadata
except ImportError:  # an install without dependencies still gets a diagnosis
    from importlib import metadata


def distribution(name: str, context):
    """The metadata of the first distribution called ``name`` on the search path, or None."""
    found = metadata.distributions(name=name, path=[str(folder) for folder in context.search_path])
    # A folder that an interrupted uninstall emptied still bears the name of its distribution.
    return next((d for d in found if d.read_text("METADATA") or d.read_text("PKG-INFO")), None)


def version(name: str, context) -> str | None:
    """The installed version of the distribution called ``name``, or None."""
    found = distribution(name, context)
    return found.version if found else None


def folder(name: str, context) -> Path | None:
    """The folder of the top-level package ``name``, or None; found as an import would find it."""
    spec = PathFinder.find_spec(name, [str(entry) for entry in context.search_path])
    for finder in context.finders if spec is None else ():
        spec = spec or finder.find_spec(name, None)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def module_file(package: Path, module: str) -> Path | None:
    """The file of the dotted ``module`` (its first part is the folder ``package`` itself)."""
    base = package.joinpath(*module.split(".")[1:])
    for path in (base.with_name(base.name + ".py"), base / "__init__.py"):
        if path.is_file():
            return path
    # An extension module, or a folder without __init__.py.
    compiled = sorted(base.parent.glob(base.name + ".*.so")) + sorted(base.parent.glob(base.name + "*.pyd"))
    return compiled[0] if compiled else base if base.is_dir() else None


def text(path: Path) -> str:
    """The text of a file, "" if it cannot be read: a check looks at it, none depends on it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def assigned(source: str, name: str) -> str | None:
    """The string in a line ``name = "..."`` of Python or TOML text."""
    found = re.search(rf"^{re.escape(name)}\s*(?::[^=\n]*)?=\s*['\"]([^'\"\n]*)['\"]", source, re.MULTILINE)
    return found.group(1) if found else None


def project(pyproject: Path) -> dict[str, str]:
    """``name`` and ``version`` of the ``[project]`` table (tomllib is not in every Python we run on)."""
    table = re.search(r"^\[project\]\s*$(.*?)(?=^\[|\Z)", text(pyproject), re.MULTILINE | re.DOTALL)
    found = {key: assigned(table.group(1), key) for key in ("name", "version")} if table else {}
    return {key: value for key, value in found.items() if value}


def release(version_text: str) -> tuple[int, ...]:
    """The numbers of a version before any suffix: "0.2.31", "2.10.0+cu130", "1.3.0.dev2" -> (1, 3, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version_text.strip())
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def satisfies(version_text: str, requirement: str) -> bool:
    """Whether a version meets "==0.2.31", ">=0.2.7,<0.3" and the like, by its release numbers."""
    return all(_meets(release(version_text), clause.strip()) for clause in requirement.split(",") if clause.strip())


def _meets(have: tuple[int, ...], clause: str) -> bool:
    found = re.match(r"(==|>=|<=|!=|~=|>|<)\s*([\w.]+)", clause)
    if not found:
        return True
    sign, want = found.group(1), release(found.group(2))
    if sign == "~=":
        return have >= want and have[: len(want) - 1] == want[:-1]
    size = max(len(have), len(want))
    have, want = (part + (0,) * (size - len(part)) for part in (have, want))
    return {"==": have == want, ">=": have >= want, "<=": have <= want, "!=": have != want,
            ">": have > want, "<": have < want}[sign]


def requirement(lines, name: str) -> str | None:
    """What requirement ``lines`` ask of the distribution ``name``: ">=0.36", "" for any, None if unnamed."""
    wanted = normal(name)
    for line in lines or ():
        found = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?([^;)#]*)", line)
        if found and normal(found.group(1)) == wanted and "extra ==" not in line:
            return found.group(2).strip()
    return None


def normal(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def python_name(version_pair) -> str:
    """(3, 11) -> "3.11"."""
    return ".".join(map(str, version_pair))


def loaded(name: str):
    """The module ``name`` if this process has imported it: looked at, never imported."""
    return sys.modules.get(name)
