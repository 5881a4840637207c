"""A time series forecast from a folder of parquet files, one for each household, and its best model.

    python examples/forecast.py --rounds 30

Every file has a row per hour: the consumption of the 24 hours before, weekday, tariff (a text) and
that of the hour, which is to be predicted. A tenth of every household's rows are its own test data.
The folder is made up and written first; give --folder for one of your own.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import torch
import torch.nn.functional as F
from pyarrow import parquet
from torch import Tensor, nn

import flatfed as ff

TARIFFS = ("day", "flat", "night")


class Forecast(nn.Module):
    """The last day, with embedded weekday and tariff, through a small perceptron."""

    def __init__(self, tariffs: int) -> None:
        super().__init__()
        self.weekdays, self.tariffs = nn.Embedding(7, 4), nn.Embedding(tariffs, 4)
        self.body = nn.Sequential(nn.Linear(24 + 4 + 4, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, last_day: Tensor, weekday: Tensor, tariff: Tensor) -> Tensor:
        return self.body(torch.cat([last_day, self.weekdays(weekday), self.tariffs(tariff)], 1))[:, 0]


@ff.whole
def explained(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of the variance that the forecast explains, over all test rows."""
    return 1 - F.mse_loss(outputs, targets) / targets.var(correction=0)


def write_household(path: Path, number: int) -> None:
    """Made up: some weeks of a household that has its own hours."""
    draw = np.random.default_rng(number)
    tariff = TARIFFS[number % len(TARIFFS)]
    hours = np.arange(24 * 21)
    peak = {"day": 12, "flat": 18, "night": 2}[tariff] + draw.normal()
    weekend = np.where(hours // 24 % 7 > 4, 0.5, 0.0)
    load = 1 + np.cos(2 * np.pi * (hours - peak) / 24) + weekend + 0.1 * draw.normal(size=len(hours))
    windows = np.lib.stride_tricks.sliding_window_view(load, 25)
    table = {
        "last_day": pyarrow.array(windows[:, :24].tolist()),
        "weekday": hours[24:] // 24 % 7,
        "tariff": [tariff] * len(windows),
        "load": windows[:, 24],
    }
    parquet.write_table(pyarrow.table(table), path)


def main(rounds: int, folder: Path) -> ff.Run:
    torch.manual_seed(0)
    federation = ff.Federation.from_folder(
        folder,
        inputs={"last_day": "last_day", "weekday": "weekday", "tariff": "tariff"},
        targets="load",
        test=0.1,
    ).with_validation(0.1)
    task = ff.Task(
        Forecast(len(federation.categories["tariff"])),
        federation,
        loss=F.mse_loss,
        metrics={"explained": explained},
    )
    training = ff.Training(
        rounds=rounds,
        participation=0.5,
        local_epochs=1,
        batch_size=32,
        lr=0.05,
        patience=10,
        best_by="explained",
    )
    return ff.train(task, ff.fedavg(), training)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Forecast from a folder of parquet files.")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="One of your own with such files.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made_up:
        if given.folder is None:
            for household in range(12):
                write_household(Path(made_up) / f"household-{household}.parquet", household)
        best = main(given.rounds, given.folder or Path(made_up)).best
    print(f"best round {best.round}: explained variance {best.record['test_explained']:.3f}")
