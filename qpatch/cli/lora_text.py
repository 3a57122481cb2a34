"""A surveyed LoRA as plain text, readable in 100 columns and without colour."""

from collections import Counter

from ..lora.printable import printable, short
from .text import count, row, width, wrap

LABEL = 14


def described(survey) -> list[str]:
    """The lines about one file."""
    lines = [f"{printable(survey.name)}  ({_megabytes(survey.size)}, {count(survey.tensors, 'tensor')})"]
    lines += [_fact(label, text) for label, text in _facts(survey) if text]
    if survey.layers:
        lines += ["", *_table(survey)]
    return lines + _left_out(survey)


def _fact(label: str, text: str) -> str:
    return row(("  " + label,), (LABEL + 2,), printable(text))


def _facts(survey):
    from ..lora.inspection.metadata import TAGS_SHOWN

    layers, about = survey.layers, survey.about
    yield "made by", f"{survey.maker.name} ({'' if survey.maker.sure else 'guessed: '}{survey.maker.why})"
    yield "for", survey.family.title if survey.family else "a text encoder only"
    yield "adapters", _counted(("DoRA over " if facts.dora else "") + facts.kind for facts in layers)
    yield "rank", _counted((facts.rank for facts in layers if facts.rank is not None), "layer")
    yield "alpha", _counted((f"{facts.alpha:g}" if facts.alpha is not None else "none" for facts in layers), "layer")
    yield "scale", _counted((facts.rule for facts in layers if facts.rule), "layer")
    yield "stored as", _counted(survey.dtypes.elements(), "tensor")
    yield "triggers", "; ".join(about.triggers)
    yield "tags", ", ".join(f"{tag} ({number})" for tag, number in about.tags[:TAGS_SHOWN])
    yield from about.facts.items()


def _counted(values, noun: str = "layer") -> str:
    """"16 (820 layers), 8 (20 layers)", the most frequent first."""
    found = Counter(values)
    shown = [f"{value} ({count(number, noun)})" for value, number in found.most_common(6)]
    return ", ".join(shown) + (f", and {len(found) - 6} more" if len(found) > 6 else "")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size} bytes"


def _table(survey) -> list[str]:
    from ..lora.inspection.chart import chart
    from ..lora.picture.text import table

    drawn = chart(survey)
    return [*table(drawn, width(fallback=100)), "", *_legend(drawn)]


def _legend(drawn) -> list[str]:
    from ..lora.picture import caption

    cells = drawn.cells
    changed = sum(cell.facts is not None for cell in cells)
    lines = [wrap(f"{changed} of {len(cells)} layers of {drawn.family} are changed")]
    if drawn.end is not None:
        end = drawn.end
        usual = "usual " if drawn.beyond else ""
        lines.append(wrap(f"change: root mean square of the change of one element at strength 1; the strongest {usual}"
                          f"layer is {end.name} ({end.rms:.2e}; norm {end.norm:.3g})"))
        lines.append(wrap("0-9: change relative to it; '.' unchanged; '?' not known without the model's own weight"))
    if drawn.beyond:
        lines.append(wrap(f"+: {caption.beyond(drawn)}"))
    return lines


def _left_out(survey) -> list[str]:
    """Keys that composing leaves out, by reason, with one example of each; and what it would refuse."""
    lines = []
    for title, entries in (("skipped", survey.skipped), ("unknown", survey.unknown)):
        reasons = {}
        for key, reason in entries:
            reasons.setdefault(reason, []).append(key)
        for reason, keys in list(reasons.items())[:_REASONS]:
            lines.append(_fact(title, f"{count(len(keys), 'key')}: {reason} (such as {short(keys[0])})"))
        if len(reasons) > _REASONS:
            lines.append(_fact(title, f"... for {len(reasons) - _REASONS} more reasons (--json lists all)"))
    lines += [_fact("refused", problem) for problem in survey.problems[:_REASONS]]
    return ["", *lines] if lines else []


_REASONS = 8
