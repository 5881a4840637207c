"""The Ray engine on a cluster of two nodes, which lives on one machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import GENERIC, federation, network, run

import flatfed as ff

ray = pytest.importorskip("ray", reason="needs the extra ray: pip install 'flatfed[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402

from flatfed.engines import ray as engine  # noqa: E402

PARTICIPANTS = 7


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    """Two nodes with one worker each, which find this file and its neighbours."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    started.add_node(num_cpus=1)
    ray.init(address=started.address, log_to_driver=False)
    yield started
    ray.shutdown()
    started.shutdown()


def without_clock(finished: ff.Run) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name != "seconds"} for line in finished.history]


def assert_same_bits(left: ff.Run, right: ff.Run) -> None:
    assert left.server.keys() == right.server.keys()
    assert all(torch.equal(value, right.server[name]) for name, value in left.server.items())
    assert without_clock(left) == without_clock(right)
    assert left.clients.clients() == right.clients.clients()
    for client in left.clients.clients():
        assert torch.equal(left.clients.row(client), right.clients.row(client))


def both(algorithm: ff.Algorithm, **options: Any) -> tuple[ff.Run, ff.Run]:
    return run(algorithm, **options), run(algorithm, engine="ray", workers=2, **options)


@pytest.mark.parametrize("path", ["client", "matrix"])
@pytest.mark.parametrize("name", ["fedmoswa", "fedsmoo", "fednsam_d"])
def test_it_gives_the_bits_of_the_local_engine(name, path, monkeypatch):
    monkeypatch.setattr("flatfed.engines.local.MATRIX_CLIENTS", 2)
    algorithm = ff.ALGORITHMS[name](**GENERIC[name])
    assert_same_bits(*both(algorithm, participants=PARTICIPANTS, path=path))


def test_compressed_uploads_and_error_feedback_are_the_same(monkeypatch):
    algorithm = ff.algorithms.build(
        {"name": "scaffold", "compress": {"part": "error_feedback", "of": {"part": "quantize", "bits": 3}}}
    )
    assert_same_bits(*both(algorithm, participants=PARTICIPANTS))


def test_a_worker_killed_in_the_middle_of_a_round_changes_nothing(monkeypatch):
    killed = []
    real_get = ray.get

    def get_after_a_kill(answer: Any, **options: Any) -> Any:
        # The first time that the driver waits for a stretch, one of the workers is in the middle of it.
        if not killed and isinstance(answer, ray.ObjectRef):
            (victim, *_) = [made for made in engines if made.remote]
            process = real_get(victim.remote[0].process.remote())
            killed.append(process)
            os.kill(process, signal.SIGKILL)
        return real_get(answer, **options)

    engines: list[engine.RayEngine] = []
    real_init = engine.RayEngine.__init__

    def remembered(self: engine.RayEngine, *arguments: Any) -> None:
        real_init(self, *arguments)
        engines.append(self)

    algorithm = ff.fedmoswa(**GENERIC["fedmoswa"])
    expected = run(algorithm, participants=PARTICIPANTS)
    monkeypatch.setattr(engine.RayEngine, "__init__", remembered)
    monkeypatch.setattr(engine.ray, "get", get_after_a_kill)
    found = run(algorithm, participants=PARTICIPANTS, engine="ray", workers=2)
    assert len(killed) == 1
    assert_same_bits(expected, found)


def test_data_from_a_function_are_loaded_on_the_workers():
    data = federation()
    here = os.getpid()
    loaded = ff.Federation.from_function(len(data), lambda client: _load(data, client, here))
    expected = run(ff.scaffold(), data=data)
    assert_same_bits(expected, run(ff.scaffold(), data=loaded, engine="ray", workers=2))


def _load(data: ff.Federation, client: int, driver: int) -> Any:
    # Client 0 is tried once by the driver, before there are workers.
    assert client == 0 or os.getpid() != driver
    own = data.client(client)
    return own.batch(torch.arange(len(own)))


def test_what_goes_wrong_on_a_worker_is_one_line():
    class Picky(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if float(inputs[0, 0]) == 99.0:
                raise ValueError("no such input")
            return self.inner(inputs)

    data = federation()
    clients = [
        data.client(number).batch(torch.arange(len(data.client(number)))) for number in range(len(data))
    ]
    clients[3] = (torch.full_like(clients[3][0], 99.0), clients[3][1])
    spoilt = ff.Federation.from_tensors(clients)
    with pytest.raises(ff.FlatfedError, match=r"round 1: .* client 3: no such input$"):
        run(ff.fedavg(), data=spoilt, model=Picky(), participants=8, path="client", engine="ray", workers=2)


def test_a_run_goes_on_under_another_engine(tmp_path):
    algorithm = ff.fedmoswa(**GENERIC["fedmoswa"])
    expected = run(algorithm, rounds=5)
    run(algorithm, rounds=2, folder=tmp_path / "run")
    assert_same_bits(expected, run(algorithm, rounds=5, folder=tmp_path / "run", engine="ray", workers=2))


@pytest.mark.parametrize(
    ("address", "complaint"),
    [("127.0.0.1:9", "nobody answers there"), ("somewhere", "write HOST:PORT")],
)
def test_a_wrong_address_is_refused_at_once(address, complaint, monkeypatch):
    monkeypatch.setattr(engine.ray, "is_initialized", lambda: False)
    with pytest.raises(ff.FlatfedError, match=f"ray_address = '{address}': {complaint}"):
        run(ff.fedavg(), engine="ray", ray_address=address)
