"""A table with numbers and categories: several inputs, a metric that is not a mean over rows.

    python examples/tabular.py --rounds 30

Every hospital has patients with three measurements and two categories. The inputs are a dictionary, so the
model is called as model(numbers=…, categories=…). The share of positive cases differs between hospitals, so
F1 over all test rows says more than the accuracy.
"""

import argparse

import torch
from torch import Tensor, nn

import flatfed as ff

CATEGORIES = (4, 6)
"""How many values each category has."""


class Table(nn.Module):
    """Numbers and embedded categories, through a small perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, 3) for size in CATEGORIES)
        self.body = nn.Sequential(nn.Linear(3 + 3 * len(CATEGORIES), 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        embedded = [embed(categories[:, place]) for place, embed in enumerate(self.embeddings)]
        return self.body(torch.cat([numbers, *embedded], 1))


def patients(count: int, seed: int, shift: float = 0.0) -> tuple[dict[str, Tensor], Tensor]:
    """Made up: (inputs, targets) of some patients."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, 3, generator=generator)
    columns = [torch.randint(0, size, (count,), generator=generator) for size in CATEGORIES]
    risk = numbers @ torch.tensor([1.0, -1.0, 0.5]) + (columns[0] == 1) - (columns[1] > 3).float() + shift
    return {"numbers": numbers, "categories": torch.stack(columns, 1)}, (risk > 0.5).long()


@ff.whole
def f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of all test rows together, which no mean over batches would give."""
    chosen, positive = outputs.argmax(1) == 1, targets == 1
    return 2 * (chosen & positive).sum() / (chosen.sum() + positive.sum())


def main(rounds: int) -> ff.Run:
    torch.manual_seed(0)
    clients = [patients(60, seed=1 + hospital, shift=0.3 * (hospital % 3 - 1)) for hospital in range(10)]
    task = ff.Task(
        Table(),
        ff.Federation.from_tensors(clients, test=patients(500, seed=0)),
        metrics={"accuracy": ff.accuracy, "f1": f1},
    )
    training = ff.Training(rounds=rounds, participation=0.5, local_epochs=2, batch_size=20, lr=0.2)
    return ff.train(task, ff.scaffold(), training)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on a table with numbers and categories.")
    parser.add_argument("--rounds", type=int, default=30)
    last = main(parser.parse_args().rounds).history[-1]
    print(f"accuracy {last['test_accuracy']:.3f}, F1 {last['test_f1']:.3f}")
