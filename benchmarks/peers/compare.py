"""flatfed against Flower, pfl, fluke and hand-written loops, on the same work in one run.

    python benchmarks/peers/compare.py [--tasks mlp cnn] [--minutes 18] [--environments FOLDER] [--busy]
    python benchmarks/peers/compare.py --precision bfloat16      # where frameworks have it of their own

Peers get environments of their own on first use. Every run of a framework is a process of its own, one after
the other, with the framework's own defaults but for the configurations below. The first repetition tries all
of them; the later ones, as many as the minutes allow, only each framework's best two. The final losses must
agree, or it was not the same work. It refuses to run on a machine that others use, unless --busy. BlazeFL is
not here: all its versions need Python 3.12 or later.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from programs import ROOT, result, start, write_cohorts
from rich.console import Console
from rich.progress import track
from work import LARGE, PRECISIONS, TASKS

sys.path.insert(0, str(ROOT / "benchmarks"))
from machine import StealTime, processor_name, refuse_unless_idle
from tables import markdown

TORCH = ["torch==2.13.0"]
FLUKE_NEEDS = (
    "cerberus clearml datasets diskcache hydra-core matplotlib opacus pandas psutil rich scikit-learn "
    "seaborn tensorboard torchmetrics typer wandb"
)
ENVIRONMENTS = {
    "flower": [TORCH, ["flwr[simulation]==1.41.0"]],
    "pfl": [TORCH, ["pfl[pytorch]==0.6.0"]],
    # pip would search for hours among versions of what fluke requires.
    "fluke": [
        [*TORCH, "torchvision==0.28.0"],
        FLUKE_NEEDS.split(),
        ["--no-deps", "fluke-fl==0.8.1"],
    ],
}
CORES = len(os.sched_getaffinity(0))
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
"""Of the final losses, whose last digits depend on the order of operations."""
WITHOUT_AUTOCAST = {"fluke"}
WORTH_REPEATING = 1.2
"""Configurations slower than that times the framework's best are tried once."""


@dataclass(frozen=True)
class Way:
    """A framework and how it is configured."""

    framework: str
    configuration: str
    environment: str
    program: tuple[str, ...]
    options: tuple[str, ...] = ()
    copies: int = 1
    """Side by side, each with its share of every cohort."""

    def suits(self, task: str) -> bool:
        return "channels_last" not in self.options or len(TASKS[task].shape) == 3


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(CORES))
BARE = ("with_bare.py",)
WAYS = [
    Way("flatfed", "default", "own", ("with_flatfed.py",)),
    *(
        Way("Flower", f"workers {count}, threads {threads}", "flower", ("with_flower.py",), (count, threads))
        for count, threads in ((str(CORES), "1"), (str(2 * CORES), "1"), ("1", str(CORES)))
    ),
    Way("pfl", "1 thread", "pfl", ("with_pfl.py",), ("1",)),
    Way("pfl", f"{CORES} threads", "pfl", ("with_pfl.py",), (str(CORES),)),
    Way("pfl", f"{CORES} processes", "pfl", (*TORCHRUN, "with_pfl.py"), ("1",)),
    Way("fluke", "1 thread", "fluke", ("with_fluke.py",), ("1",)),
    Way("fluke", f"{CORES} threads", "fluke", ("with_fluke.py",), (str(CORES),)),
    Way("bare loop", "1 thread", "own", BARE, ("1",)),
    Way("bare loop", f"{CORES} threads", "own", BARE, (str(CORES),)),
    Way("a bare loop per core", "contiguous", "own", BARE, ("1",), CORES),
    Way("a bare loop per core", "channels last", "own", BARE, ("1", "channels_last"), CORES),
]
FRAMEWORKS = list(dict.fromkeys(way.framework for way in WAYS))
PEERS = ("Flower", "pfl", "fluke")
Runs = dict[Way, list[dict[str, Any]]]


def python_of(environment: str, root: Path) -> str:
    if environment == "own":
        return sys.executable
    program = root.absolute() / environment / "bin" / "python"
    if not program.exists():
        Console().print(f"setting up {environment} in {program.parents[1]}")
        venv.create(program.parents[1], with_pip=True)
        for packages in ENVIRONMENTS[environment]:
            subprocess.run([program, "-m", "pip", "install", "--quiet", *packages], check=True)
    return str(program)


def run(way: Way, python: str, task: str, cohorts: Path, precision: str) -> dict[str, Any]:
    steal, processes = StealTime(), []
    for number in range(way.copies):
        share = cohorts.with_name(f"share-{number}.json")
        rounds = [members[number :: way.copies] for members in json.loads(cohorts.read_text())]
        share.write_text(json.dumps(rounds))
        tree = ROOT if way.environment == "own" else None
        processes.append(start([*way.program, task, str(share), *way.options, precision], python, tree))
    measured = [result(process) for process in processes]
    seconds = [max(lengths) for lengths in zip(*(one["seconds"] for one in measured), strict=True)]
    if way.copies > 1:
        del measured[0]["loss"]  # Each loop has averaged its own clients alone.
    return measured[0] | {"seconds": seconds, "steal": steal.share()}


def best(runs: list[dict[str, Any]]) -> float:
    return min(min(one["seconds"]) for one in runs)


def worth_repeating(runs: Runs) -> list[Way]:
    """The two best configurations of every framework, of which the second must be close."""
    chosen = []
    for framework in dict.fromkeys(way.framework for way in runs):
        ranked = sorted((way for way in runs if way.framework == framework), key=lambda way: best(runs[way]))
        limit = WORTH_REPEATING * best(runs[ranked[0]])
        chosen += [way for way in ranked[:2] if best(runs[way]) <= limit]
    return chosen


def check_losses(task: str, runs: Runs, precision: str) -> None:
    losses = {way: repeats[-1]["loss"] for way, repeats in runs.items() if "loss" in repeats[-1]}
    if losses and max(losses.values()) - min(losses.values()) > TOLERANCE[precision]:
        listed = "; ".join(f"{way.framework}, {way.configuration}: {losses[way]:.5f}" for way in losses)
        sys.exit(f"{task}: the final losses differ, so it was not the same work: {listed}")


def tables(measured: dict[str, Runs], about: dict[str, Any]) -> str:
    """Best and median milliseconds of a round by framework, and of every configuration."""
    present = {way.framework for runs in measured.values() for way in runs}
    names = [name for name in FRAMEWORKS if name in present]
    short = [["model", *names, "fastest peer / flatfed", "flatfed / a loop per core"]]
    long = [["model", "framework", "configuration", "torch", "runs", "best, ms", "median, ms", "final loss"]]
    for task, runs in measured.items():
        bests: dict[str, float] = {}
        cells: dict[str, str] = {}
        for way in sorted(runs, key=lambda way: (FRAMEWORKS.index(way.framework), best(runs[way]))):
            fastest = 1000 * best(runs[way])
            median = 1000 * statistics.median(value for one in runs[way] for value in one["seconds"])
            bests.setdefault(way.framework, fastest)
            cells.setdefault(way.framework, f"{fastest:.1f} ({median:.1f})")
            loss = runs[way][0].get("loss")
            numbers = [str(len(runs[way])), f"{fastest:.1f}", f"{median:.1f}", f"{loss:.5f}" if loss else ""]
            long.append([task, way.framework, way.configuration, runs[way][0]["torch"], *numbers])
        peers = [bests[name] for name in PEERS if name in bests]
        ours, loops = bests.get("flatfed"), bests.get("a bare loop per core")
        ahead = f"{min(peers) / ours:.2f}" if peers and ours else ""
        behind = f"{ours / loops:.2f}" if ours and loops else ""
        short.append([task, *(cells[name] for name in names), ahead, behind])
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    return f"Best round (median), ms:\n\n{markdown(short)}\n\n{markdown(long)}\n\n{facts}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    small = [name for name in TASKS if name not in LARGE]
    parser.add_argument("--tasks", nargs="+", default=small, choices=list(TASKS))
    parser.add_argument("--frameworks", nargs="+", default=FRAMEWORKS, choices=FRAMEWORKS)
    parser.add_argument("--precision", default="float32", choices=PRECISIONS)
    parser.add_argument("--minutes", type=float, default=18, help="begin no repetition that would end later")
    parser.add_argument("--repeats", type=int, default=5, help="at most so many repetitions")
    parser.add_argument("--rounds", type=int, help="instead of each task's own number")
    parser.add_argument("--environments", type=Path, default=Path(__file__).parent / ".environments")
    parser.add_argument("--output", type=Path, default=Path("peers"), help="for OUTPUT.md and .json")
    parser.add_argument("--busy", action="store_true", help="measure beside other programs; recorded")
    options = parser.parse_args()
    unfit = WITHOUT_AUTOCAST if options.precision == "bfloat16" else set()
    ways = [way for way in WAYS if way.framework in set(options.frameworks) - unfit]
    pythons = {way: python_of(way.environment, options.environments) for way in ways}
    if not options.busy:
        refuse_unless_idle()
    began, steal = time.monotonic(), StealTime()
    measured: dict[str, Runs] = {task: {} for task in options.tasks}
    slowest: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for task in options.tasks:
                turn = time.monotonic()
                if repeat and turn - began + slowest[task] > 60 * options.minutes:
                    continue
                cohorts = write_cohorts(Path(folder) / f"{task}.json", task, options.rounds)
                turns = (
                    worth_repeating(measured[task]) if repeat else [way for way in ways if way.suits(task)]
                )
                label = f"{task}, repetition {repeat + 1}"
                for way in track(turns, label, console=Console(stderr=True)):
                    measured[task].setdefault(way, []).append(
                        run(way, pythons[way], task, cohorts, options.precision)
                    )
                check_losses(task, measured[task], options.precision)
                slowest[task] = time.monotonic() - turn
                about = {
                    "commit": subprocess.getoutput(f"git -C {ROOT} describe --always --dirty"),
                    "machine": f"{CORES} cores, {processor_name()}, Python {platform.python_version()}",
                    "precision": options.precision,
                    "steal time": f"{steal.share():.1%}",
                    "other programs": "may have run (--busy)" if options.busy else "none when it began",
                    "minutes": round((time.monotonic() - began) / 60, 1),
                }
                save(options.output, measured, about)
    sys.stdout.write(options.output.with_suffix(".md").read_text())


def save(output: Path, measured: dict[str, Runs], about: dict[str, Any]) -> None:
    """Both files, whenever there is something new, so that a run that is cut short leaves what it has."""
    runs = {
        task: [asdict(way) | {"runs": repeats} for way, repeats in by_way.items()]
        for task, by_way in measured.items()
    }
    output.with_suffix(".json").write_text(json.dumps({"about": about, "tasks": runs}, indent=1))
    complete = {task: by_way for task, by_way in measured.items() if by_way}
    output.with_suffix(".md").write_text(tables(complete, about))


if __name__ == "__main__":
    main()
