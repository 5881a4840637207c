"""How a round's time and the peak memory grow with participants, population and parameters.

    python benchmarks/growth.py [--rounds 5] [--picture growth.svg]

One thing grows at a time, for a stateless and a stateful algorithm, each case in a process of its own. Prints
the table and draws it, with logarithmic axes: growth in proportion is a slope of 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from html import escape
from math import ceil, floor, log10
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from tables import markdown
from torch import nn

import flatfed as ff
from flatfed.models import MODELS

COLOURS = {"fedavg": "#0072b2", "scaffold": "#d55e00"}
"""A stateless and a stateful algorithm."""
BATCH, STEPS, WARM_UP = 20, 5, 1
SHAPES: dict[str, tuple[int, ...]] = {"logistic_regression": (784,), "mlp": (784,)}
IMAGE = (3, 32, 32)
PROCESSES = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


@dataclass(frozen=True)
class Case:
    """What a process of its own trains."""

    algorithm: str
    participants: int = 10
    population: int = 10_000
    model: str = "logistic_regression"


GROWTH: dict[str, list[tuple[float, dict[str, int | str]]]] = {
    "participants": [(count, {"participants": count}) for count in (10, 100, 1000, 10_000)],
    "population": [(count, {"population": count}) for count in (1000, 10_000, 1_000_000, 10_000_000)],
    "parameters": [
        (7_850, {"model": "logistic_regression"}),
        (118_282, {"model": "mlp"}),
        (797_962, {"model": "feddyn_cnn"}),
        (11_173_962, {"model": "resnet18"}),
    ],
}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](SHAPES.get(name, IMAGE), 10)


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Run in a process of its own: the median seconds of a round, and the peak of memory in megabytes.

    The memory is that of the largest process, the training's own or a worker's.
    """
    shape = SHAPES.get(case.model, IMAGE)

    def load(client: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(client)
        targets = torch.randint(10, (BATCH,), generator=generator)
        return torch.randn(BATCH, *shape, generator=generator), targets

    ends = [time.perf_counter()]
    model = make_model(case.model)
    ff.train(
        ff.Task(model, ff.Federation.from_function(case.population, load)),
        ff.build(case.algorithm),
        ff.Training(
            rounds=rounds + WARM_UP,
            participants=case.participants,
            local_steps=STEPS,
            batch_size=BATCH,
            lr=0.01,
        ),
        callbacks=[lambda progress: ends.append(time.perf_counter())],
    )
    seconds = [after - before for before, after in itertools.pairwise(ends)][WARM_UP:]
    return {
        "seconds": statistics.median(seconds),
        "megabytes": max(resource.getrusage(who).ru_maxrss for who in PROCESSES) / 1024,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


Points = list[tuple[float, str, dict[str, float]]]
"""How far it has grown, the algorithm, and what was measured."""


@dataclass(frozen=True)
class Panel:
    """A rectangle of the picture with logarithmic axes."""

    left: int
    top: int
    across: tuple[float, float]
    """The exponents of ten at its left and right."""
    up: tuple[int, int]
    width: int = 250
    height: int = 170

    def place(self, x: float, y: float) -> tuple[float, float]:
        shares = [
            (log10(value) - low) / (high - low)
            for value, (low, high) in zip((x, y), (self.across, self.up), strict=True)
        ]
        return self.left + self.width * shares[0], self.top + self.height * (1 - shares[1])

    def frame(self, title: str, marks: list[float]) -> list[str]:
        parts = [
            f"<rect x='{self.left}' y='{self.top}' width='{self.width}' height='{self.height}' fill='none' "
            "stroke='#bbb'/>",
            f"<text x='{self.left}' y='{self.top - 10}' font-weight='bold'>{escape(title)}</text>",
        ]
        for exponent in range(self.up[0], self.up[1] + 1):
            _, y = self.place(1.0, 10.0**exponent)
            parts.append(f"<path d='M{self.left} {y:.1f}h{self.width}' stroke='#e4e4e4'/>")
            parts.append(
                f"<text x='{self.left - 6}' y='{y + 4:.1f}' text-anchor='end'>{10.0**exponent:g}</text>"
            )
        for mark in marks:
            x, bottom = self.place(mark, 10.0 ** self.up[0])
            parts.append(
                f"<text x='{x:.1f}' y='{bottom + 16:.1f}' text-anchor='middle'>{_short(mark)}</text>"
            )
        return parts

    def curve(self, points: list[tuple[float, float]], colour: str) -> list[str]:
        places = [self.place(*point) for point in points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dots = [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{colour}'/>" for x, y in places]
        return [f"<polyline points='{joined}' fill='none' stroke='{colour}' stroke-width='2'/>", *dots]


def picture(measured: dict[str, Points]) -> str:
    """Time above, memory below, a column for each thing that grows."""
    parts = [
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 1000 490' "
        "font-family='Helvetica, Arial, sans-serif' font-size='11' fill='#222'>",
        "<title>Cost growth</title><rect width='100%' height='100%' fill='white'/>",
    ]
    for number, (algorithm, colour) in enumerate(COLOURS.items()):
        x = 70 + 120 * number
        parts.append(f"<rect x='{x}' y='8' width='18' height='4' fill='{colour}'/>")
        parts.append(f"<text x='{x + 24}' y='14'>{algorithm}</text>")
    for row, (field, unit) in enumerate((("seconds", "seconds a round"), ("megabytes", "peak megabytes"))):
        values = [log10(result[field]) for points in measured.values() for _, _, result in points]
        up = floor(min(values)), ceil(max(values))
        for column, (what, points) in enumerate(measured.items()):
            marks = sorted({x for x, _, _ in points})
            panel = Panel(70 + 320 * column, 50 + 225 * row, (log10(marks[0]), log10(marks[-1])), up)
            parts += panel.frame(f"{unit} against {what}", marks)
            for algorithm, colour in COLOURS.items():
                line = [(x, result[field]) for x, name, result in points if name == algorithm]
                parts += panel.curve(line, colour)
    return "\n".join([*parts, "</svg>\n"])


def _short(count: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:g}"


def in_own_process(case: Case, rounds: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--rounds", str(rounds), "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--picture", type=Path, default=Path("growth.svg"))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        result = measure(Case(**json.loads(options.case)), options.rounds)
        sys.stdout.write(f"{json.dumps(result)}\n")
        return
    cases = [
        (what, x, Case(algorithm, **change))  # type: ignore[arg-type]
        for what, steps in GROWTH.items()
        for x, change in steps
        for algorithm in COLOURS
    ]
    measured: dict[str, Points] = {what: [] for what in GROWTH}
    for what, x, case in track(cases, "cases", console=Console(stderr=True)):
        result = in_own_process(case, options.rounds)
        measured[what].append((result["parameters"] if what == "parameters" else x, case.algorithm, result))
    units = [f"{name}, {unit}" for name in COLOURS for unit in ("ms", "MB")]
    cells = [["what grows", "to", *units]]
    for what, points in measured.items():
        for x in dict.fromkeys(x for x, _, _ in points):
            numbers: list[str] = []
            for name in COLOURS:
                (result,) = [result for other, algorithm, result in points if (other, algorithm) == (x, name)]
                numbers += [f"{1000 * result['seconds']:.1f}", f"{result['megabytes']:.0f}"]
            cells.append([what, f"{x:,.0f}", *numbers])
    sys.stdout.write(f"{markdown(cells)}\n")
    options.picture.write_text(picture(measured))


if __name__ == "__main__":
    main()
