"""ComfyUI's latents for the diffusers-class Z-Image transformer, and its output back.

That class takes a list with one tensor [C, F, H, W] per image and a list with one text feature
[tokens, width] per image; it pairs them with ``zip``, so an image without a text, or a text without
an image, is dropped without a word. ComfyUI holds a batch in one tensor, or passes a list in which
some places are None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Latent = torch.Tensor | Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class Batch:
    """What to call the transformer with, and how its answer becomes a latent again.

    ``images``: one [C, F, H, W] per image; ``texts``: one [tokens, width] per image.
    """

    images: list[torch.Tensor]
    texts: list[torch.Tensor]
    _like: Latent

    def restore(self, output: Sequence[torch.Tensor]) -> Latent:
        """The transformer's list of [C, F, H, W] in the layout of the latent that came in.

        A tensor gives a tensor of its number of dimensions; a list gives a list with None in the
        same places. Raises ValueError when ``output`` has another number of images.
        """
        if len(output) != len(self.images):
            raise ValueError(f"the model gave {len(output)} images for {len(self.images)}")
        if isinstance(self._like, torch.Tensor):
            return torch.stack([_in_layout_of(image, self._like[0]) for image in output])
        answers = iter(output)
        return [None if _absent(place) else _in_layout_of(next(answers), place) for place in self._like]


def to_batch(latent: Latent, texts: torch.Tensor | Sequence[torch.Tensor]) -> Batch:
    """Turn a latent and its text features into what the transformer takes; nothing is copied.

    latent: [B, C, H, W], or [B, C, F, H, W] with frames, or a list of [C, H, W], [C, F, H, W],
    [1, C, H, W], [1, C, F, H, W] and None (an absent image; so is a tensor without elements).
    A tensor of four dimensions in a list counts as [1, C, H, W] when its first is 1.
    texts: [B, tokens, width], or a list of [tokens, width] or [1, tokens, width], one per image.
    Raises ValueError for a layout that is none of these, for a batch without an image, and for a
    number of texts that is not the number of images.
    """
    images = [_framed(image) for image in _split(latent)]
    if not images:
        raise ValueError("there is no image in the batch: the latent is empty or every place of the list is None")
    features = [_feature(text) for text in texts]
    if len(features) != len(images):
        raise ValueError(f"{len(images)} images but {len(features)} text features: the model takes one for each image")
    return Batch(images, features, latent)


def _absent(place: torch.Tensor | None) -> bool:
    return place is None or place.numel() == 0


def _split(latent: Latent) -> list[torch.Tensor]:
    if not isinstance(latent, torch.Tensor):
        return [place for place in latent if not _absent(place)]
    if latent.ndim not in (4, 5):
        raise ValueError(f"a latent has the shape [B, C, H, W] or [B, C, F, H, W], not {list(latent.shape)}")
    return list(latent.unbind(0)) if latent.numel() else []


def _framed(image: torch.Tensor) -> torch.Tensor:
    """One image as [C, F, H, W]."""
    shape = list(image.shape)
    if image.ndim in (4, 5) and shape[0] == 1:
        image = image[0]
    if image.ndim == 3:
        image = image.unsqueeze(1)
    if image.ndim != 4:
        raise ValueError("an image of a list has the shape [C, H, W] or [C, F, H, W], with or without a 1 in front, "
                         f"not {shape}")
    return image


def _in_layout_of(image: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[C, F, H, W] back in the dimensions of ``like``."""
    leading = like.ndim in (4, 5) and like.shape[0] == 1
    if like.ndim - leading == 3:
        image = image.squeeze(1)
    return image.unsqueeze(0) if leading else image


def _feature(text: torch.Tensor) -> torch.Tensor:
    plain = text[0] if text.ndim == 3 and text.shape[0] == 1 else text
    if plain.ndim != 2:
        raise ValueError(f"a text feature has the shape [tokens, width], not {list(text.shape)}")
    return plain
