"""The real ServerApp and ClientApp over a grid inside this process: the numbers of the local engine, and faults.

Equality is that of bits: the sites train client by client in double precision, as the local engine does with
path="client", and the server adds their uploads up in the same order.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import DEFAULTS, federation, generic, network, run

import flatfed as ff

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'flatfed[flower]'")

from fake_grid import FakeGrid  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict  # noqa: E402

from flatfed.engines.flower import FederationSettings, Task, client_app, server_app  # noqa: E402
from flatfed.engines.flower import nodes as nodes_module  # noqa: E402
from flatfed.engines.flower.server import serve  # noqa: E402

DATA = federation()
MATCHING = {"samples_per_class": 2, "iterations": 3, "span": 1}
SYNTHETIC: dict[str, dict[str, Any]] = {
    "dynafed": {**MATCHING, "models": 3, "steps": 2, "epochs": 2, "augment": False},
    "dynafed_syn_only": {**MATCHING, "models": 3, "steps": 2, "epochs": 2, "augment": False},
    "fedsynsam": {**MATCHING, "warm_rounds": 1, "radius": 0.2, "local_weight": 0.4, "synthetic_batch": 4},
}
"""Options with which the server has made its samples after two rounds."""
NAMES = [f"site-{number}" for number in range(len(DATA))]


def samples(number: int) -> Any:
    own = DATA.client(number)
    return own.batch(torch.arange(len(own)))


def load(context: Context) -> Any:
    return samples(int(str(context.node_config["name"]).rpartition("-")[2]))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(nodes_module, "POLL", 0.001)
    logging.getLogger("flwr").propagate = True  # so that caplog hears it


class Deployment:
    """A federation of eight sites whose SuperLink and SuperNodes are this process."""

    def __init__(self, folder: Path, algorithm: ff.Algorithm, **options: Any) -> None:
        known = {name: options.pop(name) for name in list(options) if name in FederationSettings.model_fields}
        self.registered, self.folder = options.pop("registered", True), folder
        model = options.pop("model", network)
        settings = {**DEFAULTS, "path": "client", **options}
        self.task = Task(
            model,
            algorithm,
            ff.Settings(**settings),
            FederationSettings(**{"clients": len(NAMES), "round_timeout": 0.02, "wait": 0.05, **known}),
            metrics={},
        )
        self.callbacks: list[Any] = []
        self.restart()

    def restart(self) -> None:
        """New processes on both sides; only what is on disk remains."""
        # Shuffled, so that the order of nodes is not that of their names.
        names = sorted(NAMES, key=lambda name: hash((name, "shuffled")) % 101)
        configs = {name: {"name": name, "state": str(self.folder / "sites" / name)} for name in names}
        self.grid = FakeGrid(client_app(self.task, load), configs, self.registered)

    def more(self, **settings: Any) -> None:
        self.task = replace(self.task, settings=self.task.settings.model_copy(update=settings))

    def serve(self) -> ff.Run:
        return serve(self.task, self.grid, self.folder / "run", None, self.callbacks)

    def files(self, client: int, pattern: str = "state-*") -> list[str]:
        return sorted(
            path.name for path in (self.folder / "sites").glob(f"*/*/client-{client}/{pattern}.safetensors")
        )


def local(deployment: Deployment, **settings: Any) -> ff.Run:
    settings = {**deployment.task.settings.model_dump(), **settings}
    return run(deployment.task.algorithm, model=deployment.task.model(), data=DATA, **settings)


def without_clock(finished: ff.Run, *also: str) -> list[dict[str, Any]]:
    left_out = {"seconds", *also}
    return [
        {name: value for name, value in line.items() if name not in left_out} for line in finished.history
    ]


def assert_same_bits(left: ff.Run, right: ff.Run, *also: str) -> None:
    assert left.server.keys() == right.server.keys()
    assert all(torch.equal(value, right.server[name]) for name, value in left.server.items())
    assert without_clock(left, *also) == without_clock(right, *also)
    for mine, other in zip(left.model.state_dict().values(), right.model.state_dict().values(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", sorted(ff.ALGORITHMS))
def test_every_algorithm_gives_the_bits_of_the_local_engine(name, tmp_path):
    deployment = Deployment(tmp_path, generic(name, **SYNTHETIC.get(name, {})))
    found = deployment.serve()
    # FedSpeed's sites upload Δ + h, and Δ alone, of which the flatness distance is, stays with them.
    altered = any(part.alters_displacement for part in deployment.task.algorithm.parts)
    assert_same_bits(local(deployment), found, *(["flatness_distance"] if altered else []))
