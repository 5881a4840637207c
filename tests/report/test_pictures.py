"""The picture of synthetic samples is drawn after the rounds in which the server has learnt some."""

from __future__ import annotations

import pytest
import torch

import flatfed as ff
from flatfed.core.state import Dimensions
from flatfed.report.pictures import ENLARGED, GAP, SyntheticPicture


def progress(shape: tuple[int, ...], *, matched: bool) -> ff.Progress:
    size = int(torch.tensor(shape).prod())
    server = {
        "synthetic_inputs": torch.linspace(0, 1, 4 * size),
        "synthetic_labels": torch.tensor([0, 1, 0, 1]),
    }
    record = {"round": 3, **({"matching_loss": 0.5} if matched else {})}
    return ff.Progress(3, server, {}, record, [0], Dimensions(1, shape, 2))


def test_a_round_with_a_matching_loss_is_drawn(tmp_path):
    image = pytest.importorskip("PIL.Image")
    SyntheticPicture(tmp_path / "run")(progress((3, 5), matched=True))
    picture = image.open(tmp_path / "run" / "synthetic.png")
    # Two classes down, two samples of each across.
    assert picture.size == (2 * (5 * ENLARGED + 2 * GAP), 2 * (3 * ENLARGED + 2 * GAP))


@pytest.mark.parametrize(("shape", "matched"), [((3, 5), False), ((5,), True)])
def test_rounds_without_matching_and_samples_that_are_no_images_are_not_drawn(tmp_path, shape, matched):
    SyntheticPicture(tmp_path)(progress(shape, matched=matched))
    assert not list(tmp_path.iterdir())


def test_without_pillow_nothing_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("flatfed.report.pictures.find_spec", lambda name: None)
    SyntheticPicture(tmp_path)(progress((3, 5), matched=True))
    assert not list(tmp_path.iterdir())
