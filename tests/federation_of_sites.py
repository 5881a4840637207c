"""A real Flower deployment on this machine, by the commands of docs/deployment.md."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forked_programs import forked_programs

from flatfed.training.config import Config

ROOT = Path(__file__).parents[1]
SITES = [f"site-{number}" for number in range(1, 5)]
PATIENCE = 300.0
"""Seconds until something that should happen is given up, on however busy a machine."""


def commands() -> dict[str, list[str]]:
    """The shell blocks of the guide, by the heading that they stand under."""
    blocks: dict[str, list[str]] = {}
    for section in re.split(r"^## ", (ROOT / "docs" / "deployment.md").read_text(), flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        blocks[title] = re.findall(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return blocks


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    deadline = time.monotonic() + patience
    while not (outcome := condition()):
        assert time.monotonic() < deadline, f"{what}: not after {patience:g} s"
        time.sleep(0.2)
    return outcome


class Federation:
    """Processes of the deployment, and what is on its disks."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder, self.blocks = folder, commands()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self.environment = {**environment, "SUPERLINK": "localhost", "PORT": str(self.port)}

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
    command_lines = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and wanted <= set((folder / "environ").read_text().split("\0")):
                command_lines[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except (OSError, UnicodeDecodeError):
            continue
    return command_lines


def kill(numbers: Iterable[int]) -> None:
    for process in numbers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@contextlib.contextmanager
def deployed(folder: Path) -> Iterator[Federation]:
    """Everything up to the point where a run can be submitted: a SuperLink and the sites' SuperNodes."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    }
    with forked_programs(folder, environment) as changed:
        yield from _started(Federation(folder, changed))


def _started(federation: Federation) -> Iterator[Federation]:
    folder = federation.folder
    try:
        federation.do(federation.block("The app").replace("flatfed ", f"{sys.executable} -m flatfed "))
        federation.do(federation.block("1. Certificates"))
        federation.start("superlink", federation.block("2. The SuperLink"))
        until(lambda: "Uvicorn running" in federation.log("superlink"), "the SuperLink starts")
        federation.do(federation.block("4. Registering the sites"))
        for site in SITES:
            federation.do(federation.block("3. A key for every site"), SITE=site)
            federation.do(federation.block("4. Registering the sites", 1), SITE=site)
            federation.start_site(site)
        yield federation
    except BaseException:
        for log in sorted(folder.glob("*.log")):
            sys.stderr.write(f"---- {log.name}\n{log.read_text(errors='replace')[-3000:]}\n")
        raise
    finally:
        federation.close()
