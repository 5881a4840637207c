"""How many uploads become one: the trimmed mean by itself, and through the local engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from problems import CLIENTS, Recorder, distance, federation, network, run, spied, train
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.algorithm import ImpossibleComposition
from flatfed.core.part import Aggregator, Server, Upload, squared_norm
from flatfed.engines import chunks, sums
from flatfed.parts import ErrorFeedback21, Quantize, TopK, TrimmedMean

ROWS = torch.tensor([[1.0, 2], [2, 1], [3, 3], [4, 0], [100, -50]], dtype=torch.float64)
EVERYBODY = {"participants": CLIENTS}


@dataclass
class Rows:
    """Uploads in memory, in blocks of one coordinate."""

    values: Tensor
    weights: Tensor

    def blocks(self) -> Any:
        return iter(self.values.split(1, dim=1))


def combined(rule: Aggregator, values: Tensor, weights: Tensor | None = None) -> Tensor:
    return rule.combine(Rows(values, torch.ones(len(values)).double() if weights is None else weights))


def test_known_values() -> None:
    assert combined(TrimmedMean(0.2), ROWS).tolist() == [3, 1]
    assert combined(TrimmedMean(0.4), ROWS).tolist() == [3, 1]
    torch.testing.assert_close(combined(TrimmedMean(0.0), ROWS), ROWS.mean(0))
    torch.testing.assert_close(combined(Aggregator(), ROWS), ROWS.mean(0))


def test_what_is_left_counts_by_its_weight() -> None:
    weights = torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)
    # Of the first coordinate 2, 3, 4 are left, of the second 2, 1, 0.
    expected = torch.tensor([(2 * 2 + 3 * 3 + 4 * 4) / 9, (2 * 1 + 1 * 2 + 0 * 4) / 7]).double()
    torch.testing.assert_close(combined(TrimmedMean(0.2), ROWS, weights), expected)
    torch.testing.assert_close(combined(TrimmedMean(0.0), ROWS, weights), weights @ ROWS / 15)
    torch.testing.assert_close(combined(Aggregator(), ROWS, weights), weights @ ROWS / 15)


@pytest.mark.parametrize(("share", "clients", "trimmed"), [(0.29, 100, 29), (0.1, 9, 0), (0.49, 5, 2)])
def test_the_share_is_of_the_participants_rounded_down(share: float, clients: int, trimmed: int) -> None:
    values = torch.arange(clients).double()[:, None] ** 2
    expected = values[trimmed : clients - trimmed].mean(0)
    torch.testing.assert_close(combined(TrimmedMean(share), values), expected)


def test_order_does_not_matter_and_two_of_eleven_rows_move_little() -> None:
    values = torch.randn(11, 40, generator=torch.Generator().manual_seed(0)).double()
    honest = combined(TrimmedMean(0.2), values)
    assert torch.equal(honest, combined(TrimmedMean(0.2), values[torch.randperm(11)]))
    values[[3, 7]] = 1e6
    assert float((combined(TrimmedMean(0.2), values) - honest).abs().max()) < 1.5


@pytest.mark.parametrize("share", [-0.1, 0.5, float("nan")])
def test_a_share_that_leaves_nothing_is_refused(share: float) -> None:
    with pytest.raises(ff.FlatfedError, match=r"algorithm\.aggregate\.trimmed_mean\.share"):
        ff.build({"name": "fedavg", "aggregate": {"part": "trimmed_mean", "share": share}})


def test_it_can_be_set_beside_any_algorithm() -> None:
    described = {"name": "scaffold", "aggregate": {"part": "trimmed_mean", "share": 0.2}}
    algorithm = ff.build(described)
    assert algorithm.name == "scaffold" and algorithm.aggregate == TrimmedMean(0.2)
    assert algorithm.describe() == {**ff.scaffold().describe(), **described}
    assert ff.build(algorithm.describe()) == algorithm


# -- through the engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_a_round_is_the_rule_on_the_participants_displacements(path: str) -> None:
    algorithm, log = spied(replace(ff.fedavg(), aggregate=TrimmedMean(0.3)))
    recorder = Recorder()
    run(algorithm, recorder=recorder, path=path, **EVERYBODY)
    moved = torch.cat(
        [(end - start).reshape(-1, len(start)) for start, end in zip(log.starts, log.ends, strict=True)]
    )
    moved = moved.reshape(len(recorder.models), -1, recorder.models.shape[1])
    assert moved.shape[1] == CLIENTS
    x = log.starts[0]
    for rows, model in zip(moved, recorder.models, strict=True):
        x = x + rows.sort(0).values[2:-2].mean(0)
        assert distance(model, x) < 1e-12
    assert distance(recorder.models, models_of(ff.fedavg(), **EVERYBODY)) > 1e-3


def models_of(algorithm: ff.Algorithm, **settings: Any) -> Tensor:
    recorder = Recorder()
    run(algorithm, recorder=recorder, **settings)
    return recorder.models


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedspeed", "mimelite"])
@pytest.mark.parametrize("path", ["matrix", "client"])
def test_trimming_nothing_is_the_mean(name: str, path: str) -> None:
    algorithm = ff.ALGORITHMS[name]()
    options = {"path": path, "weighting": "samples", "data": federation(unequal=True)}
    plain = run(algorithm, **options)
    rows = run(replace(algorithm, aggregate=TrimmedMean(0.0)), **options)
    assert distance(rows.server["model"], plain.server["model"]) < 1e-12
    for line, expected in zip(rows.history, plain.history, strict=True):
        for key in ("flatness_distance", "client_drift", "train_loss", "bytes_up"):
            assert line[key] == pytest.approx(expected[key], rel=1e-9)


def batch_normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize("compress", [None, Quantize(8), ErrorFeedback21(TopK(0.4))], ids=str)
def test_neither_workers_nor_memory_nor_blocks_change_a_bit(
    compress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "MATRIX_CLIENTS", 3)
    chosen = {} if compress is None else {"compress": compress}
    algorithm = replace(ff.scaffold(), aggregate=TrimmedMean(0.3), **chosen)
    options = {"weighting": "samples", "rounds": 3, "local_steps": 3, "batch_size": 4, **EVERYBODY}

    def states(model: nn.Module, **execution: Any) -> list[Tensor]:
        finished = train(model, federation(unequal=True), algorithm, **options, **execution)
        return [*finished.server.values(), *finished.model.state_dict().values()]

    for make in (network, batch_normalised):
        expected = states(make(), workers=1)
        monkeypatch.setattr(sums, "BLOCK_BYTES", 100)
        others = [states(make(), workers=3), states(make(), workers=1, client_memory=0.0)]
        monkeypatch.undo()
        monkeypatch.setattr(chunks, "MATRIX_CLIENTS", 3)
        for other in others:
            assert [torch.equal(one, two) for one, two in zip(expected, other, strict=True)].count(False) == 0


def test_buffers_are_trimmed_too() -> None:
    data = [
        (torch.randn(8, 4).double() + (1e6 if client == 2 else 0), torch.arange(8) % 3) for client in range(6)
    ]
    options = {"rounds": 1, "local_steps": 1, "batch_size": 8, "workers": 1}
    statistics = {
        share: train(
            batch_normalised(),
            ff.Federation.from_tensors(data),
            replace(ff.fedavg(), aggregate=TrimmedMean(share)),
            **options,
        ).model.state_dict()["1.running_mean"]
        for share in (0.0, 0.2)
    }
    assert float(statistics[0.0].abs().max()) > 1e3
    assert float(statistics[0.2].abs().max()) < 10


class LongestStep(Server):
    """x + Δ̄ / (1 + mean ‖Δ_i‖²): a rule that needs a statistic of the uploads."""

    @property
    def uploads(self) -> tuple[Upload, ...]:
        return (Upload("length", "one", squared_norm, of="displacement"),)

    def update(self, server: Any, mean: Any, shift: Any, context: Any) -> dict[str, Tensor]:
        return {"model": server["model"] + mean["displacement"] / (1 + mean["length"])}


@pytest.mark.parametrize("path", ["matrix", "client"])
@pytest.mark.parametrize("compress", [None, TopK(0.3)], ids=str)
def test_a_declared_statistic_is_of_what_the_server_receives_and_costs_no_traffic(
    path: str, compress: Any
) -> None:
    chosen = {} if compress is None else {"compress": compress}
    algorithm, log = spied(ff.Algorithm(server=LongestStep(), **chosen))
    recorder = Recorder()
    finished = run(algorithm, recorder=recorder, path=path, rounds=1, **EVERYBODY)
    plain = run(ff.Algorithm(**chosen), path=path, rounds=1, **EVERYBODY)
    assert finished.history[0]["bytes_up"] == plain.history[0]["bytes_up"]
    start = log.starts[0]
    mean = plain.server["model"] - start
    length = mean.norm() / (finished.server["model"] - start).norm() - 1
    moved = torch.cat([(end - start).reshape(-1, len(start)) for end in log.ends])
    if compress is None:
        assert float(length) == pytest.approx(float(moved.square().sum(1).mean()), rel=1e-9)
    else:
        # What is not sent is not there to be measured.
        assert 0.3 < float(length) / float(moved.square().sum(1).mean()) < 0.99


def test_a_statistic_of_changes_is_refused() -> None:
    with pytest.raises(ImpossibleComposition, match="error_feedback21 sends changes of 'displacement'"):
        ff.Algorithm(server=LongestStep(), compress=ErrorFeedback21(TopK(0.1)))
