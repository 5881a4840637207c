"""How large a report of ten methods over 1000 rounds is, and how soon a browser shows it.

    python benchmarks/report.py [--repeats 3]

Needs Debian's chromium and chromium-driver. Prints the seconds from opening the file to the text and to the
first picture, beside an empty page with the same browser; the best of the repeats.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from selenium import webdriver

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from report.example import write_run

from flatfed.algorithms import ALGORITHMS
from flatfed.report import write_report

METHODS, ROUNDS, SEEDS = 10, 1000, 3
PATIENCE = 60.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def seconds_to(page: Path, folder: Path) -> tuple[float, float]:
    """Until the document is there, and until the first figure is drawn (if it has any)."""
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    with webdriver.Chrome(options=options, service=service) as browser:
        began = time.perf_counter()
        browser.get(page.as_uri())
        text = time.perf_counter() - began
        # Pictures are drawn when they are scrolled to.
        scroll = "document.querySelector('[data-figure]')?.scrollIntoView({behavior: 'instant'})"
        browser.execute_script(scroll)
        drawn = "return !document.querySelector('[data-figure]') || !!document.querySelector('.main-svg')"
        while not browser.execute_script(drawn) and time.perf_counter() - began < PATIENCE:
            time.sleep(0.02)
        return text, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        runs = [
            write_run(root / f"runs/{name}-{seed}", name, seed=seed, rounds=ROUNDS)
            for name in list(ALGORITHMS)[:METHODS]
            for seed in range(SEEDS)
        ]
        full, empty = root / "report.html", root / "empty.html"
        write_report(runs, full)
        empty.write_text("<!doctype html><title>empty</title><p>nothing</p>")
        table = Table("page", "MB", "text, s", "first picture, s")
        for page in (empty, full):
            times = [seconds_to(page, root / f"profile-{page.stem}-{count}") for count in range(repeats)]
            size = page.stat().st_size / 1e6
            table.add_row(
                page.stem,
                f"{size:.2f}",
                f"{min(text for text, _ in times):.2f}",
                f"{min(drawn for _, drawn in times):.2f}",
            )
        Console().print(table)


if __name__ == "__main__":
    main()
