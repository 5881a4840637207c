"""Starting the programs of this folder and reading what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from work import CLIENTS, PARTICIPANTS, TASKS

from flatfed.core.sampling import cohort
from flatfed.core.settings import Training

ROOT = Path(__file__).parents[2]
THREADING = ("OMP_", "GOMP_", "KMP_", "MKL_")


def write_cohorts(path: Path, task: str, rounds: int | None = None) -> Path:
    """Who takes part in which round of a task, as flatfed draws it."""
    training = Training(rounds=1, participants=PARTICIPANTS)
    count = TASKS[task].warm_up + (rounds or TASKS[task].rounds)
    path.write_text(json.dumps([cohort(training, CLIENTS, number) for number in range(count)]))
    return path


def start(
    arguments: Sequence[str], python: str = sys.executable, tree: Path | None = ROOT
) -> subprocess.Popen[str]:
    """A program of benchmarks/peers, with flatfed from a tree or without it.

    Nobody inherits a setting of torch's threads: whoever wants one makes it.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(THREADING)}
    environment |= {"PYTHONWARNINGS": "ignore", "PYTHONPATH": str(tree / "src") if tree else ""}
    return subprocess.Popen(
        [python, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=(tree or ROOT) / "benchmarks" / "peers",
        env=environment,
    )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, complaints = process.communicate()
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not lines:
        sys.exit(f"{process.args} failed:\n{complaints[-2000:]}")
    measured: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return measured
