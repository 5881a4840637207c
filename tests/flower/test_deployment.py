"""A real deployment on this machine: one SuperLink and four SuperNodes, with TLS and registered keys.

The commands are those of docs/deployment.md. Takes a few minutes, because Flower's processes poll.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import flatfed as ff
from flatfed.core.sampling import cohort
from flatfed.data.datasets.digits import load_digits_tensors
from flatfed.experiments.config import Config

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'flatfed[flower]'")
for program in ("openssl", "ssh-keygen", "bash"):
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}", allow_module_level=True)
if not Path("/proc/self/stat").exists():
    pytest.skip("finds Flower's processes in /proc, which only Linux has", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SITES = [f"site-{number}" for number in range(1, 5)]
PATIENCE = 300.0
"""Seconds until something that should happen is given up, on however busy a machine."""


def commands() -> dict[str, list[str]]:
    """The shell blocks of the guide, by the heading that they stand under."""
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", (ROOT / "docs" / "deployment.md").read_text(), flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        found[title] = re.findall(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    deadline = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not after {patience:g} s"
        time.sleep(0.2)
    return found


class Federation:
    """Processes of the deployment, and what is on its disks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.blocks = folder, commands()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "SUPERLINK": "localhost",
            "PORT": str(self.port),
        }

    def block(self, title: str, number: int = 0) -> str:
        return self.blocks[title][number].replace("PORT=8000", f"PORT={self.port}")

    def do(self, script: str, **variables: str) -> str:
        """Runs a block to its end."""
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=self.folder,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, name: str, script: str, **variables: str) -> None:
        """Starts a block that goes on, as a session of its own."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                ["bash", "-c", f"exec {script}"],
                cwd=self.folder,
                env={**self.environment, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def start_site(self, site: str) -> None:
        before = self.log(site).count("SuperNode ID") if (self.folder / f"{site}.log").exists() else 0
        port = str(free_port())
        self.start(site, self.block("5. The SuperNodes"), SITE=site, SITE_PORT=port)
        until(lambda: self.log(site).count("SuperNode ID") > before, f"{site} connects")

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends a process; with SIGKILL also the apps that it started."""
        process = self.processes.pop(name)
        if how == signal.SIGKILL:
            kill(processes(FLWR_HOME=self.environment["FLWR_HOME"], SITE=name))
        else:
            process.send_signal(how)
        process.wait(60)

    def close(self) -> None:
        kill(processes(FLWR_HOME=self.environment["FLWR_HOME"]))
        for process in self.processes.values():
            process.wait(60)

    # -- the app ------------------------------------------------------------------------------------------

    def configure(self, algorithm: str, rounds: int, **federation: Any) -> Config:
        """Writes the app's settings and returns those that a laptop would have."""
        common = f'{algorithm}\n[model]\nname = "mlp"\nhidden = [16]\n[training]\nrounds = {rounds}\n'
        common += "local_steps = 3\nlr = 0.2\n"
        settings = {"clients": 4, "minimum_clients": 4, "input_shape": [1, 8, 8], "classes": 10, **federation}
        table = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
        app = self.folder / "my-federation" / "my_federation"
        (app / "federation.toml").write_text(f"{common}[federation]\n{table}")
        laptop = self.folder / "laptop.toml"
        laptop.write_text(common)
        return Config.read(laptop)

    def run(self, name: str) -> Path:
        """Submits the app, whose run is `name`, and follows its log."""
        self.start(name, f"{self.block('6. Running').strip()} -c 'folder=\"runs/{name}\"'")
        return self.folder / "runs" / name

    def rounds(self, run: Path) -> int:
        history = run / "history.jsonl"
        return len(history.read_text().splitlines()) if history.exists() else 0

    def finished(self, run: Path) -> list[dict[str, Any]]:
        until((run / "model.safetensors").exists, f"{run.name} ends")
        return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


def processes(**variables: str) -> dict[int, str]:
    """The command lines of processes with such an environment, whoever started them."""
    wanted = {f"{name}={value}" for name, value in variables.items()}
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and wanted <= set((folder / "environ").read_text().split("\0")):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (OSError, UnicodeDecodeError):
            continue
    return found


def kill(found: Iterable[int]) -> None:
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def laptop(config: Config, sites: int = 4, without: frozenset[tuple[int, int]] = frozenset()) -> ff.Run:
    """What the local engine makes of the first sites' data, `without` some (round, client)."""
    data = load_digits_tensors()
    clients = [(data.train_inputs[site::4], data.train_targets[site::4]) for site in range(sites)]
    federation = ff.Federation.from_tensors(clients, (data.test_inputs, data.test_targets))
    federation.classes = data.classes

    def some(settings: ff.Settings, clients: int, number: int) -> list[int]:
        return [client for client in cohort(settings, clients, number) if (number, client) not in without]

    settings = {**config.training.model_dump(), "path": "client"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatfed.experiments.run.cohort", some)
        return ff.train(config.make_model(federation), federation, config.make_algorithm(), **settings)


def assert_same(run: Path, expected: ff.Run) -> None:
    """To rounding: sites and server may be different kinds of machines."""
    found = load_file(run / "model.safetensors")
    for name, value in expected.model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    for line, other in zip(lines, expected.history, strict=True):
        assert line["participants"] == other["participants"]
        assert line["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
        assert line["test_accuracy"] == pytest.approx(other["test_accuracy"], abs=0.01)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Everything up to the point where a run can be submitted."""
    deployed = Federation(tmp_path_factory.mktemp("deployment"))
    try:
        deployed.do(deployed.block("The app").replace("flatfed ", f"{sys.executable} -m flatfed "))
        deployed.do(deployed.block("1. Certificates"))
        deployed.start("superlink", deployed.block("2. The SuperLink"))
        until(lambda: "Uvicorn running" in deployed.log("superlink"), "the SuperLink starts")
        deployed.do(deployed.block("4. Registering the sites"))
        for site in SITES:
            deployed.do(deployed.block("3. A key for every site"), SITE=site)
            deployed.do(deployed.block("4. Registering the sites", 1), SITE=site)
            deployed.start_site(site)
        yield deployed
    except BaseException:
        for log in sorted(deployed.folder.glob("*.log")):
            sys.stderr.write(f"---- {log.name}\n{log.read_text(errors='replace')[-3000:]}\n")
        raise
    finally:
        deployed.close()


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


def test_a_killed_server_and_a_restarted_site_go_on(federation):
    """FedMoSWA's control variates are on the sites' disks, everything else in the run's folder."""
    config = federation.configure('[algorithm]\nname = "fedmoswa"', 3)
    run = federation.run("fedmoswa")
    until(lambda: federation.rounds(run) >= 1, "the first round")
    running = processes(FLWR_HOME=federation.environment["FLWR_HOME"])
    servers = [process for process, line in running.items() if "flwr-serverapp" in line]
    assert servers, running
    kill(servers)
    federation.stop("site-2")
    federation.start_site("site-2")
    assert federation.rounds(run) < 3
    federation.run("fedmoswa")
    assert len(federation.finished(run)) == 3
    assert_same(run, laptop(config))


def test_server_side_work_and_vectors_sent_once(federation):
    """FedSynSAM, over two of the sites that are connected."""
    algorithm = (
        '[algorithm]\nname = "fedsynsam"\nwarm_rounds = 1\nsamples_per_class = 2\niterations = 3\nspan = 1'
    )
    config = federation.configure(algorithm, 3, clients=SITES[:2], minimum_clients=2)
    run = federation.run("fedsynsam")
    federation.finished(run)
    assert_same(run, laptop(config, sites=2))


def test_a_site_killed_in_the_middle_of_a_round_does_not_hang_it(federation):
    """The round is that of the others. This test comes last: Flower refuses the site for a minute."""
    config = federation.configure(
        '[algorithm]\nname = "fedavg"', 2, minimum_clients=3, round_timeout=60, attempts=10
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
