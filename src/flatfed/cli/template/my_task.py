"""A task of your own, which runs as it is:

flatfed run my_task.py:make
flatfed compare fedavg fedsam:radius=0.05 --config my_task.py:make
flatfed tune my_task.py:make --grid training.lr=0.03,0.1,0.3 --set data.validation=0.1
"""

import torch
from torch import nn

import flatfed as ff

# What a config file would say about the algorithm, training and execution; --set changes it for one run.
settings = {
    "algorithm": {"name": "fedavg"},
    "training": {"rounds": 30, "participation": 0.25, "local_epochs": 2, "batch_size": 16, "lr": 0.1},
}


class Model(nn.Module):
    """Any torch module."""

    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def load_clients(
    clients: int,
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]:
    """Every client's inputs and targets, and those to test on. Replace this with your own data."""
    draw = torch.Generator().manual_seed(0)
    truth = torch.randn(8, 3, generator=draw)

    def samples(count: int, centre: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = centre + torch.randn(count, 8, generator=draw)
        return inputs, (inputs @ truth).argmax(1)

    # Each client sees another region, as organisations do.
    own = [samples(60, 1.5 * torch.randn(8, generator=draw)) for _ in range(clients)]
    return own, samples(1000, torch.zeros(8))


def make(clients: int = 20, width: int = 32) -> ff.Task:
    """The task. Its parameters are options: --set task.width=64."""
    own, test = load_clients(clients)
    return ff.Task(Model(8, width, 3), ff.Federation.from_tensors(own, test))
