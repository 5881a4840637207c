"""A federation whose server and sites are this process, and ways in which sites can misbehave."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from problems import DEFAULTS, federation, network, run
from torch import nn

import flatfed as ff
from flatfed.core.sampling import cohort
from flatfed.deployment import FederationSettings, FederationSpec, client_app
from flatfed.deployment.server import serve

NAMES = [f"site-{number}" for number in range(8)]
SHUFFLED = [NAMES[number] for number in (5, 0, 3, 7, 1, 6, 2, 4)]


class Deployment:
    """A federation of eight sites whose SuperLink and SuperNodes are this process."""

    def __init__(
        self,
        folder: Path,
        algorithm: ff.Algorithm,
        model: Callable[[], nn.Module] = network,
        data: ff.Federation | None = None,
        registered: bool = True,
        **options: Any,
    ) -> None:
        chosen = {"clients": len(NAMES), "round_timeout": 0.02, "wait": 0.05, **DEFAULTS, "path": "client"}
        chosen |= options

        def taken(kind: Any) -> Any:
            return kind(**{name: chosen.pop(name) for name in kind.model_fields if name in chosen})

        self.folder, self.registered, self.data = folder, registered, data or federation()
        self.spec = FederationSpec(
            model,
            algorithm,
            federation=taken(FederationSettings),
            execution=taken(ff.Execution),
            training=ff.Training(**chosen),
            metrics={},
        )
        self.callbacks: list[Any] = []
        self.restart()

    def load(self, context: Context) -> Any:
        own = self.data.client(NAMES.index(str(context.node_config["name"])))
        return own.batch(torch.arange(len(own)))

    def restart(self, federation: dict[str, Any] | None = None, **training: Any) -> None:
        """New processes on both sides, perhaps with other settings; only what is on disk remains."""
        self.spec = replace(
            self.spec,
            training=self.spec.training.replaced(**training),
            federation=self.spec.federation.replaced(**(federation or {})),
        )
        configs = {name: {"name": name, "state": str(self.folder / "sites" / name)} for name in SHUFFLED}
        self.grid = FakeGrid(client_app(self.spec, self.load), configs, self.registered)

    def serve(self, **options: Any) -> ff.Run:
        return serve(self.spec, self.grid, self.folder / "run", None, self.callbacks, **options)

    def asked(self, client: int) -> list[int]:
        """The rounds in which a client was asked to train, once for each message."""
        return [
            number
            for site, message in self.grid.sent
            if site == NAMES[client] and (number := trained_in(message)) is not None
        ]

    def files(self, client: int, pattern: str = "state-*") -> list[Path]:
        return sorted((self.folder / "sites").glob(f"*/*/client-{client}/{pattern}.safetensors"))

    def members(self, round_number: int) -> list[int]:
        return cohort(self.spec.training, len(NAMES), round_number)

    def returning(self, round_number: int) -> int:
        """A client that takes part in a round and in a later one."""
        later = {
            client
            for other in range(round_number + 1, self.spec.training.rounds)
            for client in self.members(other)
        }
        return next(client for client in self.members(round_number) if client in later)


def local(deployment: Deployment, without: Container[tuple[int, int]] = (), **changes: Any) -> ff.Run:
    """The same training by the local engine, `without` some (round, client)."""
    algorithm = changes.pop("algorithm", deployment.spec.algorithm)
    training = {**deployment.spec.training.model_dump(), "loss": deployment.spec.loss, **changes}

    def some(training: ff.Training, clients: int, number: int) -> list[int]:
        return [client for client in cohort(training, clients, number) if (number, client) not in without]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatfed.training.loop.cohort", some)
        return run(algorithm, model=deployment.spec.model(), data=deployment.data, **training)


Fault = Callable[[Message], Message | None]


def trained_in(message: Message) -> int | None:
    """The round that a message asks for, None if it asks for something else."""
    if message.metadata.message_type != "train":
        return None
    return json.loads(message.content["header"]["json"])["round"]


def only(
    deployment: Deployment, client: int, number: int, fault: Callable[[Message], Message | None]
) -> None:
    """Meddles with the replies of one client in one round."""

    def meddle(site: str, message: Message, reply: Message) -> Message | None:
        return fault(reply) if (site, trained_in(message)) == (NAMES[client], number) else reply

    deployment.grid.fault = meddle


REFUSALS = ("refused", "left_out", "norm_limit_")
"""How the names begin of what the history says about refusals."""


def without_clock(finished: ff.Run, *also: str) -> list[dict[str, Any]]:
    """The history without times and refusals, which the local engine does not have."""
    return [
        {name: value for name, value in line.items() if not name.startswith(("seconds", *REFUSALS, *also))}
        for line in finished.history
    ]


def assert_same_bits(left: ff.Run, right: ff.Run, *also: str) -> None:
    assert left.server.keys() == right.server.keys()
    assert all(torch.equal(value, right.server[name]) for name, value in left.server.items())
    assert without_clock(left, *also) == without_clock(right, *also)
    for mine, other in zip(left.model.state_dict().values(), right.model.state_dict().values(), strict=True):
        assert torch.equal(mine, other)


def normalised() -> nn.Module:
    first, *others = network()
    return nn.Sequential(first, nn.BatchNorm1d(5).double(), *others)


class Single(nn.Module):
    """Has a buffer in single precision."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += self.step
        return inputs


def changed_header(**changes: Any) -> Callable[[Message], Message]:
    def change(reply: Message) -> Message:
        header = json.loads(reply.content["header"]["json"]) | changes
        reply.content["header"] = ConfigRecord({"json": json.dumps(header)})
        return reply

    return change


def changed_vector(change: Callable[[Array], Array], record: str = "vectors") -> Callable[[Message], Message]:
    def changed(reply: Message) -> Message:
        arrays = dict(reply.content[record])
        name = next(iter(arrays))
        arrays[name] = change(arrays[name])
        reply.content[record] = ArrayRecord(arrays)
        return reply

    return changed


def changed_names(change: Callable[[dict[str, Array]], dict[str, Array]]) -> Callable[[Message], Message]:
    def changed(reply: Message) -> Message:
        reply.content["vectors"] = ArrayRecord(change(dict(reply.content["vectors"])))
        return reply

    return changed


def without_record(name: str) -> Callable[[Message], Message]:
    def changed(reply: Message) -> Message:
        del reply.content[name]
        return reply

    return changed


def poisoned(number: float) -> Callable[[Array], Array]:
    def poison(array: Array) -> Array:
        data = torch.frombuffer(bytearray(array.data), dtype=torch.float64)
        data[-1] = number
        return Array(array.dtype, array.shape, array.stype, data.numpy().tobytes())

    return poison
