"""What sites keep on their disks: lost rounds, restarts, damage, and other runs' or apps' state."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from problems import generic
from torch import nn

import flatfed as ff
from flatfed.data.transform import AsStored

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'flatfed[flower]'")

from federation_in_process import (
    NAMES,
    Deployment,
    assert_same_bits,
    local,
    normalised,
    only,
    trained_in,
)
from flwr.app import Message

from flatfed.deployment import client_app


def test_a_round_that_was_lost_on_the_way_leaves_no_trace(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold())
    client = deployment.returning(1)
    only(deployment, client, 1, lambda reply: None)
    seen = {}

    def look(progress: ff.Progress) -> None:
        seen[progress.round] = [path.name for path in deployment.files(client)]

    deployment.callbacks.append(look)
    deployment.serve()
    again = next(number for number in range(2, 5) if client in deployment.members(number))
    assert "state-1.safetensors" in seen[2]
    assert "state-1.safetensors" not in seen[again + 1] and f"state-{again}.safetensors" in seen[again + 1]


@pytest.mark.parametrize("name", ["scaffold", "fedsmoo", "fedsynsam"])
def test_both_sides_may_be_restarted_between_rounds(name, tmp_path):
    """Control variates and duals are on the sites' disks, everything else in the run's folder."""
    deployment = Deployment(tmp_path, generic(name), rounds=3)
    deployment.serve()
    deployment.restart(rounds=7)
    assert_same_bits(local(deployment), deployment.serve())


class Killed(BaseException):
    """As good as kill -9: nobody catches it."""


def test_a_server_killed_in_the_middle_of_a_round_goes_on(tmp_path):
    deployment = Deployment(tmp_path, ff.fedmoswa())

    def kill(site: str, message: Message, reply: Message) -> Message:
        # The others have trained and kept their new states by now.
        if trained_in(message) == 3 and site == NAMES[deployment.members(3)[0]]:
            raise Killed
        return reply

    deployment.grid.fault = kill
    with pytest.raises(Killed):
        deployment.serve()
    assert len((tmp_path / "run" / "history.jsonl").read_text().splitlines()) == 3
    deployment.restart()
    assert_same_bits(local(deployment), deployment.serve())


def test_state_of_another_run_is_never_used(tmp_path):
    first = Deployment(tmp_path, ff.scaffold())
    first.serve()
    (tmp_path / "run").rename(tmp_path / "earlier")
    again = Deployment(tmp_path, ff.scaffold())
    assert_same_bits(local(again), again.serve())


def test_a_site_whose_state_is_gone_does_not_take_part(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.scaffold())
    client = deployment.returning(0)
    again = [number for number in range(1, 5) if client in deployment.members(number)]

    def lose(progress: ff.Progress) -> None:
        for path in deployment.files(client):
            path.unlink()

    deployment.callbacks.append(lose)
    served = deployment.serve()
    assert "the state after round 1 is not in" in caplog.text
    assert_same_bits(local(deployment, {(number, client) for number in again}), served)


def test_a_damaged_state_is_refused(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.scaffold(), rounds=5)
    client = deployment.returning(0)

    def damage(progress: ff.Progress) -> None:
        if progress.round == 1:
            (path,) = deployment.files(client)
            path.write_bytes(path.read_bytes()[:-8])

    deployment.callbacks.append(damage)
    deployment.serve()
    assert "state-0.safetensors: cannot be read" in caplog.text


def test_a_message_that_comes_too_late_is_refused(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold())
    deployment.serve()
    client = deployment.returning(0)
    old = next(
        message
        for site, message in deployment.grid.sent
        if site == NAMES[client] and trained_in(message) == 0
    )
    before = {path: path.read_bytes() for path in deployment.files(client)}
    reply = deployment.grid.call(NAMES[client], old)
    assert reply.has_error() and "the message is out of date" in str(reply.error.reason)
    assert {path: path.read_bytes() for path in deployment.files(client)} == before


def test_a_site_with_another_app_refuses(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.scaffold(), attempts=1)
    other = replace(deployment.spec, algorithm=ff.fedavg())
    deployment.grid.app = client_app(other, deployment.load)
    with pytest.raises(ff.FlatfedError, match="round 1 had 0 valid uploads after 1 attempts"):
        deployment.serve()
    assert "another model, algorithm or settings than the server's" in caplog.text


@dataclass(frozen=True)
class Doubled(AsStored):
    def evaluate(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * inputs


@pytest.mark.parametrize(
    "changes",
    [
        {"transform": Doubled()},
        {"loss": nn.functional.multi_margin_loss},
        {"name": "margins", "version": "2"},
        {"model": normalised},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_site_notices_whatever_else_differs(changes, tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.fedavg(), attempts=1)
    deployment.spec = replace(deployment.spec, name="margins", version="1")
    deployment.restart()
    deployment.grid.app = client_app(replace(deployment.spec, **changes), deployment.load)
    with pytest.raises(ff.FlatfedError, match="error 1000: spec: this site's app has another model"):
        deployment.serve()


def test_what_cannot_be_compared_needs_a_version_to_go_on(tmp_path):
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    deployment = Deployment(tmp_path / "without", ff.scaffold(), rounds=2)
    deployment.spec = replace(deployment.spec, loss=loss)
    deployment.restart()
    deployment.serve()
    deployment.restart(rounds=5)
    with pytest.raises(ff.FlatfedError, match="it cannot be continued safely"):
        deployment.serve()
    deployment = Deployment(tmp_path / "with", ff.scaffold(), rounds=2)
    deployment.spec = replace(deployment.spec, loss=loss, name="entropy", version="1")
    deployment.restart()
    deployment.serve()
    deployment.restart(rounds=5)
    assert_same_bits(local(deployment), deployment.serve())
    deployment.spec = replace(deployment.spec, version="2")
    deployment.restart(rounds=6)
    with pytest.raises(ff.FlatfedError, match="it holds another run"):
        deployment.serve()
    with pytest.raises(ff.FlatfedError, match="give both or neither"):
        replace(deployment.spec, name="")
