"""Where FedSynSAM's synthetic gradient acts, and whether it has to come from distilled images.

    python docs/results/fedsynsam_mix.py OUT.csv [--eta 0.1] [--compressor 4bit] [--seeds 0 1 2]
    python docs/results/fedsynsam_mix.py OUT.csv --table

Fashion-MNIST, one class for each of ten clients, the MLP and the settings of the FedSynSAM paper's Table II.
The synthetic gradient is a tenth of the ascent (as in the paper), of the descent, of both or of neither
(which is FedSAM), with images that are distilled or noise that is left as it is. Beside these, at the first
step size and compressor: the descent with grey images, which say nothing but that all labels are alike; and
FedSAM with 0.9 times the step size, or with weight decay.

Every finished run is a line of OUT.csv at once; what has a line is not run again. `--table` prints what is
there.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from flatfed.core.errors import DivergedError
from flatfed.runs.train import run_config
from flatfed.training.config import Config

ETAS = (0.1, 0.5, 0.05)
COMPRESSORS: dict[str, dict[str, Any]] = {
    "4bit": {"part": "quantize", "bits": 4},
    "topk0.1": {"part": "top_k", "ratio": 0.1},
}
CROSSED = [("none", "none"), *itertools.product(("ascent", "descent", "both"), ("distilled", "noise"))]
CONTROLS = [("descent", "grey"), ("none", "0.9 eta"), ("none", "decay")]
FIELDS = ("compressor", "eta", "mix", "images", "seed", "rounds", "last", "best", "matching_loss", "seconds")
SHARE = 0.1
PIXELS, CLASSES, PER_CLASS = (1, 28, 28), 10, 20

Key = tuple[str, ...]


def config(
    compressor: str, eta: float, mix: str, images: str, seed: int, rounds: int, folder: Path
) -> Config:
    algorithm: dict[str, Any] = {"name": "fedsam", "radius": 0.05}
    training = {
        "rounds": rounds,
        "participation": 1.0,
        "local_steps": 10,
        "batch_size": 128,
        "lr": eta * (0.9 if images == "0.9 eta" else 1),
        "weight_decay": 0.001 if images == "decay" else 0.0,
        "evaluate_every": 10,
        "seed": seed,
    }
    if mix != "none":
        algorithm |= {
            "name": "fedsynsam",
            "local_weight": 1 - SHARE if mix in {"ascent", "both"} else 1.0,
            "descent_mix": SHARE if mix in {"descent", "both"} else 0.0,
            "samples_per_class": PER_CLASS,
        }
    if images in {"noise", "grey"}:
        algorithm |= {"iterations": 1, "sample_rate": 0.0, "inner_rate_rate": 0.0}
    if images == "grey":
        path = folder / "grey.npz"
        targets = np.arange(PER_CLASS * CLASSES) % CLASSES
        np.savez(path, inputs=np.zeros((len(targets), *PIXELS), np.float32), targets=targets)
        algorithm["initial"] = str(path)
    return Config.checked(
        {
            "data": {"dataset": "fashion_mnist", "clients": 10},
            "partition": {"name": "pathological_balanced", "classes_per_client": 1},
            "model": {"name": "mlp", "hidden": [128, 128]},
            "algorithm": {**algorithm, "compress": COMPRESSORS[compressor]},
            "training": training,
            "execution": {"workers": 1},
        }
    )


def key(row: dict[str, Any]) -> Key:
    return tuple(str(row[field]) for field in FIELDS[:6])


def finished(path: Path) -> dict[Key, dict[str, str]]:
    if not path.exists():
        return {}
    with path.open(newline="") as lines:
        return {key(row): row for row in csv.DictReader(lines)}


def planned(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs in the order in which they are worth having."""
    rows = []
    for compressor, eta in itertools.product(options.compressor, options.eta):
        first = compressor == "4bit" and eta == ETAS[0]
        for seed, (mix, images) in itertools.product(options.seeds, CROSSED + CONTROLS * first):
            values = (compressor, eta, mix, images, seed, options.rounds)
            rows.append(dict(zip(FIELDS, values, strict=False)))
    return rows


def run(row: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    names = ("compressor", "eta", "mix", "images", "seed", "rounds")
    with tempfile.TemporaryDirectory() as folder:
        try:
            history = run_config(config(*(row[name] for name in names), Path(folder))).history
        except DivergedError:
            history = []
    accuracies = [line["test_accuracy"] for line in history if "test_accuracy" in line]
    matching = [line["matching_loss"] for line in history if "matching_loss" in line]
    return {
        **row,
        "last": f"{accuracies[-1]:.4f}" if accuracies else "diverged",
        "best": f"{max(accuracies):.4f}" if accuracies else "diverged",
        "matching_loss": f"{matching[-1]:.4f}" if matching and row["images"] == "distilled" else "",
        "seconds": f"{time.perf_counter() - began:.0f}",
    }


def table(path: Path) -> str:
    """One line for each variant: the last accuracies of its seeds in %, and the mean matching loss."""
    groups: dict[Key, list[dict[str, str]]] = {}
    for row in finished(path).values():
        groups.setdefault(key(row)[:4], []).append(row)
    lines = [
        "| compressor | η | mix | images | seeds | last | best | matching loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant, rows in groups.items():
        cells = [*variant, str(len(rows))]
        for name in ("last", "best"):
            values = [100 * float(row[name]) for row in rows if row[name] != "diverged"]
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.2f}{spread}" if values else "diverged")
        losses = [float(row["matching_loss"]) for row in rows if row["matching_loss"]]
        cells.append(f"{statistics.mean(losses):.2f}" if losses else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--eta", type=float, nargs="+", default=ETAS)
    parser.add_argument("--compressor", nargs="+", choices=COMPRESSORS, default=list(COMPRESSORS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        sys.stdout.write(table(options.path) + "\n")
        return
    for row in planned(options):
        if key(row) in finished(options.path):
            continue
        done = run(row)
        fresh = not options.path.exists()
        with options.path.open("a", newline="") as lines:
            writer = csv.DictWriter(lines, FIELDS)
            if fresh:
                writer.writeheader()
            writer.writerow(done)
        sys.stderr.write(" ".join(f"{name}={value}" for name, value in done.items()) + "\n")


if __name__ == "__main__":
    main()
