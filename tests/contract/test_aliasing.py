"""No two vectors that a round hands back share memory, with each other or with what went into it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from compositions import Round, composed, first_clients, first_server, pairs, small_round, transported
from problems import run
from torch import Tensor

import flatfed as ff
from flatfed import parts
from flatfed.core.context import Carry, ClientContext, Finish, MergeContext
from flatfed.core.part import Correction, Upload
from flatfed.core.state import State, Vector

TRAINING = ff.Training(rounds=2)


def storages(state: Mapping[str, Tensor]) -> list[int]:
    return [value.untyped_storage().data_ptr() for value in state.values()]


def copies(*states: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{key: value.clone() for key, value in state.items()} for state in states]


def check(name: str, done: Round) -> None:
    addresses = storages(done.merged)
    assert len(set(addresses)) == len(addresses), f"{name}: vectors of the server share memory"
    unchanged = {key for key, value in done.merged.items() if value is done.server.get(key)}
    new = {key: value for key, value in done.merged.items() if key not in unchanged}
    given = {*storages(done.server), *storages(done.uploads), *storages(done.sent)}
    assert not given & set(storages(new)), f"{name}: the server's new state shares memory with its input"
    assert done.result.upload["displacement"] is not done.sent["model"]
    handed = [*storages(done.result.client), *storages(done.result.upload)]
    assert len(set(handed)) == len(handed), f"{name}: vectors of a client share memory"
    given = {*storages(done.sent), *storages(done.clients)}
    assert not given & set(handed), f"{name}: a client's vectors share memory with what it received"
    for memory in done.memories:
        remembered = storages(memory)
        assert len(set(remembered)) == len(remembered), f"{name}: what a client remembers shares memory"
        assert not {*given, *storages(done.result.upload)} & set(remembered), f"{name}: memory of an input"


@pytest.mark.parametrize("rows", [True, False], ids=["matrix", "client"])
@pytest.mark.parametrize("family", [pairs, transported])
def test_no_composition_hands_back_shared_memory_or_writes_into_what_it_was_given(family, rows):
    count = 0
    for name, algorithm in family():
        server, clients = first_server(algorithm), first_clients(algorithm, rows)
        for number in range(2):
            before = copies(server, clients)
            done = small_round(algorithm, server, clients, number, TRAINING, rows)
            check(name, done)
            for kept, state in zip(before, (server, clients), strict=True):
                assert all(torch.equal(kept[key], state[key]) for key in kept), (
                    f"{name}: wrote into its input"
                )
            server, clients = done.merged, {**clients, **done.result.client}
            if done.memories:
                clients |= {
                    key: torch.stack([memory[key] for memory in done.memories]) for key in done.memories[0]
                }
            if rows:
                clients = {key: value.expand(3, -1).clone() for key, value in clients.items()}
        count += 1
    assert count > {pairs: 700, transported: 250}[family]


class Careless(Correction):
    """Hands back whatever it was given."""

    server_vectors = (Vector("first", broadcast=True), Vector("second"))
    client_vectors = (Vector("first"), Vector("second"), Vector("third"))
    uploads = (Upload("one"), Upload("two"))

    def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
        origin = context.origin
        return Finish(
            {"first": origin, "second": context.client["first"], "third": displacement},
            {"one": displacement, "two": displacement[..., :]},
        )

    def merge(self, server: State, mean: State, context: MergeContext) -> dict[str, Tensor]:
        return {"first": mean["displacement"], "second": server["model"]}


@pytest.mark.parametrize("rows", [True, False], ids=["matrix", "client"])
@pytest.mark.parametrize("compress", [parts.ErrorFeedback21(parts.Sign()), parts.Quantize()])
def test_a_part_that_hands_back_its_input_is_given_copies(rows, compress):
    algorithm = composed(Careless(), compress)
    server, clients = first_server(algorithm), first_clients(algorithm, rows)
    done = small_round(algorithm, server, clients, 0, TRAINING, rows)
    check("careless", done)
    assert torch.equal(done.merged["careless.second"], server["model"])
    assert torch.equal(done.result.upload["careless.one"], done.result.displacement)


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_nesterov_under_error_feedback_can_be_saved_and_resumed(tmp_path, path):
    algorithm = ff.build(
        {"name": "fedlnag", "compress": {"part": "error_feedback21", "of": {"part": "top_k", "ratio": 0.5}}}
    )
    whole = run(algorithm, rounds=4, folder=tmp_path / "run", checkpoint_every=1, path=path)
    assert (tmp_path / "run").is_dir()
    plain = run(algorithm, rounds=4, path=path)
    assert torch.equal(whole.server["model"], plain.server["model"])
