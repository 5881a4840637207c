"""A real deployment on this machine: one SuperLink and four SuperNodes, with TLS and registered keys.

The commands are those of docs/deployment.md. Takes a minute or two, in which Flower's processes mostly wait.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from federation_of_sites import SITES, Federation, deployed, free_port, kill, processes, until
from problems import train
from safetensors.torch import load_file

import flatfed as ff
from flatfed.core.sampling import cohort
from flatfed.data.datasets.digits import load_digits_tensors
from flatfed.training.config import Config

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'flatfed[flower]'")
for program in ("openssl", "ssh-keygen", "bash"):
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}", allow_module_level=True)
if not Path("/proc/self/stat").exists():
    pytest.skip("finds Flower's processes in /proc, which only Linux has", allow_module_level=True)


def laptop(config: Config, sites: int = 4, without: frozenset[tuple[int, int]] = frozenset()) -> ff.Run:
    """What the local engine makes of the first sites' data, `without` some (round, client)."""
    data = load_digits_tensors()
    clients = [(data.train_inputs[site::4], data.train_targets[site::4]) for site in range(sites)]
    federation = ff.Federation.from_tensors(clients, (data.test_inputs, data.test_targets))
    federation.classes = data.classes

    def some(settings: ff.Training, clients: int, number: int) -> list[int]:
        return [client for client in cohort(settings, clients, number) if (number, client) not in without]

    settings = {**config.training.model_dump(), "path": "client"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatfed.training.loop.cohort", some)
        return train(config.make_model(federation), federation, config.make_algorithm(), **settings)


def assert_same(run: Path, expected: ff.Run) -> None:
    """To rounding: sites and server may be different kinds of machines."""
    weights = load_file(run / "model.safetensors")
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    for line, other in zip(lines, expected.history, strict=True):
        assert line["participants"] == other["participants"]
        assert line["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
        assert line["test_accuracy"] == pytest.approx(other["test_accuracy"], abs=0.01)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with deployed(tmp_path_factory.mktemp("deployment")) as started:
        yield started


def test_who_is_not_registered_and_who_has_the_wrong_certificate_is_refused(federation):
    block = federation.block("5. The SuperNodes")
    federation.do(federation.block("3. A key for every site"), SITE="stranger")
    federation.start("stranger", block, SITE="stranger", SITE_PORT=str(free_port()))
    federation.do(
        federation.block("1. Certificates").partition("openssl req -newkey")[0].replace("ca.", "other-ca.")
    )
    wrong = block.replace("ca.crt", "other-ca.crt").replace('$SITE" --port', 'stranger" --port')
    federation.start("deceived", wrong, SITE="stranger", SITE_PORT=str(free_port()))
    for name, complaint in (("stranger", "305"), ("deceived", "CERTIFICATE_VERIFY_FAILED")):
        process = federation.processes[name]
        until(lambda process=process: process.poll() is not None, f"{name} gives up")
        assert process.returncode != 0 and complaint in federation.log(name)
        assert "SuperNode ID" not in federation.log(name)


EVERYTHING = """[algorithm]
gradient = {part = "synthetic_mix", radius = 0.05, local_weight = 0.9, batch = 128}
correct = ["control_variate"]
synthetic = {part = "trajectory_matching", models = 3, samples_per_class = 2, iterations = 3, steps = 1}
"""
"""Vectors on the sites' disks, work on the server, and vectors that are sent once: all that can be lost."""


def test_a_killed_server_and_a_restarted_site_go_on(federation):
    """What sites keep is on their disks, everything else in the run's folder. One site takes no part."""
    config = federation.configure(EVERYTHING, 3, clients=SITES[:3], minimum_clients=3)
    run = federation.run("everything")
    until(lambda: federation.rounds(run) >= 1, "the first round")
    running = processes(FLWR_HOME=federation.environment["FLWR_HOME"])
    servers = [process for process, line in running.items() if "flwr-serverapp" in line]
    assert servers, running
    kill(servers)
    federation.stop("site-2")
    federation.start_site("site-2")
    assert federation.rounds(run) < 3
    federation.run("everything")
    assert len(federation.finished(run)) == 3
    assert_same(run, laptop(config, sites=3))


HOSTILE = """

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message
from flwr.clientapp import ClientApp

honest = client


class Hostile(ClientApp):
    def __call__(self, message, context):
        reply, site = honest(message, context), context.node_config["name"]
        if message.metadata.message_type == "evaluate" and site == "site-3":
            return Message(Error(7, "\\x1b[2Jgone\\nERROR all is lost"), reply_to=message)
        if message.metadata.message_type == "train" and site == "site-4":
            arrays = dict(reply.content["vectors"])
            for name, array in arrays.items():
                data = np.full(len(array.data) // 4, 1e30, np.float32).tobytes()
                arrays[name] = Array(array.dtype, array.shape, array.stype, data)
            reply.content["vectors"] = ArrayRecord(arrays)
        return reply


client = Hostile()
"""
"""What makes one site send uploads of 1e30, and another one errors that clear the server's screen."""


def test_a_hostile_site_is_refused_and_no_longer_asked(federation):
    config = federation.configure('[algorithm]\nname = "fedmoswa"', 2, minimum_clients=3, max_refusals=1)
    app = federation.folder / "my-federation" / "my_federation" / "app.py"
    app.write_text(app.read_text() + HOSTILE)
    run = federation.run("hostile")
    lines = federation.finished(run)
    app.write_text(app.read_text().removesuffix(HOSTILE))
    assert [line["participants"] for line in lines] == [3, 3]
    assert [line.get("refused_client_3") for line in lines] == [1, None] and lines[1]["left_out"] == 1
    assert_same(run, laptop(config, without=frozenset({(0, 3), (1, 3)})))
    until(lambda: "all is lost" in federation.log("hostile"), "the log is shown")
    log = federation.log("hostile")
    assert re.search(
        r"site-4 \(client 3\) is left out: refused, .*: (its norm|it holds numbers beyond) ", log
    )
    assert "site-4 (client 3) is no longer asked: 1 of its answers were refused" in log
    assert r"error 7: \x1b[2Jgone ERROR all is lost" in log and "\x1b[2J" not in log


def test_the_operator_goes_back_to_an_earlier_state(federation):
    """To that after the first round of the run before, from where the site takes part again."""
    run = federation.folder / "runs" / "hostile"
    model = run / "model.safetensors"
    before = model.stat().st_mtime_ns
    config = federation.configure('[algorithm]\nname = "fedmoswa"', 2)
    command = federation.block("Going back").strip().replace("flatfed ", f"{sys.executable} -m flatfed ", 1)
    federation.start("hostile", f"{command} --folder runs/hostile")
    until(lambda: model.exists() and model.stat().st_mtime_ns != before, "the run ends again")
    lines = federation.finished(run)
    assert [line["participants"] for line in lines] == [3, 4]
    assert_same(run, laptop(config, without=frozenset({(0, 3)})))
    assert json.loads((run / "abandoned-1" / "manifest.json").read_text())["round"] == 2


def test_a_site_killed_in_the_middle_of_a_round_does_not_hang_it(federation):
    """The round is that of the others. This test comes last: Flower refuses the site for a minute."""
    config = federation.configure(
        '[algorithm]\nname = "fedavg"', 2, minimum_clients=3, round_timeout=30, attempts=10
    )
    source = federation.folder / "my-federation" / "my_federation" / "data.py"
    slow, reached = federation.folder / "slow", federation.folder / "reached"
    # The last site hangs while it loads its data in the second round, and tells that it does.
    hang = f"    if site == 4 and Path({str(slow)!r}).exists():\n        Path({str(reached)!r}).touch()\n"
    hang += "        time.sleep(600)\n    data = load"
    text = source.read_text().replace("    data = load", hang, 1)
    source.write_text(text.replace("from flwr", "import time\nfrom pathlib import Path\n\nfrom flwr", 1))
    run = federation.run("fedavg")
    until(lambda: federation.rounds(run) == 1, "the first round")
    slow.touch()
    until(reached.exists, "the site is in the middle of a round")
    lost = federation.rounds(run)
    federation.stop("site-4", signal.SIGKILL)
    lines = federation.finished(run)
    assert [line["participants"] for line in lines] == [4] * lost + [3] * (2 - lost)
    assert "site-4 (client 3) is left out" in federation.log("fedavg")
    assert_same(run, laptop(config, without=frozenset((number, 3) for number in range(lost, 2))))
