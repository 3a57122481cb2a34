"""What a LoRA does to a model's output, on the quantized model and on its unquantized twin."""

import contextlib

import producers
import torch

from . import tiny, world

FAMILIES = ("qwen-image", "z-image")
#: Extents of the tiny models, in the letters of producers.DIMS.
DIMS = {
    "qwen-image": {"h": 256, "f": 1024, "m": 1536, "l": 64, "t": 96, "n": 512, "c": 256},
    "z-image": {"h": 256, "f": 768, "m": 1024, "l": 64, "t": 96, "c": 256, "e": 256},
}
#: bf16 factors round to 2^-9; the rest is room for what a model makes of it.
TOLERANCE = 0.01


def example(family: str, producer: str = "ai-toolkit", kind: str = "lora", **more) -> producers.Example:
    """A synthetic LoRA file for the tiny model of ``family``."""
    return producers.make(producer, family, kind, dims=DIMS[family], **{"blocks": 2, **more})


def only(file: producers.Example, *endings: str, exact: bool = False) -> producers.Example:
    """``file`` with only the layers whose canonical target is, or ends like, one of ``endings``."""
    layers = {target: sample for target, sample in file.layers.items()
              if (target in endings if exact else target.endswith(endings))}
    assert layers, endings
    kept = {id(tensor) for sample in layers.values() for tensor in sample.tensors.values()}
    tensors = {key: tensor for key, tensor in file.tensors.items() if id(tensor) in kept}
    return producers.Example(file.producer, file.family, file.kind, tensors, file.metadata, layers, file.shapes)


def _weight(model: torch.nn.Module, target: str) -> tuple[torch.nn.Module, slice]:
    """The unquantized layer and rows that a canonical target of the quantized model means."""
    module, _, part = target.rstrip("]").partition("[")
    names = tiny.sources(module)
    if len(names) > 1:
        place = {"q": 0, "k": 1, "v": 2, "w3": 0, "w1": 1}.get(part)
        assert place is not None, target
        return model.get_submodule(names[place]), slice(None)
    layer = model.get_submodule(module)
    height = len(layer.weight) // 3
    place = "qkv".find(part) if part else -1
    return layer, slice(place * height, (place + 1) * height) if place >= 0 else slice(None)


@contextlib.contextmanager
def dense(plain, files):
    """The unquantized model with ``files`` [(example, strength), ...] added to its weights in float64."""
    model = plain.model.diffusion_model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        for file, strength in files:
            for target, sample in file.layers.items():
                _add(*_weight(model, target), sample, strength)
        yield plain
    finally:
        model.load_state_dict(before)


@torch.no_grad()
def _add(layer, rows, sample, strength: float) -> None:
    if sample.change is not None:
        weight = layer.weight[rows].double().numpy()
        layer.weight[rows] = torch.from_numpy(weight + sample.change(weight, strength)).float()
    if sample.bias is not None and layer.bias is not None:
        bias = layer.bias[rows].double().numpy()
        layer.bias[rows] = torch.from_numpy(bias + sample.bias(bias, strength)).float()


def mismatch(got: torch.Tensor, got_base: torch.Tensor, wanted: torch.Tensor, wanted_base: torch.Tensor) -> float:
    """Relative error of the change of the output: 0 is exact, 1 is no effect at all."""
    change = wanted - wanted_base
    assert change.norm() > 1e-3 * wanted_base.norm(), "the LoRA under test does nothing to speak of"
    return float(((got - got_base) - change).norm() / change.norm())


class Pair:
    """A tiny model twice, with its outputs for one input."""

    def __init__(self, family: str, precision: str = "int4", twin: bool = False, **more):
        """``twin`` makes no difference but to :class:`Pairs`: a second pair with the same weights."""
        self.family = family
        build = world.qwen_pair if family == "qwen-image" else world.zimage_pair
        self.plain, self.quantized = build(precision, **more)
        self.inputs = world.inputs(family)
        self.state = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.plain_base, self.base = self.run(self.plain), self.run(self.quantized)

    @property
    def model(self) -> torch.nn.Module:
        """The quantized diffusion model."""
        return self.quantized.model.diffusion_model

    def run(self, patcher) -> torch.Tensor:
        """Load ``patcher`` as a sampler does and evaluate its model once."""
        return world.run(patcher, self.inputs)

    def error(self, patcher, files) -> float:
        """How far the change that ``patcher``'s LoRAs make is from the dense change of ``files``."""
        got = self.run(patcher)
        with dense(self.plain, files):
            wanted = self.run(self.plain)
        return mismatch(got, self.base, wanted, self.plain_base)

    def bare(self) -> bool:
        """Whether the quantized model is bitwise what it was, with nothing in its output either."""
        now = self.model.state_dict()
        same = [torch.equal(_bits(value), _bits(now[key])) for key, value in self.state.items() if key in now]
        return len(now) == len(self.state) == sum(same) and torch.equal(self.run(self.quantized), self.base)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor


class Pairs:
    """Makes pairs, each once, and knows which were handed out since :meth:`used` was asked."""

    def __init__(self):
        self._made: dict[tuple, Pair] = {}
        self._used: set[Pair] = set()

    def __call__(self, family: str, precision: str = "int4", **more) -> Pair:
        key = family, precision, *more.items()
        if key not in self._made:
            self._made[key] = Pair(family, precision, **more)
        self._used.add(self._made[key])
        return self._made[key]

    def used(self) -> set[Pair]:
        used, self._used = self._used, set()
        return used
