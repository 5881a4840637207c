"""What the evaluation of 10,000 samples takes, and whether it would gain from running beside the next round.

    python benchmarks/evaluation.py [--tasks mlp lenet5 cnn] [--samples 10000] [--rounds 6] [--busy]

Best of several, milliseconds: evaluations by batch size on all cores, and with the engine's own batches on
one; then rounds without evaluation, with one after each round, and with one in a thread beside the next
round. The last is an experiment: it would gain if a core were idle while clients train.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from machine import StealTime, refuse_unless_idle
from rich.console import Console
from rich.progress import track
from tables import markdown

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from work import CLIENTS, PARTICIPANTS, TASKS, Task

import flatfed as ff
from flatfed.engines import threads
from flatfed.engines.evaluator import Snapshot
from flatfed.engines.local import LocalEngine
from flatfed.training.start import start_engine

SIZES = (64, 128, 512)
WARM_UP = 2


def drawn(task: Task, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(task.classes, (samples,), generator=generator)
    if task.characters:
        return torch.randint(80, (samples, *task.shape), generator=generator), targets
    return torch.randn(samples, *task.shape, generator=generator), targets


def settings(task: Task, rounds: int = 1) -> ff.Training:
    return ff.Training(
        rounds=rounds,
        participants=PARTICIPANTS,
        local_steps=task.steps,
        batch_size=task.batch,
        lr=task.rate,
    )


def evaluations(task: Task, data: ff.Federation, repeats: int) -> dict[str, float]:
    """Seconds by batch size and number of cores."""
    work = ff.Task(task.model(), data)
    rule = threads._batch_size
    seconds: dict[str, float] = {}
    for workers in (None, 1):
        engine = start_engine(work, ff.fedavg(), settings(task), ff.Execution(workers=workers))
        snapshot = Snapshot(ff.model_to_vector(work.model), {})
        own = rule(engine.plan.layout)
        names = {f"of {size}": size for size in SIZES} if workers is None else {"one core": own}
        try:
            for name, size in [*names.items()] * repeats:
                threads._batch_size = lambda _, size=size: size  # type: ignore[misc]
                began = time.perf_counter()
                engine.evaluate(snapshot, data.test)  # type: ignore[arg-type]
                seconds[name] = min(seconds.get(name, 1e9), time.perf_counter() - began)
        finally:
            threads._batch_size = rule
            engine.close()
    return seconds | {"chosen": float(own)}


def rounds(task: Task, data: ff.Federation, count: int, when: str) -> float:
    """Seconds of a round, on average."""
    plain, running, ends = LocalEngine.evaluate, list[threading.Thread](), list[float]()

    def beside(self: LocalEngine, snapshot: Snapshot, samples: Any) -> dict[str, float]:
        while running:
            running.pop().join()
        running.append(threading.Thread(target=plain, args=(self, snapshot, samples)))
        running[0].start()
        return {"loss": 0.0}

    ways = {"none": lambda *_: {"loss": 0.0}, "after": plain, "beside": beside}
    LocalEngine.evaluate = ways[when]  # type: ignore[method-assign,assignment]
    try:
        ff.train(
            ff.Task(task.model(), data),
            ff.fedavg(),
            settings(task, count + WARM_UP),
            callbacks=[lambda progress: ends.append(time.perf_counter())],
        )
    finally:
        LocalEngine.evaluate = plain  # type: ignore[method-assign]
    return (ends[-1] - ends[WARM_UP - 1]) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["mlp", "lenet5", "cnn"], choices=list(TASKS))
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--busy", action="store_true", help="measure beside other programs")
    options = parser.parse_args()
    if not options.busy:
        refuse_unless_idle()
    steal = StealTime()
    sizes = [f"batches of {size}" for size in SIZES]
    kinds = ["a round", "with evaluation", "evaluation beside the next"]
    cells = [["model", *sizes, "its own", "its own, one core", *kinds]]
    for name in track(options.tasks, "models", console=Console(stderr=True)):
        task = TASKS[name]
        clients = [task.client(number) for number in range(CLIENTS)]
        data = ff.Federation.from_tensors(clients, drawn(task, options.samples))
        measured = evaluations(task, data, options.repeats)
        ways = ("none", "after", "beside")
        lengths = [
            min(rounds(task, data, options.rounds, when) for _ in range(options.repeats)) for when in ways
        ]
        values = [*(measured[f"of {size}"] for size in SIZES), measured["one core"], *lengths]
        listed = [f"{1000 * value:.0f}" for value in values]
        cells.append([name, *listed[:3], f"{measured['chosen']:.0f}", *listed[3:]])
    sys.stdout.write(f"{markdown(cells)}\n\nsteal time {steal.share():.1%}\n")


if __name__ == "__main__":
    main()
