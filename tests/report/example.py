"""Run folders as training and diagnostics leave them, made up from formulas instead of trained."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

CLASSES = 10


def config(name: str, seed: int, rounds: int, **options: Any) -> dict[str, Any]:
    return {
        "data": {"dataset": "digits", "clients": 20, "options": {}},
        "partition": {"name": "dirichlet_client", "concentration": 0.1},
        "model": {"name": "mlp", "hidden": [64]},
        "algorithm": {"name": name, **options},
        "training": {
            "rounds": rounds,
            "participation": 0.1,
            "lr": 0.1,
            "seed": seed,
            "batch_size": 10,
        },
        "execution": {"workers": 2},
    }


def history(seed: int, rounds: int, speed: float) -> list[dict[str, Any]]:
    noise = np.random.default_rng(seed).normal(size=(rounds, 3))
    lines = []
    for place in range(rounds):
        progress = 1 - math.exp(-speed * (place + 1) / rounds)
        lines.append(
            {
                "round": place + 1,
                "train_loss": 2.3 * (1.02 - progress) * math.exp(0.05 * noise[place, 0]),
                "participants": 2,
                "lr": 0.1,
                "update_norm": 1 / (place + 1),
                "bytes_down": 1000 * (1 + seed),
                "bytes_up": 500,
                "gradient_evaluations": 20,
                "seconds": 0.01,
                "test_loss": 2.3 * (1.05 - progress) * math.exp(0.05 * noise[place, 1]),
                "test_accuracy": min(1.0, max(0.1, 0.1 + 0.85 * progress + 0.01 * noise[place, 2])),
                "client_drift": 1 + 0.1 * noise[place, 0] ** 2,
            }
        )
    return lines


def write_run(
    folder: Path,
    name: str = "fedavg",
    seed: int = 0,
    rounds: int = 12,
    finished: int | None = None,
    speed: float = 3.0,
    **options: Any,
) -> Path:
    """A run folder; complete, unless fewer rounds are `finished` than asked for."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(name, seed, rounds, **options)))
    environment = {
        "versions": {"python": "3.11.7", "flatfed": "0.1.0"},
        "commit": "0123456789ab",
        "engine": {"path": "matrix", "reason": "the model is small"},
        "command": ["/somewhere/bin/flatfed", "run", "a file.toml"],
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    done = rounds if finished is None else finished
    lines = history(seed, done, speed)
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done == rounds:
        accuracies = np.random.default_rng(seed).beta(9, 2, 20).tolist()
        clients = [
            {
                "samples": 50,
                "loss": 1.0,
                "accuracy": each,
                "test_samples": 25,
                "test_loss": 1.1,
                "test_accuracy": 0.9 * each,
            }
            for each in accuracies
        ]
        (folder / "clients.json").write_text(json.dumps({"spread": {}, "clients": clients}))
        (folder / "model.safetensors").write_bytes(b"")
    return folder


def results(width: float, seed: int) -> dict[str, dict[str, Any]]:
    """Every diagnostic of a method whose minimum has a certain width."""
    places = np.linspace(-1, 1, 21)
    bowl = (0.1 + (places[:, None] ** 2 + 0.5 * places**2) / width + 0.02 * np.sin(9 * places)).tolist()
    bowl[0][0] = None
    steps, rounds = list(range(1, 11)), list(range(5, 65, 5))
    spectrum = {
        "eigenvalues": [30 / width / (1 + rank) for rank in range(8)],
        "trace": 120 / width + seed,
        "trace_error": 1.5,
        "density": {"values": places.tolist(), "density": np.exp(-20 * places**2).tolist()},
    }
    return {
        "hessian": {
            "global": spectrum,
            "clients": [{"client": 3 * each, **spectrum, "density": None} for each in range(6)],
        },
        "surface": {"a": places.tolist(), "b": places.tolist(), "train": bowl, "test": bowl, "seed": 0},
        "line": {
            "other": "/somewhere/runs/other",
            "position": places.tolist(),
            "train_loss": (places**2 / width).tolist(),
            "test_loss": None,
            "test_accuracy": (0.9 - 0.1 * places**2).tolist(),
        },
        "plane": {
            "x": places.tolist(),
            "y": places.tolist(),
            "loss": bowl,
            "points": [
                {"label": "global", "x": 0.0, "y": 0.0, "loss": 0.1},
                {"label": "client 3", "x": 0.6, "y": 0.1, "loss": 0.6},
                {"label": "client 5", "x": -0.5, "y": 0.6, "loss": 0.7},
            ],
        },
        "sharpness": {
            "radius": 0.1,
            "global": 0.5 / width,
            "clients": [{"client": each, "sharpness": 0.6 + each} for each in range(4)],
        },
        "drift": {
            "flatness_distance": 0.4,
            "client_drift": 0.2 / width,
            "steps": steps,
            "drift_by_step": [0.02 * step / width for step in steps],
        },
        "local_stability": {
            "steps": steps,
            "discrepancy": [0.01 * step / width + 0.01 * seed for step in steps],
            "bound": [0.4 * step for step in steps],
        },
        "global_stability": {
            "rounds": rounds,
            "discrepancy": [0.1 * math.sqrt(place) / width for place in rounds],
            "replacements": [[0.1] * len(rounds)],
            "replaced": [{"client": 3, "by": 5}],
            "bound": [0.5 * place for place in rounds],
        },
        "generalization": {
            "train": {"loss": 0.1, "accuracy": 0.98},
            "test": {"loss": 0.2, "accuracy": 0.95},
            "unseen_clients": {"loss": 0.4, "accuracy": 0.9},
            "gap": {"loss": 0.1, "accuracy": 0.03, "unseen_loss": 0.3, "unseen_accuracy": 0.08},
        },
        "clients": {
            "accuracy": [0.9, 1.0],
            "mean": 0.95,
            "deviation": 0.05,
            "binomial_floor": 0.04,
            "samples": [10, 12],
        },
        "perturbation": {
            "clients": steps,
            "cosine": {
                "local": [0.2] * len(steps),
                "lesam": [0.5] * len(steps),
                "momentum": [0.7, None, *[0.8] * 8],
            },
        },
        "theory": {
            "constants": {"smoothness": 30 / width, "gradient_deviation": 0.4, "heterogeneity": None},
            "bounds": {"stability": {"x": rounds, "y": [0.5 * place for place in rounds]}},
            "statements": [
                {
                    "paper": "fedsam",
                    "name": "Lemma B.2",
                    "value": 0.5 / width,
                    "label": "as printed",
                    "conditions": [{"text": "η = 0.1 ≤ 0.02", "holds": False}],
                    "terms": {},
                    "corrected": None,
                    "remark": "a term is lost",
                    "holds": False,
                    "measured": 0.2,
                }
            ],
        },
    }


def write_diagnostics(folder: Path, width: float = 1.0, seed: int = 0) -> None:
    (folder / "diagnostics").mkdir()
    for name, result in results(width, seed).items():
        content = {"format": 1, "name": name, "round": 12, "identity": "", "options": {}, "seconds": 0.1}
        (folder / "diagnostics" / f"{name}.json").write_text(json.dumps({**content, "result": result}))


def write_comparison(root: Path) -> None:
    """Three methods under two seeds, two of them with every diagnostic."""
    for place, name in enumerate(("fedavg", "fedsam", "fedmoswa")):
        for seed in range(2):
            folder = write_run(root / f"{name}-{seed}", name, seed, speed=3.0 + place)
            if place:
                write_diagnostics(folder, float(place), seed)
