"""flatfed against Flower, pfl and hand-written loops, on the same work in one run.

    python benchmarks/peers/compare.py [--rounds 10] [--repeats 3] [--tasks mlp cnn] [--environments FOLDER]

Peers get environments of their own on first use. Every framework runs every task in a process of its own,
one after the other, and the whole is repeated; the final losses must agree, or it was not the same work. Best
and median are over the rounds of all repetitions. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from work import CLIENTS, PARTICIPANTS, TASKS, WARM_UP

from flatfed.core.sampling import cohort
from flatfed.core.settings import Training

HERE = Path(__file__).parent
PEERS = {"flower": "flwr[simulation]==1.41.0", "pfl": "pfl[pytorch]==0.6.0"}
TORCH = "torch==2.13.0"
PROGRAMS: dict[str, tuple[str, str, list[str]]] = {
    "flatfed": ("own", "with_flatfed.py", []),
    "Flower, 2 workers": ("flower", "with_flower.py", []),
    "pfl, 1 thread": ("pfl", "with_pfl.py", ["1"]),
    "pfl, 2 threads": ("pfl", "with_pfl.py", ["2"]),
    "bare loop, 1 thread": ("own", "with_bare.py", ["1"]),
    "bare loop, 2 threads": ("own", "with_bare.py", ["2"]),
}
LIMIT = "two bare loops"
TOLERANCE = 1e-3


def python_of(environment: str, root: Path) -> str:
    if environment == "own":
        return sys.executable
    folder = root / environment
    program = folder / "bin" / "python"
    if not program.exists():
        Console().print(f"setting up {PEERS[environment]} in {folder}")
        venv.create(folder, with_pip=True)
        for packages in ([TORCH], [PEERS[environment]]):
            subprocess.run([program, "-m", "pip", "install", "--quiet", *packages], check=True)
    return str(program)


def start(python: str, program: str, arguments: list[str]) -> subprocess.Popen[str]:
    quiet = {"PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [python, str(HERE / program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=HERE,
        env={**os.environ, **quiet},
    )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, complaints = process.communicate()
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not lines:
        sys.exit(f"{process.args} failed:\n{complaints[-2000:]}")
    measured: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return measured


def limit(task: str, cohorts: Path) -> dict[str, Any]:
    """Two loops side by side, one a core, each with half of every cohort."""
    halves = []
    for number in range(2):
        half = cohorts.with_name(f"half-{number}.json")
        half.write_text(json.dumps([members[number::2] for members in json.loads(cohorts.read_text())]))
        halves.append(start(sys.executable, "with_bare.py", [task, str(half), "1", "channels_last"]))
    first, second = (result(process) for process in halves)
    return {"seconds": [max(pair) for pair in zip(first["seconds"], second["seconds"], strict=True)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--environments", type=Path, default=HERE / ".environments")
    options = parser.parse_args()
    pythons = {name: python_of(kind, options.environments) for name, (kind, _, _) in PROGRAMS.items()}
    training = Training(rounds=1, participants=PARTICIPANTS)
    with tempfile.TemporaryDirectory() as folder:
        cohorts = Path(folder) / "cohorts.json"
        chosen = [cohort(training, CLIENTS, number) for number in range(options.rounds + WARM_UP)]
        cohorts.write_text(json.dumps(chosen))
        for task in options.tasks:
            runs: dict[str, list[dict[str, Any]]] = {}
            turns = [*PROGRAMS, LIMIT] * options.repeats
            for name in track(turns, f"{task}, frameworks in turn", console=Console(stderr=True)):
                if name == LIMIT:
                    done = limit(task, cohorts)
                else:
                    _, program, arguments = PROGRAMS[name]
                    done = result(start(pythons[name], program, [task, str(cohorts), *arguments]))
                runs.setdefault(name, []).append(done)
            show(task, runs)


def show(task: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    losses = {name: repeats[0]["loss"] for name, repeats in runs.items() if "loss" in repeats[0]}
    seconds = {name: [value for run in repeats for value in run["seconds"]] for name, repeats in runs.items()}
    table = Table(title=f"{task} ({runs['flatfed'][0]['path']} path)", title_justify="left")
    for header in ("", "best, ms a round", "median", "best / flatfed's", "final loss"):
        table.add_column(header, justify="right" if header else "left")
    for name, values in seconds.items():
        ratio = min(values) / min(seconds["flatfed"])
        loss = f"{losses[name]:.5f}" if name in losses else "–"
        median = 1000 * statistics.median(values)
        table.add_row(name, f"{1000 * min(values):.1f}", f"{median:.1f}", f"{ratio:.2f}", loss)
    Console().print(table)
    spread = max(losses.values()) - min(losses.values())
    if spread > TOLERANCE:
        sys.exit(f"{task}: the final losses differ by {spread:.2g}; it was not the same work")


if __name__ == "__main__":
    main()
