"""Augmentation of synthetic images: every kind does what it says, and gradients come through."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flatfed.parts import augment
from flatfed.parts.augment import augmented

Kind = Callable[[Tensor, augment.Draw], Tensor]
KINDS: dict[str, Kind] = {kind.__name__.lstrip("_"): kind for kind in augment._KINDS}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawing(*values: float | list[float] | Tensor) -> augment.Draw:
    """Gives the values, one for each draw, in place of random ones; a list has one entry for each image."""
    left = list(values)

    def draw(*shape: int) -> Tensor:
        value = torch.as_tensor(left.pop(0), dtype=torch.float64)
        wanted = shape if value.dim() == 0 else (len(value), *shape)
        return value.expand(1, *shape) if value.dim() == 0 else value.reshape(wanted)

    return draw


def blob(side: int, variance: float) -> Tensor:
    """A bell in the middle, so narrow that nothing of it reaches the edge."""
    place = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    return torch.exp(-(place[:, None] ** 2 + place**2) / (2 * variance))[None, None]


def centre(images: Tensor) -> Tensor:
    """Of mass, [n, 2] as row and column."""
    mass = images.sum((1, 2, 3))
    rows, columns = torch.arange(images.shape[2]), torch.arange(images.shape[3])
    return torch.stack(
        [(images.sum((1, 3)) * rows).sum(1) / mass, (images.sum((1, 2)) * columns).sum(1) / mass], 1
    )


def spread(images: Tensor) -> tuple[float, float]:
    """The variances of one blob's mass along rows and columns."""
    mass, middle = images.sum(), centre(images)[0]
    rows, columns = torch.arange(images.shape[2]), torch.arange(images.shape[3])
    down = (images.sum((0, 1, 3)) * (rows - middle[0]) ** 2).sum() / mass
    across = (images.sum((0, 1, 2)) * (columns - middle[1]) ** 2).sum() / mass
    return float(down), float(across)


def test_flip_mirrors_exactly_those_that_draw_below_a_half() -> None:
    images = noise(4, 3, 5, 7)
    found = augment._flip(images, drawing([0.0, 0.499, 0.5, 0.99]))
    expected = torch.stack([images[0].flip(2), images[1].flip(2), images[2], images[3]])
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (8, 24), (32, 32)])
def test_crop_shifts_whole_pixels_and_fills_with_zeros(height: int, width: int) -> None:
    down, across = round(height / 8), round(width / 8)
    wanted = [(y, x) for y in range(-down, down + 1) for x in range(-across, across + 1)]
    images = noise(len(wanted), 2, height, width)
    # The middle of each equally wide piece of [0, 1) stands for one shift; columns are drawn first.
    chosen = torch.tensor(
        [[(x + across + 0.5) / (2 * across + 1), (y + down + 0.5) / (2 * down + 1)] for y, x in wanted],
        dtype=torch.float64,
    )
    found = augment._crop(images, lambda *shape: chosen)
    framed = torch.zeros(len(wanted), 2, height + 2 * down, width + 2 * across, dtype=torch.float64)
    framed[:, :, down : down + height, across : across + width] = images
    for number, (y, x) in enumerate(wanted):
        expected = framed[number, :, down + y : down + y + height, across + x : across + x + width]
        torch.testing.assert_close(found[number], expected, rtol=0, atol=1e-12)
    assert float((found - images).abs().max()) > 0.1


def test_crop_never_goes_further_than_an_eighth() -> None:
    largest = 1 - 2.0**-24  # of torch's uniform floats
    image = torch.zeros(1, 1, 16, 16, dtype=torch.float64)
    image[0, 0, 8, 8] = 1
    for value, place in ((0.0, 10), (largest, 6)):
        found = augment._crop(image, drawing([[value, value]]))
        assert [round(entry, 9) for entry in centre(found)[0].tolist()] == [place, place]


@pytest.mark.parametrize(("height", "width"), [(8, 8), (28, 28), (32, 32), (10, 6)])
def test_cutout_has_half_the_side(height: int, width: int) -> None:
    image = torch.ones(1, 2, height, width, dtype=torch.float64)
    inside = augment._cutout(image, drawing(0.5, 0.5))
    holes = (inside == 0).nonzero()
    assert set(inside.unique().tolist()) == {0.0, 1.0}
    top, left = (int(holes[:, axis].min()) for axis in (2, 3))
    assert (inside == 0).sum() == 2 * (height // 2) * (width // 2)
    assert bool((inside[:, :, top : top + height // 2, left : left + width // 2] == 0).all())
    # Around the corner only a part of it is in the picture.
    corner = augment._cutout(image, drawing(0.0, 0.0))
    part = (height // 2 - height // 4) * (width // 2 - width // 4)
    assert (corner == 0).sum() == 2 * part
    assert bool((corner[:, :, 0, 0] == 0).all())


def test_cutout_falls_anywhere() -> None:
    images = torch.ones(400, 1, 8, 8)
    generator = torch.Generator().manual_seed(1)
    holes = augment._cutout(images, lambda *shape: torch.rand(400, *shape, generator=generator)) == 0
    assert int(holes.flatten(1).sum(1).max()) == 16
    assert float(holes.float().mean(0).min()) > 0.05


def test_scale_keeps_the_centre_and_stretches_by_the_factors() -> None:
    image = blob(48, variance=9.0)
    before = spread(image)
    # 0 samples at 1/1.2 of the distance, so the picture grows; just below 1 it shrinks.
    for draws, growth in (
        ([0.0, 0.0], (1.2, 1.2)),
        ([1.0, 0.0], (1.2, 1 / 1.2)),
        ([1.0, 1.0], (1 / 1.2,) * 2),
    ):
        found = augment._scale(image, drawing([draws]))
        assert float((centre(found) - centre(image)).abs().max()) < 1e-9
        after = spread(found)
        # Interpolating between pixels adds up to a sixth of a squared pixel.
        assert after[0] / before[0] == pytest.approx(growth[0] ** 2, rel=1 / 6 / 9)
        assert after[1] / before[1] == pytest.approx(growth[1] ** 2, rel=1 / 6 / 9)


def test_rotation_turns_about_the_centre_by_at_most_fifteen_degrees() -> None:
    round_one = blob(17, variance=2.0)
    long_one = torch.zeros(1, 1, 33, 33, dtype=torch.float64)
    long_one[0, 0, 16, 4:29] = 1
    for value, degrees in ((0.0, -15.0), (0.5, 0.0), (1.0, 15.0), (0.75, 7.5)):
        turned = augment._rotate(round_one, drawing([value]))
        assert float((centre(turned) - centre(round_one)).abs().max()) < 1e-9
        torch.testing.assert_close(turned, round_one, rtol=0, atol=0.05)
        line = augment._rotate(long_one, drawing([value]))[0, 0]
        # The main axis of the line's mass; rows grow downwards.
        rows, columns = torch.arange(33.0) - 16, torch.arange(33.0) - 16
        both = (line * rows[:, None] * columns).sum()
        along = (line * columns.square()).sum() - (line * rows[:, None].square()).sum()
        angle = math.degrees(0.5 * math.atan2(2 * float(both), float(along)))
        assert angle == pytest.approx(-degrees, abs=0.3)
    unturned = augment._rotate(long_one, drawing([0.5]))
    torch.testing.assert_close(unturned, long_one, rtol=0, atol=1e-12)


def test_colour_is_brightness_then_saturation_then_contrast() -> None:
    images = noise(2, 3, 4, 4)
    brightness, saturation, contrast = [0.1, 0.9], [0.3, 0.8], [0.2, 0.7]
    found = augment._colour(images, drawing(brightness, saturation, contrast))
    for number in range(2):
        expected = images[number] + (brightness[number] - 0.5)
        for row in range(4):
            for column in range(4):
                grey = expected[:, row, column].mean()
                expected[:, row, column] = grey + 2 * saturation[number] * (expected[:, row, column] - grey)
        mean = expected.mean()
        expected = mean + (contrast[number] + 0.5) * (expected - mean)
        torch.testing.assert_close(found[number], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_reach_the_images(name: str) -> None:
    images = noise(2, 2, 6, 6).requires_grad_()
    generator = torch.Generator().manual_seed(3)
    drawn: list[Tensor] = []

    def once(*shape: int) -> Tensor:
        drawn.append(torch.rand(2, *shape, generator=generator, dtype=torch.float64))
        return drawn[-1]

    KINDS[name](images, once)

    def again(inputs: Tensor) -> Tensor:
        left = list(drawn)
        return KINDS[name](inputs, lambda *shape: left.pop(0))

    assert torch.autograd.gradcheck(again, (images,))
    assert float(torch.autograd.grad(again(images).square().sum(), images)[0].abs().max()) > 0.1


def test_the_generator_decides_everything() -> None:
    images = noise(6, 3, 12, 12).float()
    found = []
    for seed in range(40):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        pair = [augmented(images, torch.Generator().manual_seed(seed)) for _ in range(2)]
        assert torch.equal(pair[0], pair[1])
        assert torch.equal(torch.get_rng_state(), before)
        assert pair[0].shape == images.shape and pair[0].dtype == images.dtype
        found.append(pair[0])
    assert len({tuple(each.flatten().tolist()) for each in found}) == 40


def test_all_kinds_are_drawn_one_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    watched = tuple(lambda images, draw, name=name: (drawn.append(name), images)[1] for name in KINDS)
    monkeypatch.setattr(augment, "_KINDS", watched)
    generator = torch.Generator().manual_seed(0)
    for _ in range(120):
        augmented(noise(3, 1, 4, 4), generator)
    assert len(drawn) == 120
    assert set(drawn) == {"colour", "crop", "cutout", "flip", "scale", "rotate"}
    assert min(drawn.count(name) for name in KINDS) >= 8


@pytest.mark.parametrize("shape", [(5, 4), (5, 6, 6), (5, 1, 3, 6, 6)])
def test_what_is_not_an_image_stays_as_it_is(shape: tuple[int, ...]) -> None:
    inputs, generator = noise(*shape), torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert augmented(inputs, generator) is inputs
    assert torch.equal(generator.get_state(), before)
