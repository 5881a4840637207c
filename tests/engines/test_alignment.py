"""Outputs [B, 1] and targets [B] become [B, B] by broadcasting: refused where a loss or metric does that."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatfed as ff

WORK = {"rounds": 1, "local_steps": 1, "lr": 0.01}
DRAW = torch.Generator().manual_seed(0)
INPUTS, NUMBERS = torch.randn(6, 4, generator=DRAW), torch.randn(6, generator=DRAW)


def squared(outputs, targets):
    return ((outputs - targets) ** 2).mean()


def squared_of_one_shape(outputs, targets):
    return ((outputs.reshape(-1) - targets.reshape(-1)) ** 2).mean()


def train(targets, loss, batch_size=3, model=None, **options):
    federation = ff.Federation.from_tensors([(INPUTS, targets)] * 3, test=(INPUTS, targets))
    task = ff.Task(model or nn.Linear(4, 1), federation, loss=loss, **options)
    return ff.train(task, ff.fedavg(), ff.Training(batch_size=batch_size, **WORK))


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, nn.HuberLoss(), squared])
@pytest.mark.parametrize("batch_size", [1, 3, None])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_losses_that_would_compare_everything_with_everything_are_refused(loss, batch_size):
    with pytest.raises(ff.FlatfedError, match=r"loss: outputs are \[., 1\] and targets \[.\], so it"):
        train(NUMBERS, loss, batch_size)
    with pytest.raises(ff.FlatfedError, match="so it compares"):
        train(NUMBERS[:, None], loss, batch_size, nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)))


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, nn.HuberLoss()])
@pytest.mark.parametrize("batch_size", [1, 6])
@pytest.mark.parametrize("targets", [NUMBERS + 1e4, torch.full((6,), 3.0), (NUMBERS > 0).float()])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_that_is_seen_wherever_the_first_outputs_lie(targets, loss, batch_size):
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    with pytest.raises(ff.FlatfedError, match="so it compares every output"):
        train(targets, loss, batch_size, model)
    assert train(targets[:, None], loss, batch_size, model).history


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_metrics_that_would_do_so_are_refused():
    with pytest.raises(ff.FlatfedError, match=r"error: outputs are \[3, 1\] and targets \[3\], so it"):
        train(NUMBERS, squared_of_one_shape, metrics={"error": F.l1_loss})


def test_shapes_that_are_alike_or_made_alike_are_trained():
    alike = train(NUMBERS[:, None], F.mse_loss, metrics={"error": F.l1_loss})
    made_alike = train(NUMBERS, squared_of_one_shape, metrics={"spread": ff.whole(squared_of_one_shape)})
    assert alike.history[-1]["test_error"] > 0 and made_alike.history[-1]["test_spread"] > 0


def test_losses_that_draw_numbers_or_want_their_own_shapes_are_left_alone():
    def noisy(outputs, targets):
        return squared_of_one_shape(outputs + torch.rand_like(outputs), targets)

    def one_column(outputs, targets):
        return ((outputs[:, 0] - targets) ** 2).mean()

    for loss in (noisy, one_column):
        assert train(NUMBERS, loss).history[-1]["train_loss"] > 0
