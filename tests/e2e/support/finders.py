"""Finders and loaders of others, good and bad, for child processes of the tests. They act on ``pkg.target``."""

import importlib.util
import sys
from importlib.machinery import PathFinder, SourceFileLoader


class Passing:
    def find_spec(self, name, path=None, target=None):
        return None


class Nameless:
    """A finder of the time before find_spec."""

    def find_module(self, name, path=None):
        return None


class Counting(Passing):
    asked = 0

    def find_spec(self, name, path=None, target=None):
        self.asked += name == "pkg.target"
        return None


class Answering:
    """Finds the target itself, wherever it stands."""

    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, path, target) if name == "pkg.target" else None


class AskingAll:
    """As post-import libraries do: asks every finder, itself not twice."""
    busy = False

    def find_spec(self, name, path=None, target=None):
        if self.busy or name != "pkg.target":
            return None
        self.busy = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.busy = False


class AskingOthers:
    """Asks every finder but itself, in turn."""
    entered = 0

    def find_spec(self, name, path=None, target=None):
        if name != "pkg.target":
            return None
        self.entered += 1
        for other in sys.meta_path:
            if other is not self and hasattr(other, "find_spec"):
                spec = other.find_spec(name, path, target)
                if spec is not None:
                    return spec


class Raising:
    def find_spec(self, name, path=None, target=None):
        if name == "pkg.target":
            raise OSError("this finder is broken")


class Lying:
    def find_spec(self, name, path=None, target=None):
        return "not a spec" if name == "pkg.target" else None


class OwnLoader(SourceFileLoader):
    ran = 0

    def exec_module(self, module):
        OwnLoader.ran += 1
        super().exec_module(module)


class Subclassing:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name == "pkg.target" else None
        if spec is not None:
            spec.loader = OwnLoader(spec.loader.name, spec.loader.path)
        return spec


class Shared(SourceFileLoader):
    """One loader for all modules: it goes by the module that it is given."""

    def get_filename(self, name):
        return PathFinder.find_spec(name, ["pkg"]).origin

    def exec_module(self, module):
        exec(compile(open(module.__spec__.origin).read(), module.__spec__.origin, "exec"), module.__dict__)


class Prickly:
    """A loader that does not say AttributeError where it has no attribute."""

    def __init__(self, spec):
        self.inner = spec.loader

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        self.inner.exec_module(module)

    def __getattr__(self, name):
        raise RuntimeError(f"ask me for something else than {name}")


class Pricking:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name == "pkg.target" else None
        if spec is not None:
            spec.loader = Prickly(spec)
        return spec


class Sharing:
    loader = Shared("shared", "shared.py")

    def find_spec(self, name, path=None, target=None):
        if name in ("pkg.target", "pkg.other"):
            origin = PathFinder.find_spec(name, path, target).origin
            return importlib.util.spec_from_file_location(name, origin, loader=self.loader)
