"""Latents of ComfyUI for the diffusers-class Z-Image transformer, and back."""

import pytest
import torch

from qpatch.lora import shapes

TEXTS = torch.zeros(3, 7, 12)


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def negate(batch):
    return batch.restore([-image for image in batch.images])


def test_a_batch_of_images_becomes_one_frame_each_and_comes_back():
    latent = numbered(3, 16, 4, 6)
    batch = shapes.to_batch(latent, TEXTS)
    assert [tuple(image.shape) for image in batch.images] == [(16, 1, 4, 6)] * 3
    assert torch.equal(batch.images[1][:, 0], latent[1])
    assert torch.equal(negate(batch), -latent)


def test_frames_of_a_five_dimensional_latent_are_kept():
    latent = numbered(3, 16, 2, 4, 6)
    batch = shapes.to_batch(latent, TEXTS)
    assert tuple(batch.images[0].shape) == (16, 2, 4, 6)
    assert torch.equal(negate(batch), -latent)


def test_a_single_frame_of_a_five_dimensional_latent_stays_five_dimensional():
    latent = numbered(3, 16, 1, 4, 6)
    assert torch.equal(negate(shapes.to_batch(latent, TEXTS)), -latent)


def test_a_batch_of_one_and_one_channel_keep_their_dimensions():
    for shape in ((1, 16, 4, 6), (1, 16, 1, 4, 6), (3, 1, 4, 6), (1, 1, 2, 4, 6)):
        latent = numbered(*shape)
        assert torch.equal(negate(shapes.to_batch(latent, TEXTS[: shape[0]])), -latent)


def test_absent_places_of_a_list_stay_absent():
    places = [numbered(16, 4, 6), None, numbered(1, 16, 8, 8), torch.empty(0), numbered(16, 2, 4, 4)]
    back = negate(shapes.to_batch(places, TEXTS))
    assert [None if place is None else tuple(place.shape) for place in back] == [
        (16, 4, 6), None, (1, 16, 8, 8), None, (16, 2, 4, 4)]
    assert torch.equal(back[2], -places[2])


def test_texts_may_be_a_list_with_a_one_in_front():
    batch = shapes.to_batch(numbered(2, 16, 4, 6), [torch.zeros(5, 12), torch.zeros(1, 9, 12)])
    assert [tuple(text.shape) for text in batch.texts] == [(5, 12), (9, 12)]


@pytest.mark.parametrize("latent", [[], [None, None], torch.empty(0, 16, 4, 6)])
def test_a_batch_without_an_image_is_refused(latent):
    with pytest.raises(ValueError, match="no image in the batch"):
        shapes.to_batch(latent, [])


def test_texts_that_do_not_match_the_images_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="2 images but 3 text features"):
        shapes.to_batch(numbered(2, 16, 4, 6), TEXTS)


def test_other_layouts_are_refused_with_their_shape():
    with pytest.raises(ValueError, match=r"\[16, 4, 6\]"):
        shapes.to_batch(numbered(16, 4, 6), TEXTS)
    with pytest.raises(ValueError, match=r"\[4, 6\]"):
        shapes.to_batch([numbered(4, 6)], TEXTS[:1])
    with pytest.raises(ValueError, match=r"\[12\]"):
        shapes.to_batch(numbered(1, 16, 4, 6), [torch.zeros(12)])


def test_an_answer_with_another_number_of_images_is_refused():
    batch = shapes.to_batch(numbered(3, 16, 4, 6), TEXTS)
    with pytest.raises(ValueError, match="2 images for 3"):
        batch.restore(batch.images[:2])
