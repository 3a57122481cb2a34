"""A surveyed LoRA as plain data, for ``--json``."""

import math


def described(survey) -> dict:
    """Everything about one file. Names of the fields do not change between releases; new ones may be added."""
    return {
        "file": survey.path, "size": survey.size, "tensors": survey.tensors,
        "family": survey.family.name if survey.family else None,
        "made_by": vars(survey.maker) | {},
        "about": {"facts": survey.about.facts, "triggers": survey.about.triggers, "tags": dict(survey.about.tags)},
        "dtypes": dict(survey.dtypes),
        "coverage": _coverage(survey),
        "layers": [_layer(facts) for facts in survey.layers],
        "skipped": [{"key": key, "reason": reason} for key, reason in survey.skipped],
        "unknown": [{"key": key, "reason": reason} for key, reason in survey.unknown],
        "problems": survey.problems,
    }


def _coverage(survey) -> list[dict]:
    if survey.layout is None:
        return []
    from ..lora.inspection.chart import chart

    return [{"component": drawn.label, "layers": len(drawn.present), "of": len(drawn.present) + len(drawn.missing),
             "missing": [cell.name for cell in drawn.missing], "rms": drawn.mean_rms()} for drawn in chart(survey).rows]


def _layer(facts) -> dict:
    """``norm``: Frobenius norm of the change at strength 1; ``rms``: per element; null where it is not known."""
    return {
        "target": str(facts.target), "kind": facts.kind, "dora": facts.dora, "rank": facts.rank,
        "alpha": _finite(facts.alpha),
        "scale": facts.scale, "rule": facts.rule, "shape": facts.shape and list(facts.shape),
        "dtypes": list(facts.dtypes), "norm": facts.norm,
        "parts": [{"component": spot.component.label, "rms": facts.rms(number)}
                  for number, spot in enumerate(facts.spots)],
        "note": facts.note,
    }


def _finite(number):
    """Trainers write any alpha where it means nothing, infinities among them: null."""
    return number if number is not None and math.isfinite(number) else None
