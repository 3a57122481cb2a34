"""From files to a plan for one model, and from the plan to a composition.

A plan has read and checked everything that can be read and checked without touching the model:
every layer of every file has its places, or a reason why not.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from . import mapping, reading
from .composition import entry, number, rescale, swap
from .coverage import Coverage
from .errors import NonFiniteError, PlanError, UnsupportedAdapter
from .modules import Draft, Part, Site
from .modules.offload import align, aligned
from .modules.tree import present
from .placement import LeaveOut, Places, locate
from .progress import Progress, Steps
from .report import Applied, Report
from .state import Composition, Loaded, holding


@dataclass(eq=False)
class Plan:
    """What :func:`plan` worked out. ``str(plan)`` tells it; :meth:`apply` does it.

    ``report`` tells per file which layers will apply and which are missed, and why. ``loras`` are the
    files that will be in the model; one that was refused is in the report only.
    """

    root: nn.Module
    loras: tuple[Loaded, ...]
    report: Report
    max_rank: int
    progress: Progress | None
    asked: reading.Asked
    sites: dict[str, tuple[Site, list[Part]]] = field(repr=False)
    coverages: list[Coverage] = field(repr=False)

    @entry
    def apply(self, log: bool = True) -> Report:
        """Compose: replace what is in the model by this plan; all of it or, on any error, nothing.

        ``log``: write the report to the logger "qpatch.lora" as well.
        The model may have been moved or converted since the plan was made. Raises :class:`PlanError` if a module was
        exchanged since, :class:`NonFiniteError` for a value that a module's dtype cannot hold, :class:`BusyError` when
        called from inside another composition of the same model. A second thread waits.
        """
        with holding(self.root) as state:
            began = time.perf_counter()
            self._check_that_modules_are_there()
            composition = self._work_out()
            state.aside = None
            swap(self.root, state, composition if self.loras else None)
            self._take_time(time.perf_counter() - began)
        if log:
            self.report.write_log()
        return self.report

    def _check_that_modules_are_there(self) -> None:
        there = set(map(id, self.root.modules()))
        for site, _ in self.sites.values():
            if id(site.owner) not in there:
                raise PlanError("the module was exchanged since the plan was made; plan again", key=site.path)

    def _take_time(self, seconds: float) -> None:
        self.report.seconds += seconds
        lines = sum(len(coverage.report.lines) for coverage in self.coverages)
        for coverage in self.coverages:
            coverage.report.seconds += seconds * len(coverage.report.lines) / max(lines, 1)

    def _work_out(self) -> Composition:
        """All new objects, none of them in place yet."""
        strengths, changes, lines = [lora.strength for lora in self.loras], [], []
        with Steps("composing LoRAs", 2 * len(self.sites), self.progress) as steps:
            drafts = self._drafts(strengths, steps)
            ranks = align(self.root, drafts, strengths, self.max_rank)
            steps.total = steps.done + len(drafts)
            for path in list(drafts):
                # Not kept: truncated factors would stay in memory beside all that is made of them.
                draft = drafts.pop(path)
                with self._blaming(path):
                    changes.append(draft.build(ranks.get(path)))
                lines += draft.lines
                steps.step()
        self._report(lines)
        reports = [coverage.report for coverage in self.coverages]
        return Composition(self.loras, changes, self.report, reports, self.asked)

    def _drafts(self, strengths, steps: Steps) -> dict[str, Draft]:
        drafts: dict[str, Draft] = {}
        for path, (site, parts) in self.sites.items():
            with self._blaming(path):
                try:
                    drafts[path] = site.draft(parts, strengths, self.max_rank)
                except UnsupportedAdapter as error:
                    rest = self._without_base(parts, error)
                    if rest:
                        drafts[path] = site.draft(rest, strengths, self.max_rank)
            steps.step()
        return drafts

    @contextmanager
    def _blaming(self, path: str) -> Iterator[None]:
        """A value that a module cannot hold names the files that meet in it, and the key of the first."""
        try:
            yield
        except NonFiniteError as error:
            _, parts = self.sites.get(path, (None, ()))
            if error.file is None and parts:
                error.naming(", ".join(dict.fromkeys(part.file for part in parts)), parts[0].key)
            raise

    def _without_base(self, parts: list[Part], error: UnsupportedAdapter) -> list[Part]:
        """The parts that do not need the base weight, which this module cannot give; the others become misses."""
        rest = []
        for part in parts:
            if part.delta.rebase is None and part.delta.replace is None:
                rest.append(part)
            else:
                self.coverages[part.lora].miss(part.target, part.key, error.problem)
        return rest

    def _report(self, lines: list[Applied]) -> None:
        # A plan can be applied again, after its strengths were changed in the model.
        self.report.computed = True
        for place, (coverage, lora) in enumerate(zip(self.coverages, self.loras)):
            coverage.report.lines[:] = [line for line in lines if line.lora == place]
            coverage.report.strength = lora.strength
            coverage.settle()

    def __str__(self):
        kinds: dict[str, int] = {}
        for site, _ in self.sites.values():
            kinds[site.kind] = kinds.get(site.kind, 0) + 1
        listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"
        return f"Plan for {type(self.root).__name__}: {len(self.sites)} modules change ({listed})\n{self.report}"


def _nothing_shown(done: int, total: int) -> None:
    """Where the caller shows the progress of :meth:`Plan.apply` itself: no bar of ours before it."""


@entry
def plan(model: nn.Module, loras: Sequence[tuple[reading.Source, float]], max_rank: int = 128, *, strict: bool = False,
         leave_out: LeaveOut | None = None, metadata_alpha: bool = False, convention: str = "comfyui",
         progress: Progress | None = None) -> Plan:
    """Work out how ``loras`` go into ``model``; the model is not touched.

    ``loras``      pairs of a source (path of a safetensors file, dict of tensors, :class:`LoraFile`) and a strength.
                   The order matters only to those that look at the weight (DoRA, OFT): they see what the others before
                   them have made of it.
    ``max_rank``   rank to which a change without a small exact rank is truncated, per layer.
    ``strict``     refuse the stack if one of its files is refused; otherwise the others are planned, and the report
                   says which one is missing and why. If none is left the first error is raised in either case.
    ``leave_out``  called with name and module of each module concerned; a reason returned makes it a miss.
    ``metadata_alpha``, ``convention``: as in :func:`open_lora`.
    ``progress``   called with (steps done, steps in all) by :meth:`Plan.apply`, in place of a progress bar.

    Raises a :class:`LoraError`: of the file at fault, or :class:`PlanError` for a model without a known
    transformer, a strength that is no finite number, or a module whose weight is not loaded yet.
    """
    began = time.perf_counter()
    if not isinstance(max_rank, int) or max_rank < 1:
        raise PlanError("max_rank is a positive number", found=repr(max_rank))
    root, family = locate(model)
    loras = reading.pairs(loras)
    asked = reading.Asked.of(loras, max_rank, leave_out, metadata_alpha, convention)
    places = Places(root, family, leave_out)
    loaded, report, sites, coverages = [], Report(), {}, []
    for source, strength in loras:
        started = time.perf_counter()
        found = reading.read(source, family, places, len(loaded), asked, strict or len(loras) == 1,
                             progress and _nothing_shown)
        found.report.seconds = time.perf_counter() - started
        report.files.append(found.report)
        found.report.strength = number(strength, found.report.name)
        if found.report.error is not None:
            continue
        loaded.append(Loaded(found.report.name, found.report.strength, source if source is found.file else None))
        coverages.append(found.coverage)
        for site, part in found.parts:
            sites.setdefault(site.path, (site, []))[1].append(part)
    if loras and not loaded:
        raise report.files[0].error
    for file in report.files:
        if file.error is not None:
            # A traceback would keep the callers' frames, and all that is in them, as long as the report.
            file.error = file.error.with_traceback(None)
            file.error.__context__ = None
    report.seconds = time.perf_counter() - began
    return Plan(root, tuple(loaded), report, max_rank, progress, asked, sites, coverages)


@entry
def compose(model: nn.Module, loras: Sequence[tuple[reading.Source, float]], max_rank: int = 128, *, log: bool = True,
            **options) -> Report:
    """:func:`plan` and :meth:`Plan.apply` in one; replaces what was composed before. An empty stack is a :func:`reset`.

    The same :class:`LoraFile` objects again with other strengths only rewrite the scales, and what
    :func:`set_aside` took out is put back as it was. Weights that are loaded into the model while LoRAs are in
    are lost at the next :func:`reset`, which puts the originals back: reset first.
    """
    inspect.signature(plan).bind(model, loras, max_rank, **options)
    root, _ = locate(model)
    loras = reading.pairs(loras)
    chosen = {name: options.get(name, default) for name, default in reading.OPTIONS.items()}
    asked = reading.Asked.of(loras, max_rank, **chosen)
    with holding(root) as state:
        strengths = [number(strength, reading.name_of(source)) for source, strength in loras]
        report = _again(root, state, asked, strengths, options.get("strict", False))
    if report is not None:
        return report
    with mapping.allowed():
        return plan(model, loras, max_rank, **options).apply(log)


def _again(root, state, asked, strengths, strict) -> Report | None:
    """Use what is worked out already, if it is for the very same files; None if it is not."""

    def fits(one: Composition | None) -> bool:
        return (one is not None and one.is_of(asked) and not (strict and any(file.problem for file in one.report.files))
                and present(root, one.changes) and aligned(root, one.changes))

    installed, aside = (one if fits(one) else None for one in (state.installed, state.aside))
    back = state.installed
    if installed is not None and installed.stands():
        ready = installed
    elif aside is not None and aside.bring():
        ready = aside
    else:
        return None
    try:
        if ready is not back:
            swap(root, state, ready)
        rescale(state, ready.chosen(strengths))
    except BaseException as error:
        if state.installed is not back:
            swap(root, state, back)
        if isinstance(error, PlanError):
            # Some of it cannot be rescaled, and is worked out anew.
            return None
        raise
    state.aside = None
    ready.report.computed = False
    return ready.report
