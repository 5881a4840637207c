"""Options of models that no model can have are refused by name."""

import inspect
import math
from typing import Any

import numpy as np
import pytest

import flatfed as ff
from flatfed.models import MODELS

SHAPES = {"char_lstm": (8,), "mlp": (8,), "logistic_regression": (8,)}
NUMBERS = {
    (name, option)
    for name, make in MODELS.items()
    for option in inspect.signature(make).parameters
    if option in {"width", "depth", "layers", "embedding", "vocabulary", "hidden"}
}
WRONG: list[Any] = [0, -1, 1.5, math.nan, 10**30, 2**62, 10**12, True, "x", [0], [-1], [1.5], {}, b"1", [[1]]]


def test_all_numbers_are_tried():
    assert len(NUMBERS) >= 9


@pytest.mark.parametrize(("name", "option"), sorted(NUMBERS))
def test_sizes_that_no_layer_can_have_are_refused(name, option):
    for value in WRONG:
        with pytest.raises(ff.FlatfedError) as refused:
            MODELS[name](SHAPES.get(name, (3, 32, 32)), 3, **{option: value})
        message = str(refused.value)
        assert "\n" not in message and len(message) < 400
        assert message.startswith((option, "the model cannot be built: ", "input_shape = ")), message
    if (name, option) != ("mlp", "hidden"):
        assert MODELS[name](SHAPES.get(name, (3, 32, 32)), 3, **{option: np.int64(2)}) is not None


def test_classes_and_shapes_that_make_no_model_are_refused():
    for shape, classes in (
        ((8,), -1),
        ((8,), 1.5),
        ((8,), "x"),
        ((-1,), 3),
        ((1.5,), 3),
        ("x", 3),
        (None, 3),
    ):
        with pytest.raises(ff.FlatfedError):
            MODELS["mlp"](shape, classes)
