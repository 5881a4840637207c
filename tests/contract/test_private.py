"""What clients keep to themselves, under every registered algorithm."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from problems import CLIENTS, DEFAULTS, federation, generic, network, run
from torch import Tensor

import flatfed as ff
from flatfed.core.part import ServerTask
from flatfed.core.sharing import PRIVATE_MODEL
from flatfed.core.state import Dimensions, Vector
from flatfed.engines import chunks

NAMES = sorted(ff.ALGORITHMS)
PERSONAL = [name for name in NAMES if not any(isinstance(part, ServerTask) for part in generic(name).parts)]
HEAD = ff.Sharing(private=("2",))
SHARED, PRIVATE = 25, 18
PATHS = ("matrix", "client")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of three participants is two chunks of the matrix path."""
    monkeypatch.setattr(chunks, "MATRIX_CLIENTS", 2)
    monkeypatch.setattr(chunks, "FEWEST_CLIENTS", 2)


@functools.cache
def trained(name: str, path: str, sharing: ff.Sharing = HEAD) -> ff.Run:
    return run(generic(name), path=path, rounds=3, sharing=sharing)


def own_parts(finished: ff.Run) -> dict[int, Tensor]:
    """What each client that took part keeps to itself of the model."""
    model = finished.server["model"]
    return {
        client: finished.clients.read(client, model)[PRIVATE_MODEL] for client in finished.clients.clients()
    }


def apart(left: dict[int, Tensor], right: dict[int, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[client] - right[client]).abs().max()) for client in left)


@pytest.mark.parametrize("name", PERSONAL)
@pytest.mark.parametrize("path", PATHS)
def test_the_private_part_never_moves_on_the_server(name, path):
    finished, first = trained(name, path), network()
    assert finished.path == path
    assert finished.server["model"].shape == (SHARED,)
    for mine, before in zip(finished.model[2].parameters(), first[2].parameters(), strict=True):
        assert torch.equal(mine, before)
    for mine, before in zip(finished.model[0].parameters(), first[0].parameters(), strict=True):
        assert not torch.equal(mine, before)
    untouched = torch.cat([value.detach().flatten() for value in first[2].parameters()])
    kept = own_parts(finished)
    assert len(kept) > 3
    assert all(value.shape == (PRIVATE,) and not torch.equal(value, untouched) for value in kept.values())


@pytest.mark.parametrize("name", PERSONAL)
def test_only_what_is_shared_travels(name):
    algorithm, history = generic(name), trained(name, "client").history
    dimensions = Dimensions(SHARED, (4,), 3, tensors=2)
    lengths = {"model": SHARED} | {
        vector.name: dimensions.length(vector) for vector in algorithm.server_vectors
    }
    down = sum(lengths[key] for key in algorithm.broadcast)
    sizes = [algorithm.declared_uploads[key].size for key in algorithm.uploads]
    up = sum(dimensions.length(Vector("", size)) for size in sizes)
    for line in history:
        assert (line["bytes_down"], line["bytes_up"]) == (8 * 3 * down, 8 * 3 * up)


@pytest.mark.parametrize("name", PERSONAL)
def test_both_paths_train_the_same_private_parts(name):
    matrix, client = (trained(name, path) for path in PATHS)
    assert apart(own_parts(matrix), own_parts(client)) < 1e-9
    assert float((matrix.server["model"] - client.server["model"]).abs().max()) < 1e-9


@pytest.mark.parametrize("name", PERSONAL)
def test_with_nothing_shared_every_client_trains_alone(name):
    """Whatever the algorithm, that is its optimizer's plain steps, on inputs that it changes if it does."""
    nothing, algorithm = ff.Sharing(private=("*",)), generic(name)
    finished, plain = trained(name, "client", nothing), algorithm.alone
    if algorithm.gradient.needs_float_inputs:
        plain = replace(plain, gradient=algorithm.gradient)
    alone = run(plain, path="client", rounds=3, sharing=nothing)
    assert finished.server["model"].shape == (0,)
    assert all(line["bytes_up"] <= 8 * 3 * 2 for line in finished.history), "no more than numbers"
    assert apart(own_parts(finished), own_parts(alone)) == 0


@pytest.mark.parametrize("name", sorted({*NAMES} - {*PERSONAL}))
def test_samples_cannot_be_made_for_a_model_that_the_server_does_not_have(name):
    with pytest.raises(ff.FlatfedError, match="which does not have the private part of it; share everything"):
        run(generic(name), sharing=HEAD)


@pytest.mark.parametrize("name", NAMES)
def test_a_choice_that_shares_everything_changes_nothing(name):
    """Not even the record of a run, so that folders from before there was a choice go on."""
    training = ff.Training(rounds=3, sharing=ff.Sharing())
    assert training.model_dump() == ff.Training(rounds=3).model_dump()
    assert "sharing" not in training.model_dump()
    chosen, plain = (run(generic(name), rounds=1, **options) for options in ({"sharing": ff.Sharing()}, {}))
    assert all(torch.equal(value, plain.server[key]) for key, value in chosen.server.items())
    assert len(federation()) == CLIENTS and DEFAULTS["participants"] == 3
