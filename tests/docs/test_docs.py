"""The generated pages are all there and up to date, and the README's example runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from flatfed import ALGORITHMS
from flatfed.algorithms import equations

ROOT = Path(__file__).parents[2]


def generated() -> dict[Path, str]:
    specification = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.pages()


def test_every_page_is_there_and_up_to_date():
    pages = generated()
    assert len(pages) == len(ALGORITHMS) + 7
    for path, text in pages.items():
        assert (ROOT / path).is_file(), f"{path} is missing: run `make docs`"
        assert (ROOT / path).read_text() == text, f"{path} is out of date: run `make docs`"


def test_no_page_is_left_over():
    there = {path.stem for path in (ROOT / "docs" / "algorithms").glob("*.md")} - {"README"}
    assert there == set(ALGORITHMS)


def test_every_algorithm_states_equations_limits_and_deviations():
    for name in ALGORITHMS:
        text = equations(name)
        assert re.match(r"\S+: \S.*\.\n\n    ", text), f"{name}: start with 'Name: what it is.' and equations"
        assert "\nLimits: " in text and "\nDeviations: " in text, name


WITHOUT_IDENTIFIER = {"dynafed_syn_only", "fedadamw", "fedanag", "fedlnag", "fedmuon"}
"""Variants of something that is cited, and two papers cited by their titles."""


def test_every_algorithm_cites_its_paper():
    cited = {name for name in ALGORITHMS if re.search(r"arXiv:\d{4}\.\d{5}|doi:|openreview", equations(name))}
    assert ALGORITHMS.keys() - cited == WITHOUT_IDENTIFIER


def test_the_readme_counts_the_algorithms():
    assert re.search(r"(\d+) algorithms", (ROOT / "README.md").read_text())[1] == str(len(ALGORITHMS))


def test_the_readme_example_runs(tmp_path):
    blocks = re.findall(r"```python\n(import flatfed.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    done = subprocess.run(
        [sys.executable, "-c", blocks[0]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.safetensors").is_file()
    assert float(done.stdout.split()[0]) > 0
