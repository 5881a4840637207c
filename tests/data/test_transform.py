"""From stored images to model inputs: crops and mirrors against loops over pixels, and who may draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flatfed.data.transform import PADDING, AsStored, ImageTransform, augmented

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def distinct_images(count, height=6, width=5):
    """Random images without black pixels, so that padding shows and no two crops look alike."""
    return torch.randint(1, 256, (count, 3, height, width), generator=torch.Generator().manual_seed(5)).to(
        torch.uint8
    )


def naive_crop(image, down, right, mirrored):
    """The window that starts `down` and `right` in the padded image, pixel by pixel."""
    channels, height, width = image.shape
    pixels, out = image.tolist(), np.zeros(image.shape, np.uint8)
    for channel in range(channels):
        for row in range(height):
            for column in range(width):
                source_row = row + down - PADDING
                source_column = (width - 1 - column if mirrored else column) + right - PADDING
                if 0 <= source_row < height and 0 <= source_column < width:
                    out[channel, row, column] = pixels[channel][source_row][source_column]
    return out


def crops(image):
    """Every crop of an image by its content: (down, right, mirrored)."""
    found = {
        naive_crop(image, down, right, mirrored).tobytes(): (down, right, mirrored)
        for down in range(2 * PADDING + 1)
        for right in range(2 * PADDING + 1)
        for mirrored in (False, True)
    }
    assert len(found) == 162
    return found


def draws_of(count, crop_half):
    image = distinct_images(1)[0]
    known = crops(image)
    batch = image.expand(count, *image.shape)
    results = augmented(batch, torch.Generator().manual_seed(0), crop_half)
    assert results.shape == batch.shape and results.dtype == torch.uint8
    return [known[result.contiguous().numpy().tobytes()] for result in results]


def test_every_crop_is_one_that_the_pixel_loop_makes_and_all_occur():
    found = draws_of(1500, crop_half=False)
    assert {down for down, _, _ in found} == set(range(9))
    assert {right for _, right, _ in found} == set(range(9))
    assert len({(down, right) for down, right, _ in found}) == 81
    # Both offsets are uniform and independent of mirroring: four standard errors around the mean.
    count = len(found)
    assert abs(sum(down for down, _, _ in found) / count - 4) < 4 * (60 / 9 / count) ** 0.5
    assert abs(sum(right for _, right, _ in found) / count - 4) < 4 * (60 / 9 / count) ** 0.5
    assert abs(sum(mirrored for _, _, mirrored in found) / count - 0.5) < 4 * 0.5 / count**0.5


def test_half_of_the_images_stay_uncropped():
    found = draws_of(1500, crop_half=True)
    centred = sum((down, right) == (PADDING, PADDING) for down, right, _ in found) / len(found)
    expected = 0.5 + 0.5 / 81
    assert abs(centred - expected) < 4 * (expected * (1 - expected) / len(found)) ** 0.5
    # Mirroring does not depend on whether the image was cropped.
    for wanted in (True, False):
        chosen = [
            mirrored for down, right, mirrored in found if ((down, right) == (PADDING, PADDING)) == wanted
        ]
        assert abs(sum(chosen) / len(chosen) - 0.5) < 4 * 0.5 / len(chosen) ** 0.5


def test_images_of_a_batch_are_drawn_separately_and_not_mixed_up():
    images = distinct_images(4)
    results = augmented(images, torch.Generator().manual_seed(1), crop_half=False)
    places = {
        crops(image)[result.contiguous().numpy().tobytes()]
        for image, result in zip(images, results, strict=True)
    }
    assert len(places) > 1


@pytest.mark.parametrize("augmentation", ["crop_flip", "half_crop_flip"])
def test_training_inputs_depend_on_the_generator_alone(augmentation):
    transform = ImageTransform(MEAN, STD, augmentation)
    images = distinct_images(20)

    def seen(seed):
        return transform.train(images, torch.Generator().manual_seed(seed))

    torch.manual_seed(1)
    first = seen(3)
    torch.manual_seed(2)
    assert torch.equal(first, seen(3))
    assert not torch.equal(first, seen(4))


def test_normalisation_is_pixel_over_255_less_the_mean_over_the_deviation():
    images = distinct_images(4)
    expected = torch.empty(images.shape, dtype=torch.float64)
    for channel in range(3):
        expected[:, channel] = (images[:, channel].double() / 255 - MEAN[channel]) / STD[channel]
    result = ImageTransform(MEAN, STD).evaluate(images)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)


def test_padding_is_black_before_normalisation():
    """A white image shows where the padding went: there the input is −mean/std."""
    transform = ImageTransform(MEAN, STD, "crop_flip")
    white = torch.full((50, 3, 8, 8), 255, dtype=torch.uint8)
    seen = transform.train(white, torch.Generator().manual_seed(0))
    black = torch.tensor([-m / s for m, s in zip(MEAN, STD, strict=True)])
    bright = torch.tensor([(1 - m) / s for m, s in zip(MEAN, STD, strict=True)])
    is_black = torch.isclose(seen, black.view(1, 3, 1, 1), atol=1e-5)
    is_bright = torch.isclose(seen, bright.view(1, 3, 1, 1), atol=1e-5)
    assert bool((is_black | is_bright).all()) and bool(is_black.any())


@pytest.mark.parametrize("augmentation", ["none", "crop_flip", "half_crop_flip"])
def test_evaluation_is_never_augmented(augmentation):
    images = distinct_images(30)
    plain = ImageTransform(MEAN, STD).evaluate(images)
    state = torch.random.get_rng_state()
    assert torch.equal(ImageTransform(MEAN, STD, augmentation).evaluate(images), plain)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_without_augmentation_training_is_evaluation_and_needs_no_generator():
    images = distinct_images(5)
    transform = ImageTransform(MEAN, STD)
    assert not transform.draws
    assert torch.equal(transform.train(images, None), transform.evaluate(images))
    assert ImageTransform(MEAN, STD, "crop_flip").draws


def test_stored_images_are_not_changed():
    images = distinct_images(5)
    kept = images.clone()
    ImageTransform(MEAN, STD, "crop_flip").train(images, torch.Generator().manual_seed(0))
    ImageTransform(MEAN, STD).evaluate(images)
    assert torch.equal(images, kept)


def test_grey_images_work_too():
    grey = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    seen = ImageTransform((0.5,), (0.5,)).evaluate(grey)
    torch.testing.assert_close(seen.flatten(), (torch.arange(64) / 255 - 0.5) / 0.5)


def test_as_stored_gives_back_the_same_tensor():
    inputs = torch.randn(3, 4)
    transform = AsStored()
    assert transform.train(inputs, None) is inputs and transform.evaluate(inputs) is inputs
    assert not transform.draws
