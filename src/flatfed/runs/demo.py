"""The demonstration: handwritten digits, 100 very different clients, ten at a time.

Step sizes and radii are the best of a grid on seeds 100 and 101, which the demonstration does not use:
lr in {0.03, 0.1, 0.2, 0.3, 0.5, 1}, radius in {0.05, 0.1, 0.2}, judged by the mean accuracy of the last
ten rounds. All other options are the papers' defaults.
"""

from __future__ import annotations

from typing import Any

from flatfed.runs.compare import Contestant

DEMO_BASE: dict[str, Any] = {
    "data": {"dataset": "digits", "clients": 100},
    "partition": {"name": "dirichlet_client", "concentration": 0.1},
    "model": {"name": "mlp", "hidden": [64]},
    "training": {"rounds": 100, "participation": 0.1, "local_steps": 10, "batch_size": 10, "lr": 0.3},
}
DEMO_SEEDS = (0, 1, 2)
DEMO_TARGET = 0.95


def _contestant(name: str, lr: float, **options: float) -> Contestant:
    return Contestant(name, {"algorithm": {"name": name, **options}, "training": {"lr": lr}})


DEMO_CONTESTANTS = [
    _contestant("fedavg", lr=0.5),
    _contestant("fedsam", lr=0.5, radius=0.2),
    _contestant("mofedsam", lr=1.0, radius=0.2),
    _contestant("fedswa", lr=0.5),
    _contestant("fedmoswa", lr=0.5),
    _contestant("fednsam", lr=0.5, radius=0.05),
    _contestant("fedsagd", lr=0.1),
]
