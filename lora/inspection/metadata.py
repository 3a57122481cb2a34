"""What a file says about itself in its metadata: title, base model, training, trigger words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

#: Where trigger words are written as plain text, by trainers and by sites that re-save files.
TRIGGER_KEYS = ("modelspec.trigger_phrase", "modelspec.trigger_phrases", "trigger_phrase", "trigger_words",
                "trigger_word", "ss_trigger_words", "ss_activation_text", "activation text", "instance_prompt")

#: Fact -> the metadata keys that may hold it, the first that is there counts.
FACTS = {
    "title": ("modelspec.title", "ss_output_name", "name"),
    "author": ("modelspec.author",),
    "base model": ("ss_base_model_version", "modelspec.architecture", "ss_sd_model_name", "base_model"),
    "date": ("modelspec.date",),
    "license": ("modelspec.license",),
    "resolution": ("modelspec.resolution", "ss_resolution"),
    "steps": ("ss_steps", "ss_max_train_steps"),
    "epochs": ("ss_epoch", "ss_num_epochs"),
    "learning rate": ("ss_unet_lr", "ss_learning_rate"),
    "note": ("modelspec.usage_hint", "modelspec.description", "ss_training_comment"),
}

#: Tags of the training captions that are shown, the most frequent first.
TAGS_SHOWN = 12
_LONGEST = 300


@dataclass(frozen=True)
class About:
    """``facts``: name -> text. ``triggers``: as written. ``tags``: (tag of the captions, how often)."""

    facts: dict[str, str]
    triggers: list[str]
    tags: list[tuple[str, int]]


def about(metadata: Mapping[str, str]) -> About:
    """What the metadata says; what is not of the usual form is left out, not guessed."""
    facts = {}
    for name, keys in FACTS.items():
        value = next((metadata[key] for key in keys if _says_something(metadata.get(key))), None)
        if value is not None:
            facts[name] = _short(value)
    facts |= {name: value for name, value in _training(metadata).items() if name not in facts}
    triggers = list(dict.fromkeys(_short(metadata[key]) for key in TRIGGER_KEYS if _says_something(metadata.get(key))))
    return About(facts, triggers, tags(metadata))


def tags(metadata: Mapping[str, str]) -> list[tuple[str, int]]:
    """The tags in ``ss_tag_frequency`` ({folder: {tag: count}}), added up over the folders."""
    counts: Counter[str] = Counter()
    table = parsed(metadata.get("ss_tag_frequency"))
    for folder in table.values() if isinstance(table, dict) else ():
        if isinstance(folder, dict):
            usual = {tag.strip(): count for tag, count in folder.items() if isinstance(count, int)}
            counts.update({tag: count for tag, count in usual.items() if tag})
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _training(metadata) -> dict[str, str]:
    """ai-toolkit's training_info: {"step": ..., "epoch": ...}."""
    table = parsed(metadata.get("training_info"))
    if not isinstance(table, dict):
        return {}
    names = {"step": "steps", "epoch": "epochs"}
    return {names[key]: str(value) for key, value in table.items() if key in names and isinstance(value, (int, float))}


def parsed(text: str | None):
    """JSON inside of a metadata value, or None."""
    try:
        return json.loads(text or "")
    except (ValueError, RecursionError):
        return None


def _says_something(value: str | None) -> bool:
    # Trainers write str(None) where nothing was set.
    return value is not None and value.strip() not in ("", "None", "null", "{}", "[]")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST - 3] + "..."
