"""What share of the machine's speed flatfed's rounds reach, and where the rest of their time goes.

    python benchmarks/roofline.py [--tasks mlp cnn] [--no-profile] [--busy] [--output roofline]

The arithmetic of a round is counted, the machine's speed measured with large products, convolutions and
copies. The roofline of a round is the longer of two times, on all cores: its arithmetic at the speed of the
best large operation, and the traffic that it cannot avoid at the speed of copies (a step reads the parameters
forwards, backwards and for the update, writes the gradient, reads that and writes them back). The profile is
of one worker on one core: phases of a round by the clock, then operations of a second run by torch.profiler.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import StealTime, processor_name, refuse_unless_idle
from rich.console import Console
from rich.progress import track
from tables import markdown
from torch._C._profiler import _ExperimentalConfig
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from programs import result, start, write_cohorts
from work import CLIENTS, PARTICIPANTS, TASKS, Task

import flatfed as ff
from flatfed.data.federation import ClientData
from flatfed.engines import worker
from flatfed.engines.oracles import MatrixGradients, ModuleOracle

CORES = len(os.sched_getaffinity(0))
LAYOUTS = {"one core": (1, 1), "a process per core": (CORES, 1), "a thread per core": (1, CORES)}
"""Processes and threads of each."""
IN_CACHE, IN_MEMORY = 2**20, 2**29
PASSES = 6
"""Over the parameters in a step, at least."""
OPERATIONS = 8
TESTED = 1000
"""Samples of the evaluation that the profile has."""


def kernels(dtype: torch.dtype) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """What is timed: its name, its operations or bytes, and a call."""
    name = str(dtype).removeprefix("torch.")
    left, right = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    yield f"{name} products, GFLOP/s", 2 * 2048**3, functools.partial(torch.mm, left, right)
    images = torch.randn(16, 128, 32, 32).to(dtype, memory_format=torch.channels_last)
    filters = torch.randn(128, 128, 3, 3).to(dtype, memory_format=torch.channels_last)
    work = 2 * 128 * 9 * 16 * 128 * 32 * 32
    yield f"{name} convolutions, GFLOP/s", work, functools.partial(F.conv2d, images, filters, padding=1)
    if dtype == torch.float32:
        for where, size in (("in cache", IN_CACHE), ("in memory", IN_MEMORY)):
            source = torch.ones(size // 4)
            yield f"copies {where}, GB/s", 2 * size, functools.partial(torch.empty_like(source).copy_, source)


def measure_rates(dtype: torch.dtype, threads: int, barrier: Any, rates: Any) -> None:
    torch.set_num_threads(threads)
    for name, work, call in kernels(dtype):
        call()
        barrier.wait(timeout=120)
        lengths, deadline = [], time.perf_counter() + 1
        while len(lengths) < 3 or time.perf_counter() < deadline:
            began = time.perf_counter()
            call()
            lengths.append(time.perf_counter() - began)
        rates.put((name, work / min(lengths) / 1e9))


def together(dtype: torch.dtype, processes: int, threads: int) -> dict[str, float] | None:
    """The best that all processes reach side by side; nothing if one of them dies."""
    context = multiprocessing.get_context("spawn")
    barrier, rates, total = context.Barrier(processes), context.Queue(), defaultdict[str, float](float)
    arguments = (dtype, threads, barrier, rates)
    running = [context.Process(target=measure_rates, args=arguments) for _ in range(processes)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    if any(process.exitcode for process in running):
        return None
    for _ in range(processes * len(list(kernels(dtype)))):
        name, rate = rates.get(timeout=10)
        total[name] += rate
    return dict(total)


def machine_rates(processes: int, threads: int) -> dict[str, float]:
    """Of both precisions; some virtual machines promise AMX and then kill a program that uses it."""
    plain = together(torch.float32, processes, threads)
    half = together(torch.bfloat16, processes, threads)
    if half is None:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
        try:
            without = together(torch.bfloat16, processes, threads) or {}
        finally:
            del os.environ["ONEDNN_MAX_CPU_ISA"]
        half = {f"{name} (AMX off, as it crashes)": rate for name, rate in without.items()}
    return (plain or {}) | half


def round_flops(task: Task) -> int:
    """Counted in one step; fused kernels that the counter does not know are switched off for that."""
    model, (inputs, targets) = task.model(), task.client(0)
    with (
        torch.backends.mkldnn.flags(enabled=False),
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        F.cross_entropy(model(inputs), targets).backward()
    return counter.get_total_flops() * task.steps * PARTICIPANTS


def roofline(task: Task, rates: dict[str, float]) -> float:
    """Seconds of a round."""
    speed = max(rates["float32 products, GFLOP/s"], rates["float32 convolutions, GFLOP/s"])
    size = 4 * sum(parameter.numel() for parameter in task.model().parameters())
    bandwidth = rates[f"copies {'in cache' if size <= IN_CACHE else 'in memory'}, GB/s"]
    traffic = PASSES * size * task.steps * PARTICIPANTS
    return max(round_flops(task) / speed, traffic / bandwidth) / 1e9


class Phases:
    """Seconds of named phases, each without those inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*arguments: Any, **options: Any) -> Any:
            with self.phase(name):
                return function(*arguments, **options)

        return inside

    def timed_items(self, name: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def inside(*arguments: Any) -> Iterator[Any]:
            items, end = function(*arguments), object()
            step = self.timed(name, functools.partial(next, items, end))
            return iter(step, end)

        return inside

    @contextmanager
    def installed(self) -> Iterator[None]:
        """With one worker there is one thread at a time that does any of this."""
        places = [
            (worker.Worker, "train", "results of a client"),
            (worker, "client_round", "steps, algebra"),
            (ModuleOracle, "_gradients", "gradients"),
            (MatrixGradients, "plain", "gradients"),
            (worker.Worker, "_staged", "staging"),
            (worker.Worker, "_evaluated", "staging"),
            (ClientData, "batch", "staging"),
            (worker.Evaluator, "evaluate", "evaluation"),
            (worker, "stacked_batches", "staging"),
        ]
        originals = [getattr(owner, name) for owner, name, _ in places]
        for (owner, name, label), original in zip(places, originals, strict=True):
            wrap = self.timed_items if name == "stacked_batches" else self.timed
            setattr(owner, name, wrap(label, original))
        try:
            yield
        finally:
            for (owner, name, _), original in zip(places, originals, strict=True):
                setattr(owner, name, original)


def train(task: Task, rounds: int, tick: Callable[[ff.Progress], None]) -> None:
    """Rounds on one core, the last of which evaluates."""
    clients = [task.client(number) for number in range(CLIENTS)]
    count = min(TESTED // task.batch, CLIENTS)
    test = (torch.cat([own[0] for own in clients[:count]]), torch.cat([own[1] for own in clients[:count]]))
    training = ff.Training(
        rounds=rounds,
        participants=PARTICIPANTS,
        local_steps=task.steps,
        batch_size=task.batch,
        lr=task.rate,
        evaluate_every=rounds,
    )
    federation = ff.Federation.from_tensors(clients, test)
    execution = ff.Execution(workers=1)
    ff.train(ff.Task(task.model(), federation), ff.fedavg(), training, execution, callbacks=[tick])


def phases_of_round(task: Task, rounds: int) -> dict[str, float]:
    """Seconds of each phase of a round, and of the evaluation after it."""
    phases, ends = Phases(), [0.0]

    def tick(progress: ff.Progress) -> None:
        ends.append(time.perf_counter())
        if progress.round == task.warm_up:
            phases.seconds.clear()
            ends[:] = [time.perf_counter()]

    with phases.installed():
        train(task, rounds + task.warm_up, tick)
    evaluation = phases.seconds.pop("evaluation", 0.0)
    rest = ends[-1] - ends[0] - evaluation - sum(phases.seconds.values())
    seconds = {**phases.seconds, "hand-over, sums, server": rest}
    return {name: value / rounds for name, value in seconds.items()} | {"evaluation": evaluation}


def operations_of_round(task: Task, rounds: int) -> dict[str, float]:
    """Shares of the time inside torch's operations, the largest first."""
    profiler = profile(
        activities=[ProfilerActivity.CPU],
        experimental_config=_ExperimentalConfig(profile_all_threads=True),  # type: ignore[no-untyped-call]
    )

    def tick(progress: ff.Progress) -> None:
        if progress.round == task.warm_up:
            profiler.start()
        if progress.round == task.warm_up + rounds:
            profiler.stop()

    # The one after the last evaluates.
    train(task, task.warm_up + rounds + 1, tick)
    seconds = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    total = sum(seconds.values())
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    return {name.removeprefix("aten::"): value / total for name, value in ranked[:OPERATIONS]}


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 0.1 else f"{1000 * seconds:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="instead of each task's own number")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("roofline"), help="for OUTPUT.md and .json")
    parser.add_argument("--busy", action="store_true", help="measure beside other programs; recorded")
    options = parser.parse_args()
    if not options.busy:
        refuse_unless_idle()
    steal, stderr = StealTime(), Console(stderr=True)
    machine = {
        name: machine_rates(*layout) for name, layout in track(LAYOUTS.items(), "machine", console=stderr)
    }
    fast = machine["a process per core"]
    peaks = [["", *machine], *([kind, *(f"{machine[name][kind]:.1f}" for name in machine)] for kind in fast)]
    shares = [
        ["model", "GFLOP a round", "roofline, ms", "flatfed, best ms", "median", "share of the roofline"]
    ]
    profiles = [["model", "phases of a round on one core, ms", "gradients, share of one core's roofline"]]
    operations = [["model", "operations, share of the time inside torch"]]
    raw: dict[str, Any] = {}
    for name in track(options.tasks, "models", console=stderr):
        task = TASKS[name]
        seconds: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            cohorts = write_cohorts(Path(folder) / "cohorts.json", name, options.rounds)
            for _ in range(options.repeats):
                seconds += result(start(["with_flatfed.py", name, str(cohorts)]))["seconds"]
        flops, bound, best = round_flops(task), roofline(task, fast), min(seconds)
        times = [milliseconds(value) for value in (bound, best, statistics.median(seconds))]
        shares.append([name, f"{flops / 1e9:.2f}", *times, f"{bound / best:.0%}"])
        raw[name] = {"flops": flops, "roofline": bound, "seconds": seconds}
        if not options.no_profile:
            rounds = options.rounds or task.rounds
            phases, inside = phases_of_round(task, rounds), operations_of_round(task, rounds)
            raw[name] |= {"phases": phases, "operations": inside}
            share = roofline(task, machine["one core"]) / phases["gradients"]
            listed = ", ".join(f"{key} {milliseconds(value)}" for key, value in phases.items())
            profiles.append([name, listed, f"{share:.0%}"])
            operations.append([name, ", ".join(f"{key} {value:.0%}" for key, value in inside.items())])
    about = {
        "machine": f"{CORES} cores, {processor_name()}, torch {torch.__version__}",
        "steal time": f"{steal.share():.1%}",
        "other programs": "may have run (--busy)" if options.busy else "none when it began",
    }
    tables = [peaks, shares] if options.no_profile else [peaks, shares, profiles, operations]
    facts = "\n".join(f"- {key}: {value}" for key, value in about.items())
    text = "\n\n".join([*map(markdown, tables), facts]) + "\n"
    options.output.with_suffix(".md").write_text(text)
    options.output.with_suffix(".json").write_text(
        json.dumps({"about": about, "machine": machine, "tasks": raw}, indent=1)
    )
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
