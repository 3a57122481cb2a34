"""What a LoRA file holds, as plain records, and valid files as trainers and exporters write them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import producers
import torch

from qpatch.lora.header import BITS

#: Extents of the models in harness.py.
DIMS = {"qwen-image": {"h": 128, "f": 128, "m": 768, "l": 16, "t": 32, "n": 256, "c": 32},
        "z-image": {"h": 128, "f": 128, "m": 512, "l": 16, "t": 48, "c": 32, "e": 64}}

#: Tag in a header -> dtype in torch, of those that can be made here.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
          "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """One tensor of a file; ``data`` need not have the length that dtype and shape ask for."""

    tag: str
    shape: tuple
    data: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Stored:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return cls(_TAGS[tensor.dtype], tuple(tensor.shape), raw)

    def fitted(self, tag: str, shape: tuple) -> Stored:
        """As ``tag`` and ``shape``, with as many bytes as these need: the old ones, repeated or cut."""
        bits = BITS[tag]
        for extent in shape:
            bits *= extent
        size = -(-bits // 8)
        data = self.data or b"\x3c"
        return Stored(tag, shape, (data * (size // len(data) + 1))[:size])


@dataclass
class Contents:
    """A file: ``tensors`` by key, in order, and ``metadata`` (a table of texts, or whatever a broken one has)."""

    tensors: dict[str, Stored] = field(default_factory=dict)
    metadata: object = None


#: (producer, family, kind of adapter) of every valid file that is started from.
SPELLINGS = [(name, family, kind) for name, rules in producers.PRODUCERS.items()
             for family in rules.families for kind in rules.kinds]


@functools.cache
def example(producer: str, family: str, kind: str) -> tuple[dict[str, dict[str, Stored]], dict[str, str]]:
    """(stem -> key -> tensor, metadata) of a valid file."""
    made = producers.make(producer, family, kind, rank=3, dims=DIMS[family], dtype=torch.bfloat16, singles=True)
    groups: dict[str, dict[str, Stored]] = {}
    for key, tensor in made.tensors.items():
        groups.setdefault(stem_of(key), {})[key] = Stored.of(tensor)
    return groups, made.metadata


_ENDINGS = (".lora", ".alpha", ".dora", ".diff", ".lokr", ".hada", ".oft", ".weight", ".a1", ".a2", ".b1", ".b2",
            ".ia3", ".on_input", ".set_weight", ".magnitude", ".rescale", ".w_norm", ".b_norm")


def stem_of(key: str) -> str:
    """The module's name in ``key``: all before what looks like an adapter's ending."""
    ends = [at for ending in _ENDINGS if (at := key.find(ending)) > 0]
    return key[:min(ends)] if ends else key
