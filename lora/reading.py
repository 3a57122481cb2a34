"""One LoRA of a stack: opened, and every layer of it given its places in the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike

from .adapters import Adapter
from .coverage import Coverage
from .errors import LoraError, PlanError, ShapeError, UnknownFamily, UnsupportedAdapter
from .families import Family
from .files import LoraFile, open_lora
from .keys import Target
from .modules import Part, Site
from .placement import NoPlace, Place, Places
from .progress import Progress, track
from .report import FileReport
from .terms import Delta

#: What a LoRA may be given as.
Source = "str | PathLike | Mapping[str, torch.Tensor] | LoraFile"

#: (module, its rows) of each place of a layer -> the adapter of the file that goes there.
Taken = dict[tuple, Adapter]

#: Options of a plan that its outcome depends on, and their defaults.
OPTIONS = {"leave_out": None, "metadata_alpha": False, "convention": "comfyui"}


@dataclass(frozen=True)
class Asked:
    """What a composition was asked for: the files and the options.

    A file is None where it was not given as an opened one.
    """

    files: tuple[LoraFile | None, ...]
    options: tuple

    @classmethod
    def of(cls, loras, max_rank, leave_out, metadata_alpha, convention) -> Asked:
        files = tuple(source if isinstance(source, LoraFile) else None for source, _ in loras)
        return cls(files, (max_rank, leave_out, metadata_alpha, convention))

    def same(self, other: Asked) -> bool:
        """Whether both are about the very same opened files; one given by its path may have changed meanwhile."""
        return (self.options == other.options and len(self.files) == len(other.files)
                and all(one is not None and one is two for one, two in zip(self.files, other.files)))

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return Asked, ((None,) * len(self.files), ())


def pairs(loras: Iterable[tuple[Source, float]]) -> list[tuple[Source, float]]:
    """``loras`` as a list; raises :class:`PlanError` where it is none of pairs."""
    try:
        return [(source, strength) for source, strength in loras]
    except (TypeError, ValueError):
        raise PlanError("LoRAs are given as a list of pairs (LoRA, strength)", found=type(loras).__name__) from None


@dataclass
class Reading:
    """``parts``: what goes where; nothing if the file was refused, for ``report.error``."""

    report: FileReport
    file: LoraFile | None = None
    coverage: Coverage | None = None
    parts: list[tuple[Site, Part]] = field(default_factory=list)


def read(source: Source, family: Family, places: Places, number: int, asked: Asked, strict: bool,
         progress: Progress | None = None) -> Reading:
    """Open ``source`` and place its layers, as LoRA ``number`` of the stack.

    A bar appears unless there is a ``progress``.
    Raises the :class:`LoraError` that refuses it if ``strict``, else hands it over in the result.
    """
    _, _, metadata_alpha, convention = asked.options
    reading = Reading(FileReport(name_of(source), 0.0))
    try:
        file = _opened(source, family, metadata_alpha, convention)
        reading.report.name, reading.file = file.name, file
        reading.coverage = Coverage(file, reading.report)
        taken: Taken = {}
        for target, adapter in track(file.layers.items(), len(file.layers), f"reading {file.name}", progress):
            reading.parts += _placed(target, adapter, places, number, reading.coverage, taken)
        reading.coverage.settle()
        if not reading.parts:
            raise _nothing(file, reading.report)
    except LoraError as error:
        # What names no file is wrong with the model, not with this LoRA.
        if strict or error.file is None:
            raise
        # Without the traceback: its frames would keep the caller's objects alive as long as the report.
        reading.report.error, reading.parts = error.with_traceback(None), []
    return reading


def _opened(source, family: Family, metadata_alpha, convention) -> LoraFile:
    if not isinstance(source, LoraFile):
        if not isinstance(source, (str, PathLike, Mapping)):
            raise PlanError("a LoRA is a path, a dict of tensors or a LoraFile", found=type(source).__name__)
        return open_lora(source, family=family, metadata_alpha=metadata_alpha, convention=convention)
    if source.family not in (None, family):
        raise UnknownFamily("the LoRA is made for another model", file=source.name, expected=family.title,
                            found=source.family.title)
    return source


def name_of(source) -> str:
    """What messages call a LoRA."""
    if isinstance(source, LoraFile):
        return source.name
    return "<dict>" if isinstance(source, Mapping) else str(source)


def _nothing(file: LoraFile, report: FileReport) -> PlanError:
    if report.misses:
        key, reason = report.misses[0]
    else:
        # The key of what it holds instead, such as a text encoder's.
        key, reason = next((key for key, _ in file.skipped), None), "it holds no layers of the transformer"
    return PlanError(f"no layer of the file fits this model: {reason}", file=file.name, key=key)


def _placed(target: Target, adapter: Adapter, places: Places, number: int, coverage: Coverage,
            taken: Taken) -> list[tuple[Site, Part]]:
    """The parts of one layer; none if it is missed, or the same as another one's of a tied module."""
    found = []
    try:
        where = places.find(target, adapter.shape)
        _check_size(where, adapter)
        rows = tuple((place.site.path, place.rows.start, place.rows.stop) for place in where)
        first = taken.setdefault(rows, adapter)
        if first is not adapter:
            _tied(first, adapter, coverage)
            return []
        delta = adapter.delta()
        for place in where:
            change = _fitting(place, place.cut(delta), adapter, coverage)
            if change is not None:
                part = Part(number, target, adapter.file, adapter.key, change, place.rows, adapter.rank, adapter.scale)
                found.append((place.site, part))
    except NoPlace as error:
        coverage.miss(target, adapter.key, error.problem)
    except UnsupportedAdapter as error:
        coverage.miss(target, error.key or adapter.key, error.problem)
        found = []
    except ShapeError as error:
        if error.file is not None:
            raise
        raise _misfit(error, adapter) from None
    if found:
        coverage.apply(target)
    return found


def _check_size(where: list[Place], adapter: Adapter) -> None:
    """Raise :class:`ShapeError` for an adapter that has no size of its own, such as a rotation, but does not fit."""
    if adapter.shape is not None or adapter.kind == "bias" or where[0].columns is not None:
        return
    out, inp = sum(place.rows.stop - place.rows.start for place in where), where[0].site.inp
    if inp is None:
        reason = f"{adapter.kind} changes a matrix, and this layer is a vector"
    else:
        reason = adapter.misfit(out, inp)
    if reason is not None:
        raise ShapeError(reason, file=adapter.file, key=adapter.key)


def _tied(first: Adapter, adapter: Adapter, coverage: Coverage) -> None:
    """Two names of one module: what a file says twice is applied once."""
    if adapter.says_the_same(first):
        coverage.apply(adapter.target)
    else:
        coverage.miss(adapter.target, adapter.key,
                      f"it is the same module as {first.target}, which {first.key} changes in another way")


def _misfit(error: ShapeError, adapter: Adapter) -> ShapeError:
    reason = adapter.misfit(*error.expected) if len(error.expected) == 2 else None
    return ShapeError(reason or error.problem, file=adapter.file, key=adapter.key, expected=error.expected,
                      found=error.found)


def _fitting(place: Place, delta: Delta, adapter: Adapter, coverage: Coverage) -> Delta | None:
    """``delta`` without a bias that the module cannot take; None if nothing is left of it."""
    site, height = place.site, place.rows.stop - place.rows.start
    if delta.bias is not None and len(delta.bias) != height:
        raise ShapeError("the bias does not fit the layer", file=adapter.file, key=adapter.key, expected=[height],
                         found=list(delta.bias.shape))
    if (delta.bias is not None or delta.rebias is not None) and not site.has_bias:
        coverage.note(adapter.key, f"{site.path} has no bias: the change of the bias is left out")
        delta = replace(delta, bias=None, rebias=None)
    others = ("dense", "rebase", "replace", "bias", "rebias")
    if not delta.terms and all(getattr(delta, name) is None for name in others):
        coverage.miss(adapter.target, adapter.key, f"{site.path} has no place for it")
        return None
    return delta
