"""Metadata of a written file: what its sources said, without what is no longer true, and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ..files import LoraFile

#: Said of the tensors themselves: hashes, and the alpha of a PEFT configuration, which now stands beside each layer.
STALE = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256", "hash_sha256", "lora_adapter_metadata")

#: Prefix of what this package writes.
OURS = "qpatch."


def provenance(sources: Sequence[tuple[LoraFile, float]], step: Mapping, format: str, made_by: str) -> dict[str, str]:
    """The metadata of the first source, and of the others what it lacks, with ``step`` added to the history."""
    said: dict[str, str] = {}
    history = []
    for file, _ in sources:
        for key, value in file.metadata.items():
            if key not in STALE and not key.startswith(OURS):
                said.setdefault(key, value)
        history += _history(file.metadata)
    named = [{"name": file.name, "strength": strength} for file, strength in sources]
    history.append({**step, "sources": named, "by": made_by})
    return {**said, f"{OURS}format": format, f"{OURS}made_by": made_by, f"{OURS}history": json.dumps(history)}


def _history(metadata: Mapping[str, str]) -> list:
    try:
        found = json.loads(metadata.get(f"{OURS}history", "[]"))
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def update_ranks(metadata: dict[str, str], ranks: set[int]) -> None:
    """kohya's tools say the rank in the metadata as well; where ranks differ it is "Dynamic"."""
    if "ss_network_dim" in metadata and ranks:
        rank = str(ranks.pop()) if len(ranks) == 1 else "Dynamic"
        if metadata["ss_network_dim"] != rank:
            metadata["ss_network_dim"] = metadata["ss_network_alpha"] = rank
