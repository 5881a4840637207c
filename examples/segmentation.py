"""A segmentation network: a class for every pixel, some of which nobody has labelled.

    python examples/segmentation.py --rounds 20

Outputs are [B, classes, H, W] and targets [B, H, W], as torch.nn.CrossEntropyLoss has them. Pixels with the
label 255 are left out of the loss and of the accuracy, which is that of pixels.
"""

import argparse

import torch
from torch import Tensor, nn

import flatfed as ff

UNLABELLED, SIDE = 255, 16


class Segmenter(nn.Module):
    """Down, up, and a classifier of pixels."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 8, 2, stride=2), nn.ReLU())
        self.head = nn.Conv2d(9, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.cat([images, self.up(self.down(images))], 1))


def scans(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Made up: a bright square and a dark one on a noisy ground; the border is not labelled."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.5 * torch.randn(count, 1, SIDE, SIDE, generator=generator)
    labels = torch.zeros(count, SIDE, SIDE, dtype=torch.int64)
    for number in range(count):
        for label, brightness in ((1, 2.0), (2, -2.0)):
            top, left = torch.randint(1, SIDE - 5, (2,), generator=generator).tolist()
            square = slice(top, top + 4), slice(left, left + 4)
            images[number, 0][square] += brightness
            labels[number][square] = label
    for side in (0, -1):
        labels[:, side], labels[:, :, side] = UNLABELLED, UNLABELLED
    return images, labels


def main(rounds: int) -> ff.Run:
    torch.manual_seed(0)
    clients = [scans(24, seed=1 + clinic) for clinic in range(6)]
    task = ff.Task(
        Segmenter(),
        ff.Federation.from_tensors(clients, test=scans(60, seed=0)),
        loss=nn.CrossEntropyLoss(ignore_index=UNLABELLED),
    )
    training = ff.Training(rounds=rounds, participation=0.5, local_epochs=2, batch_size=8, lr=0.2)
    return ff.train(task, ff.fedavg(), training)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a segmentation network.")
    parser.add_argument("--rounds", type=int, default=20)
    print(f"accuracy of pixels {main(parser.parse_args().rounds).history[-1]['test_accuracy']:.3f}")
