"""The handwritten digits that ship inside scikit-learn: 1797 grey images of 8x8 pixels, 10 classes.

No download, no network: the data set for tests, examples and first experiments.

The split is part of the data set, not of a run: within each class, in stored order, every
`TEST_STRIDE`-th image is a test image. It uses no random numbers, so it is the same for every seed,
platform and library version, and stratified. The data do not say who wrote what, so a writer may be
on both sides: the test set measures new images, not new writers.
"""

import numpy as np

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import Labelled, TrainTest, train_test
from flatfed.data.datasets.catalog import DatasetInfo, Folder, register

TEST_STRIDE = 5
BRIGHTEST = 16.0  # pixels count the dark cells of a 4x4 block
TITLE = "grey handwritten digits 8×8, 10 classes, 1,442 + 355"


@register(DatasetInfo("digits", TITLE, origin="inside scikit-learn"))
def load_digits_tensors(folder: Folder = None) -> TrainTest:
    """Load the digits as float32 in [0, 1], [samples, 1, 8, 8]; there are no files, so no `folder`."""
    if folder is not None:
        raise FlatfedError(f"folder = {str(folder)!r}: the digits have no files; leave it out")
    # Importing scikit-learn takes about a second, which only the users of this data set should pay.
    from sklearn.datasets import load_digits  # noqa: PLC0415

    bunch = load_digits()
    inputs = (bunch.images[:, None] / BRIGHTEST).astype(np.float32)
    is_test = np.zeros(len(inputs), bool)
    for label in range(10):
        is_test[np.flatnonzero(bunch.target == label)[TEST_STRIDE - 1 :: TEST_STRIDE]] = True
    train, test = (Labelled(inputs[part], bunch.target[part]) for part in (~is_test, is_test))
    return train_test("digits", train, test, classes=10)
