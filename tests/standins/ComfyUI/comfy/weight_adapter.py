"""Stand-in for ComfyUI's adapters: what load_lora makes of a file, by kind."""

import torch


class WeightAdapterBase:
    name = "base"

    def __init__(self, weights):
        self.weights = weights

    def delta(self):
        """[out, in] float64, without the strength."""
        raise NotImplementedError


def _scale(alpha, rank):
    return 1.0 if alpha is None else alpha / rank


class LoRAAdapter(WeightAdapterBase):
    name = "lora"
    spellings = (("lora_up.weight", "lora_down.weight"), ("lora_B.weight", "lora_A.weight"))

    @classmethod
    def read(cls, stem, lora, alpha):
        for up, down in cls.spellings:
            if f"{stem}.{up}" in lora:
                return cls((lora[f"{stem}.{up}"], lora[f"{stem}.{down}"], alpha, None, None, None))

    def delta(self):
        up, down, alpha = self.weights[:3]
        return _scale(alpha, down.shape[0]) * (up.double().flatten(1) @ down.double().flatten(1))


class LoKrAdapter(WeightAdapterBase):
    name = "lokr"

    @classmethod
    def read(cls, stem, lora, alpha):
        names = "w1", "w2", "w1_a", "w1_b", "w2_a", "w2_b"
        w1, w2, w1a, w1b, w2a, w2b = (lora.get(f"{stem}.lokr_{name}") for name in names)
        if w1 is not None or w1a is not None:
            return cls((w1, w2, alpha, w1a, w1b, w2a, w2b, None, None))

    def delta(self):
        w1, w2, alpha, w1a, w1b, w2a, w2b = self.weights[:7]
        rank = next((factor.shape[0] for factor in (w2b, w1b) if factor is not None), None)
        left = w1.double() if w1 is not None else w1a.double() @ w1b.double()
        right = w2.double() if w2 is not None else w2a.double() @ w2b.double()
        return (1.0 if rank is None else _scale(alpha, rank)) * torch.kron(left, right)


class LoHaAdapter(WeightAdapterBase):
    name = "loha"

    @classmethod
    def read(cls, stem, lora, alpha):
        found = [lora.get(f"{stem}.hada_{name}") for name in ("w1_a", "w1_b", "w2_a", "w2_b")]
        if found[0] is not None:
            return cls((found[0], found[1], alpha, found[2], found[3], None, None, None))

    def delta(self):
        w1a, w1b, alpha, w2a, w2b = (value if isinstance(value, (float, type(None))) else value.double()
                                     for value in self.weights[:5])
        return _scale(alpha, w1b.shape[0]) * ((w1a @ w1b) * (w2a @ w2b))


adapters = [LoRAAdapter, LoKrAdapter, LoHaAdapter]
