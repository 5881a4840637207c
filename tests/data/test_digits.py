"""The embedded digits: shapes, scale, and a split that is fixed, stratified and complete."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from flatfed.data.datasets import load_digits_tensors


@pytest.fixture(scope="module")
def digits():
    return load_digits_tensors()


def test_shapes_types_and_scale(digits):
    assert digits.name == "digits" and digits.classes == 10
    for inputs, targets in (
        (digits.train_inputs, digits.train_targets),
        (digits.test_inputs, digits.test_targets),
    ):
        assert inputs.shape == (len(targets), 1, 8, 8)
        assert inputs.dtype == torch.float32 and targets.dtype == torch.int64
        assert inputs.min() == 0.0 and inputs.max() == 1.0
        assert torch.equal(torch.unique(targets), torch.arange(10))


def test_train_and_test_together_are_the_original(digits):
    original = load_digits()
    pairs = np.hstack([original.data / 16, original.target[:, None]])
    inputs = torch.cat([digits.train_inputs, digits.test_inputs]).flatten(1).numpy()
    targets = torch.cat([digits.train_targets, digits.test_targets]).numpy()
    loaded = np.hstack([inputs, targets[:, None]])
    np.testing.assert_array_equal(loaded[np.lexsort(loaded.T)], pairs[np.lexsort(pairs.T)])


def test_a_fifth_of_every_class_is_test(digits):
    train, test = torch.bincount(digits.train_targets), torch.bincount(digits.test_targets)
    assert torch.equal(test, (train + test) // 5)
    assert len(digits.test_targets) / 1797 == pytest.approx(0.2, abs=0.005)


def test_no_image_is_in_both(digits):
    train = {image.numpy().tobytes() for image in digits.train_inputs}
    test = {image.numpy().tobytes() for image in digits.test_inputs}
    assert len(train) + len(test) == 1797 and not train & test


def test_the_split_does_not_depend_on_seeds(digits):
    torch.manual_seed(123)
    np.random.seed(123)
    again = load_digits_tensors()
    assert torch.equal(again.train_inputs, digits.train_inputs)
    assert torch.equal(again.test_targets, digits.test_targets)


def test_the_data_set_is_frozen(digits):
    with pytest.raises(dataclasses.FrozenInstanceError):
        digits.classes = 11


def test_the_split_supports_learning(digits):
    """Nearest class mean reaches 90 % on these digits; mismatched targets would bring it to 10 %."""
    inputs = digits.train_inputs.flatten(1)
    means = torch.stack([inputs[digits.train_targets == label].mean(0) for label in range(10)])
    predicted = torch.cdist(digits.test_inputs.flatten(1), means).argmin(1)
    assert (predicted == digits.test_targets).float().mean() > 0.85
