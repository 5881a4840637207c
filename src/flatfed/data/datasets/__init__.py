"""Data sets, one per file, each loaded as a `TrainTest`.

Every loader takes keyword options; `folder` is where data sets live.
"""

from __future__ import annotations

from collections.abc import Callable

from flatfed.data.datasets import (
    cifar10,
    cifar100,
    cinic10,
    emnist,
    fashion_mnist,
    femnist,
    mnist,
    shakespeare,
    tiny_imagenet,
)
from flatfed.data.datasets.base import Place, TrainTest, data_folder
from flatfed.data.datasets.digits import load_digits_tensors
from flatfed.data.datasets.huggingface import from_huggingface
from flatfed.data.datasets.image_folder import load_image_folder
from flatfed.data.datasets.npz import load_npz

DATASETS: dict[str, Callable[..., TrainTest]] = {
    "cifar10": cifar10.load_cifar10,
    "cifar100": cifar100.load_cifar100,
    "cinic10": cinic10.load_cinic10,
    "digits": load_digits_tensors,
    "emnist": emnist.load_emnist,
    "emnist_l": emnist.load_emnist_l,
    "fashion_mnist": fashion_mnist.load_fashion_mnist,
    "femnist": femnist.load_femnist,
    "image_folder": load_image_folder,
    "mnist": mnist.load_mnist,
    "npz": load_npz,
    "shakespeare": shakespeare.load_shakespeare,
    "tiny_imagenet": tiny_imagenet.load_tiny_imagenet,
}

# The data sets that live in files of their own below the data folder.
PLACES: dict[str, Place] = {
    place.name: place
    for place in (
        cifar10.PLACE,
        cifar100.PLACE,
        cinic10.PLACE,
        emnist.PLACE,
        emnist.PLACE_L,
        fashion_mnist.PLACE,
        femnist.PLACE,
        mnist.PLACE,
        shakespeare.PLACE,
        tiny_imagenet.PLACE,
    )
}

__all__ = ["DATASETS", "PLACES", "TrainTest", "data_folder", "from_huggingface", "load_digits_tensors"]
