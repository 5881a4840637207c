"""The examples run as they stand, for a few rounds, and learn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ROUNDS = {"tabular": (12, 0.8), "text_classifier": (4, 0.7), "segmentation": (3, 0.8), "forecast": (6, 0.8)}
"""For how many rounds each is run, and the accuracy or explained variance that it must reach by then."""


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ROUNDS)


@pytest.mark.parametrize("name", ROUNDS)
def test_an_example_runs(name, tmp_path):
    if name == "text_classifier":
        pytest.importorskip("transformers", reason="needs the extra transformers")
    if name == "forecast":
        pytest.importorskip("pyarrow", reason="needs the extra parquet")
    rounds, least = ROUNDS[name]
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--rounds", str(rounds)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accuracy = re.search(r"(?:accuracy|variance).*? (\d\.\d+)", done.stdout)
    assert accuracy is not None and float(accuracy[1]) > least, done.stdout
