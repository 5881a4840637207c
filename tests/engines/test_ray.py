"""The Ray engine on a cluster of two nodes, which lives on one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from problems import GENERIC, Recorder, federation, generic, in_float32, network, run, train
from trees.tree_problems import Named, formed

import flatfed as ff

ray = pytest.importorskip("ray", reason="needs the extra ray: pip install 'flatfed[ray]'")

from ray.cluster_utils import Cluster  # noqa: E402

from flatfed.engines import ray as engine  # noqa: E402
from flatfed.training.config import Config  # noqa: E402

PARTICIPANTS = 7
TEMPLATE = Path(ff.__file__).parent / "cli" / "template" / "my_task.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.toml"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    """Two nodes with one worker each, which find this file and its neighbours."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    # Ray lets its workers go behind everybody else, which here are the other tests.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (its name)
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


class KeptWorker(engine.RemoteWorker):
    """A worker whose process outlives its run, because starting one takes seconds."""

    def __init__(self) -> None:
        """It becomes a worker for each run anew."""

    def become(self, shared: list[Any], files: list[str]) -> None:
        super().__init__(shared, files)


@pytest.fixture(scope="module")
def idle_workers() -> list[Any]:
    return []


@pytest.fixture
def kept_workers(idle_workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Real workers on both nodes, of which the next run takes those that the last one has left."""
    actor = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(KeptWorker)

    def begin(shared: list[Any], files: list[str]) -> Any:
        worker = idle_workers.pop() if idle_workers else actor.remote()
        worker.become.remote(shared, files)
        return worker

    monkeypatch.setattr(engine.ray, "remote", lambda **options: lambda kind: SimpleNamespace(remote=begin))
    monkeypatch.setattr(engine.ray, "kill", idle_workers.append)


def both(algorithm: ff.Algorithm, **options: Any) -> tuple[ff.Run, ff.Run]:
    return run(algorithm, **options), run(algorithm, engine="ray", workers=2, **options)


@pytest.mark.parametrize("path", ["client", "matrix"])
@pytest.mark.parametrize("name", ["fedmoswa", "fedsmoo", "fednsam_d"])
def test_it_gives_the_bits_of_the_local_engine(name, path, monkeypatch, kept_workers):
    monkeypatch.setattr("flatfed.engines.chunks.MATRIX_CLIENTS", 2)
    algorithm = ff.ALGORITHMS[name](**GENERIC[name])
    assert_same_bits(*both(algorithm, participants=PARTICIPANTS, path=path))


def test_a_task_of_a_file_is_made_again_by_the_workers(tmp_path, kept_workers):
    (tmp_path / "beside_the_task.py").write_text("width = 5\n")
    file = tmp_path / "task_on_ray.py"
    file.write_text(
        TEMPLATE.read_text().replace(
            "import flatfed as ff", "import flatfed as ff\nfrom beside_the_task import width as beside"
        )
    )
    config = Config.read(file, ["training.rounds=2", "task.clients=6"])
    options = {"progress": False}
    runs = [
        ff.train(config.make_task(), ff.scaffold(), config.training, ff.Execution(**execution), **options)
        for execution in ({"workers": 1}, {"engine": "ray", "workers": 2})
    ]
    assert_same_bits(*runs)


@pytest.mark.parametrize("path", ["client", "matrix"])
def test_less_precision_gives_the_bits_of_the_local_engine(path, kept_workers):
    model, data = in_float32()
    options = {"model": model, "data": data, "participants": PARTICIPANTS, "path": path}
    left, right = both(ff.scaffold(), precision="bfloat16", **options)
    assert_same_bits(left, right)
    assert not torch.equal(left.server["model"], run(ff.scaffold(), **options).server["model"])


class InThisProcess:
    """Stands in for Ray's actors: what is sent to them and comes back passes through Ray's object store."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def remote(self, shared: list[Any], files: list[str]) -> Any:
        worker = self.kind(shared, files)

        def called(method: Any) -> Any:
            def call(*arguments: Any) -> Any:
                sent = [given if isinstance(given, ray.ObjectRef) else ray.put(given) for given in arguments]
                return ray.put(method(*ray.get(sent)))

            return SimpleNamespace(remote=call)

        return SimpleNamespace(process=called(worker.process), train=called(worker.train))


@pytest.mark.parametrize("name", ff.ALGORITHMS)
def test_every_algorithm_gives_the_bits_of_the_local_engine(name, monkeypatch):
    expected = run(generic(name), participants=PARTICIPANTS, path="client")
    monkeypatch.setattr(engine.ray, "remote", lambda **options: InThisProcess)
    monkeypatch.setattr(engine.ray, "kill", lambda worker: None)
    remote = run(generic(name), participants=PARTICIPANTS, path="client", engine="ray", workers=3)
    assert_same_bits(expected, remote)


@pytest.mark.parametrize("losses", [2, 3])
def test_a_worker_that_is_lost_before_it_answers_is_replaced(losses, monkeypatch):
    original, lost = ray.get, []

    def get(wanted: Any) -> Any:
        answer = original(wanted)
        # A process's number is what a worker first answers.
        if isinstance(answer, int) and len(lost) < losses:
            lost.append(answer)
            raise ray.exceptions.ActorDiedError
        return answer

    monkeypatch.setattr(engine.ray, "remote", lambda **options: InThisProcess)
    monkeypatch.setattr(engine.ray, "kill", lambda worker: None)
    monkeypatch.setattr(engine.ray, "get", get)
    expected = run(generic("scaffold"), participants=PARTICIPANTS)
    again = {"participants": PARTICIPANTS, "engine": "ray", "workers": 2}
    if losses < engine.ATTEMPTS:
        assert_same_bits(expected, run(generic("scaffold"), **again))
    else:
        with pytest.raises(ff.FlatfedError, match="a worker cannot start"):
            run(generic("scaffold"), **again)
    assert len(lost) == losses


def test_what_clients_keep_to_themselves_is_the_same(kept_workers):
    sharing = ff.Sharing(private=("3",), normalisation="local")
    assert_same_bits(
        *both(generic("scaffold"), model=normalised(), sharing=sharing, participants=PARTICIPANTS)
    )


def test_compressed_uploads_and_error_feedback_are_the_same(kept_workers):
    algorithm = ff.algorithms.build(
        {"name": "scaffold", "compress": {"part": "error_feedback", "of": {"part": "quantize", "bits": 3}}}
    )
    assert_same_bits(*both(algorithm, participants=PARTICIPANTS))


def normalised() -> torch.nn.Module:
    first, *others = network()
    return torch.nn.Sequential(first, torch.nn.BatchNorm1d(5).double(), *others)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ({"name": "scaffold"}, {"path": "client"}),
        ({"name": "scaffold"}, {"path": "matrix"}),
        ({"name": "scaffold"}, {"model": normalised()}),
        ({"name": "scaffold"}, {"weighting": "samples", "data": federation(unequal=True)}),
        (
            {"name": "scaffold"},
            {"weighting": "samples", "data": federation(unequal=True), "path": "matrix"},
        ),
        (
            {"name": "fedmoswa"},
            {"model": normalised(), "weighting": "samples", "data": federation(unequal=True)},
        ),
        ({"name": "scaffold", "compress": {"part": "quantize", "bits": 4}}, {"model": normalised()}),
    ],
    ids=[
        "client",
        "matrix",
        "buffers",
        "samples",
        "samples as a matrix",
        "buffers and samples",
        "compressed",
    ],
)
def test_a_trimmed_mean_gives_the_models_of_the_local_engine(algorithm, options, monkeypatch, kept_workers):
    monkeypatch.setattr("flatfed.engines.chunks.MATRIX_CLIENTS", 2)
    trimmed = ff.build({**algorithm, "aggregate": {"part": "trimmed_mean", "share": 0.25}})
    here, there = Recorder(), Recorder()
    expected = run(trimmed, participants=PARTICIPANTS, recorder=here, **options)
    remote = run(trimmed, participants=PARTICIPANTS, recorder=there, engine="ray", workers=2, **options)
    assert torch.equal(here.models, there.models)
    assert_same_bits(expected, remote)
    for mine, other in zip(expected.model.buffers(), remote.model.buffers(), strict=True):
        assert torch.equal(mine, other)
    mean = run(ff.build(algorithm), participants=PARTICIPANTS, **options)
    assert not torch.equal(mean.server["model"], remote.server["model"])


def test_parts_that_use_one_name_keep_apart(kept_workers):
    corrections = (ff.parts.GlobalMomentum(0.4, 0.6), ff.parts.FullGradientMomentum(0.3))
    local, remote = both(ff.Algorithm(correct=corrections), participants=PARTICIPANTS)
    assert_same_bits(local, remote)
    assert len([key for key in remote.server if key.endswith(".momentum_gradient")]) == 2


class Pause:
    """A loss that says in a file which worker computes it, and waits to be killed, the first few times."""

    def __init__(self, folder: Path, times: int = 1) -> None:
        self.folder, self.times, self.driver = folder, times, os.getpid()

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        before = len(list(self.folder.glob("*.pid")))
        if os.getpid() != self.driver and before < self.times:
            (self.folder / f"{os.getpid()}.pid").touch()
            time.sleep(60)
        return torch.nn.functional.cross_entropy(outputs, targets)

    @contextlib.contextmanager
    def killing(self) -> Iterator[list[int]]:
        """Kills every worker that has got there, from a thread."""
        killed: list[int] = []
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.05):
                for path in self.folder.glob("*.pid"):
                    if int(path.stem) not in killed:
                        killed.append(int(path.stem))
                        os.kill(int(path.stem), signal.SIGKILL)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield killed
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize("aggregate", [ff.Algorithm().aggregate, ff.parts.TrimmedMean(0.25)], ids=repr)
def test_a_worker_killed_in_the_middle_of_a_round_changes_nothing(aggregate, tmp_path):
    algorithm = replace(generic("fedmoswa"), aggregate=aggregate)
    settings = {"participants": PARTICIPANTS, "path": "client"}
    pause = Pause(tmp_path)
    expected = run(algorithm, loss=pause, **settings)
    with pause.killing() as killed:
        remote = run(algorithm, loss=pause, engine="ray", workers=2, **settings)
    assert len(killed) == 1
    assert_same_bits(expected, remote)


def test_clients_that_kill_every_worker_end_the_run(tmp_path):
    pause = Pause(tmp_path, times=100)
    with (
        pause.killing() as killed,
        pytest.raises(ff.FlatfedError, match=r"round 1: 3 workers were lost with clients \["),
    ):
        run(ff.fedavg(), loss=pause, participants=2, path="client", engine="ray", workers=2)
    assert len(killed) >= engine.ATTEMPTS


def test_a_lost_node_takes_nothing_with_it(cluster):
    algorithm = ff.fedmoswa(**GENERIC["fedmoswa"])
    expected = run(algorithm, participants=PARTICIPANTS)
    third = cluster.add_node(num_cpus=1)
    rounds = []

    def lose(progress: ff.Progress) -> None:
        rounds.append(progress.round)
        if progress.round == 1:
            cluster.remove_node(third)

    remote = run(algorithm, participants=PARTICIPANTS, engine="ray", workers=3, recorder=lose)
    assert rounds == list(range(1, len(expected.history) + 1))
    assert_same_bits(expected, remote)


def test_more_workers_than_there_is_room_for_are_no_reason_to_wait():
    expected, remote = run(ff.scaffold()), run(ff.scaffold(), engine="ray", workers=5)
    assert_same_bits(expected, remote)


def test_a_worker_that_does_not_start_in_time_is_an_error(monkeypatch):
    monkeypatch.setattr(engine, "PATIENCE", 0.0)
    with pytest.raises(ff.FlatfedError, match="no worker has started in 0 seconds"):
        run(ff.fedavg(), engine="ray")


def test_what_cannot_be_sent_is_said_to():
    lock = threading.Lock()
    with pytest.raises(ff.FlatfedError, match="cannot be sent to workers"):
        run(
            ff.fedavg(),
            loss=lambda outputs, targets: (
                torch.nn.functional.cross_entropy(outputs, targets) * (lock is not None)
            ),
            engine="ray",
        )


def test_data_from_a_function_are_loaded_on_the_workers(kept_workers):
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


def test_what_goes_wrong_on_a_worker_is_one_line(kept_workers):
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
    poisoned = ff.Federation.from_tensors(clients)
    with pytest.raises(ff.FlatfedError, match=r"round 1: .* client 3: no such input$"):
        run(ff.fedavg(), data=poisoned, model=Picky(), participants=8, path="client", engine="ray", workers=2)


def test_a_run_goes_on_under_another_engine(tmp_path, kept_workers):
    algorithm = ff.fedmoswa(**GENERIC["fedmoswa"])
    expected = run(algorithm, rounds=5)
    run(algorithm, rounds=2, folder=tmp_path / "run")
    assert_same_bits(expected, run(algorithm, rounds=5, folder=tmp_path / "run", engine="ray", workers=2))


def test_the_command_line_reaches_a_cluster_by_its_address(cluster, tmp_path):
    """In a process of its own, whose Ray is not yet started."""
    for name, more in {"local": [], "remote": ["--ray-address", cluster.address]}.items():
        command = [sys.executable, "-m", "flatfed", "run", str(EXAMPLE), "--runs", str(tmp_path / name)]
        command += ["--set", "training.rounds=2", *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    local, remote = sorted(tmp_path.glob("*/*/model.safetensors"))
    assert local.read_bytes() == remote.read_bytes()


@pytest.mark.parametrize(
    ("address", "complaint"),
    [("127.0.0.1:9", "nothing answers there"), ("somewhere", "write HOST:PORT")],
)
def test_a_wrong_address_is_refused_at_once(address, complaint, monkeypatch):
    monkeypatch.setattr(engine.ray, "is_initialized", lambda: False)
    with pytest.raises(ff.FlatfedError, match=f"ray_address = '{address}': {complaint}"):
        run(ff.fedavg(), engine="ray", ray_address=address)


@pytest.mark.parametrize("path", ["client", "matrix"])
def test_trees_of_tensors_give_the_same_bits(path, kept_workers):
    data = ff.Federation.from_tensors(formed("dictionary"), test=formed("dictionary")[0])
    options: dict[str, Any] = {"rounds": 2, "local_steps": 2, "batch_size": 4, "path": path}
    options["metrics"] = {"accuracy": ff.whole(ff.accuracy)}
    assert_same_bits(
        train(Named(), data, ff.scaffold(), **options),
        train(Named(), data, ff.scaffold(), engine="ray", workers=2, **options),
    )


class Editing(torch.nn.Module):
    """Edits what it is given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs.sub_(0.5))


@pytest.mark.parametrize("path", ["client", "matrix"])
def test_inputs_that_a_model_edits_are_the_same_in_every_round(path, kept_workers):
    data, shifted = federation(), federation()
    shifted.inputs.sub_(0.5)
    local, remote = both(ff.fedsam(), model=Editing(), data=data, path=path)
    assert_same_bits(local, remote)
    expected = run(ff.fedsam(), data=shifted, path=path)
    torch.testing.assert_close(remote.server["model"], expected.server["model"], rtol=1e-12, atol=1e-12)
    assert torch.equal(data.inputs, federation().inputs)
