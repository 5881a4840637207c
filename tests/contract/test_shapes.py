"""A part of the user's own that hands back the wrong thing is refused by name, not broadcast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compositions import composed, first_clients, first_server, small_round
from problems import run
from torch import Tensor

import flatfed as ff
from flatfed.core.algorithm import ImpossibleComposition
from flatfed.core.context import Carry, ClientContext, Finish, MergeContext, Oracle
from flatfed.core.part import Correction, Gradient, Part, Server, Start, Upload
from flatfed.core.state import State, Vector

TRAINING = ff.Training(rounds=1)


def changed(value: Tensor, how: str) -> Tensor:
    return {
        "column": lambda: value[..., None],
        "number": lambda: value[..., :1],
        "single": value.float,
    }[how]()


class OddStart(Start):
    how = ""

    def start(self, server: State) -> Tensor:
        return changed(server["model"], self.how)


class OddServer(Server):
    how = ""
    server_vectors = (Vector("kept"),)

    def update(
        self, server: State, mean: State, shift: Tensor | None, context: MergeContext
    ) -> dict[str, Tensor]:
        return {
            "model": server["model"] + mean["displacement"],
            "kept": changed(mean["displacement"], self.how),
        }


class OddModel(Server):
    how = ""

    def update(
        self, server: State, mean: State, shift: Tensor | None, context: MergeContext
    ) -> dict[str, Tensor]:
        return {"model": changed(server["model"] + mean["displacement"], self.how)}


class OddGradient(Gradient):
    how = ""

    def gradient(
        self, point: Tensor, oracle: Oracle, context: ClientContext, carry: Carry
    ) -> tuple[Tensor, Carry]:
        return changed(oracle(point), self.how), carry


class OddUpload(Correction):
    how = ""
    uploads = (Upload("sent"),)

    def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
        return Finish(upload={"sent": changed(displacement, self.how)})


class OddClient(Correction):
    how = ""
    client_vectors = (Vector("kept"),)

    def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
        return Finish(client={"kept": changed(displacement, self.how)})


KINDS: list[type[Any]] = [OddStart, OddServer, OddModel, OddGradient, OddUpload, OddClient]


@pytest.mark.parametrize("how", ["column", "number"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_of_another_shape_is_refused(kind, how):
    part: Part = type(kind.__name__, (kind,), {"how": how})()
    algorithm = composed(part)
    server, clients = first_server(algorithm), first_clients(algorithm)
    with pytest.raises(ImpossibleComposition, match=r"was returned where .* belongs"):
        small_round(algorithm, server, clients, 0, TRAINING)


@pytest.mark.parametrize("kind", [OddStart, OddServer, OddModel, OddClient])
def test_a_vector_of_another_precision_is_refused(kind):
    part: Part = type(kind.__name__, (kind,), {"how": "single"})()
    algorithm = composed(part)
    with pytest.raises(ImpossibleComposition, match=r"torch.float32 was returned where .* torch.float64"):
        small_round(algorithm, first_server(algorithm), first_clients(algorithm), 0, TRAINING)


class Forgetful(Correction):
    """Declares more than it hands back."""

    client_vectors = (Vector("kept", initial=3.0),)


class Promising(Correction):
    uploads = (Upload("sent"),)


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_a_client_vector_that_is_not_handed_back_stays_as_it_was(path):
    trained = run(ff.Algorithm(correct=Forgetful()), rounds=2, path=path)
    for client in trained.clients.clients():
        (kept,) = trained.clients.read(client, trained.server["model"]).values()
        assert torch.equal(kept, torch.full_like(kept, 3.0))


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_an_upload_that_is_never_handed_back_is_named(path):
    with pytest.raises(ff.FlatfedError, match=r"promising\.sent: its part declares this upload"):
        run(ff.Algorithm(correct=Promising()), rounds=1, path=path)
