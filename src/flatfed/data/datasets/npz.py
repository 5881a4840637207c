"""A data set of one's own in a numpy archive.

The .npz file holds `train_inputs`, `train_targets`, `test_inputs`, `test_targets` and, if clients are given
by the data, `train_groups` (and `test_groups`): one whole number or text per sample. uint8 inputs are images
[n, C, H, W] or [n, H, W]; they are normalised by the mean and deviation of the training images unless `mean`
and `std` are given. Floats are used as float32 and other whole numbers as int64, as they are.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.arrays import from_arrays
from flatfed.data.datasets.base import Array, Labelled, TrainTest
from flatfed.data.datasets.catalog import DatasetInfo, Folder, brief, register
from flatfed.data.transform import Augmentation

ARRAYS = ("train_inputs", "train_targets", "test_inputs", "test_targets")


@register(DatasetInfo("npz", f"a numpy archive with {', '.join(ARRAYS)}", origin="your own arrays: file = …"))
def load_npz(
    file: Path | str = "data.npz",
    folder: Folder = None,
    classes: int | None = None,
    augmentation: Augmentation = "none",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> TrainTest:
    """Load `file`, which is relative to `folder` or else to the current one."""
    path = Path(folder or ".").expanduser() / Path(file).expanduser()
    arrays = _read(path)
    for name in ARRAYS:
        if name not in arrays:
            raise FlatfedError(f"{path}: no array {name}; save {', '.join(ARRAYS)}")
    train, test = (
        Labelled(arrays[f"{part}_inputs"], arrays[f"{part}_targets"], arrays.get(f"{part}_groups"))
        for part in ("train", "test")
    )
    return from_arrays(path.stem, str(path), train, test, classes, augmentation, mean, std)


def _read(path: Path) -> dict[str, Array]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise FlatfedError(f"{path}: one array, not an archive; save it with numpy.savez")
        with loaded as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise FlatfedError(f"{path}: not found; save it with numpy.savez or give another file") from None
    except FlatfedError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise FlatfedError(f"{path}: not a readable .npz archive ({brief(error)}); save it again") from None
