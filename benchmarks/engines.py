"""What a round costs on Ray and on Flower, beside the local engine's, for an MLP and a CNN.

    python benchmarks/engines.py [--rounds 10] [--repeats 3] [--tasks mlp cnn] [--no-deployment]

The work is that of benchmarks/peers: FedAvg, 10 of 100 clients. Ray has a cluster of this machine with a
worker per core. Flower is measured twice: in one process with one worker, which shows what messages, their
checks and a new engine for each cost; and as a real deployment of four sites with TLS, where starting
processes for every message and polling for it cost most. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent / "peers"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fake_grid import FakeGrid
from federation_of_sites import SITES, Federation, deployed
from tables import markdown
from work import CLIENTS, PARTICIPANTS, RATE, TASKS, Stopwatch
from work import Task as Work

import flatfed as ff
from flatfed.deployment import FederationSettings, FederationSpec, client_app
from flatfed.deployment.server import serve

MODELS = {
    "mlp": ('name = "mlp"\nhidden = [200]', [784]),
    "cnn": ('name = "feddyn_cnn"', [3, 32, 32]),
}
"""The same models by their names in configuration files, and the shape of a sample."""
BESIDE = {
    "Ray": "local",
    "Flower, one process": "local, one worker",
    "Flower, deployed": "local, four clients",
}
"""What each engine's round is compared with."""
DATA = """
import torch

def load(context):
    site = int(str(context.node_config["name"]).removeprefix("site-"))
    generator = torch.Generator().manual_seed(site)
    inputs = torch.randn({batch}, *{shape}, generator=generator)
    return inputs, torch.randint(10, ({batch},), generator=generator)

test = None
"""


def training(work: Work, rounds: int, participants: int = PARTICIPANTS) -> ff.Training:
    return ff.Training(
        rounds=rounds + work.warm_up,
        participants=participants,
        local_steps=work.steps,
        batch_size=work.batch,
        lr=RATE,
        path="client",
    )


def on(execution: ff.Execution, work: Work, rounds: int, participants: int = PARTICIPANTS) -> list[float]:
    """Seconds of the rounds on the local engine or on Ray."""
    watch = Stopwatch(work.warm_up)
    federation = ff.Federation.from_tensors([work.client(number) for number in range(CLIENTS)])
    ff.train(
        ff.Task(work.model(), federation),
        ff.fedavg(),
        training(work, rounds, participants),
        execution,
        callbacks=[lambda progress: watch.tick()],
    )
    return watch.seconds


def in_process(work: Work, rounds: int) -> list[float]:
    """Seconds of the rounds through the real ServerApp and ClientApp, without processes and network."""
    watch = Stopwatch(work.warm_up)

    def load(context: Any) -> Any:
        return work.client(int(context.node_config["name"]))

    spec = FederationSpec(
        work.model,
        ff.fedavg(),
        training(work, rounds),
        FederationSettings(clients=[str(number) for number in range(CLIENTS)]),
        metrics={},
    )
    with tempfile.TemporaryDirectory() as folder:
        nodes = {
            str(number): {"name": str(number), "state": f"{folder}/site-{number}"}
            for number in range(CLIENTS)
        }
        grid = FakeGrid(client_app(spec, load), nodes)
        serve(spec, grid, Path(folder) / "run", None, [lambda progress: watch.tick()])
    return watch.seconds


def in_deployment(federation: Federation, name: str, work: Work, rounds: int) -> list[float]:
    """Seconds between the rounds of a real run, whose first ones load everything."""
    model, shape = MODELS[name]
    # Every site takes part, and only the final model is evaluated.
    chosen = training(work, rounds).model_dump(include={"rounds", "local_steps", "batch_size", "lr"})
    chosen["evaluate_every"] = chosen["rounds"]
    table = "".join(f"{key} = {json.dumps(value)}\n" for key, value in chosen.items())
    app = federation.folder / "my-federation" / "my_federation"
    (app / "federation.toml").write_text(
        f"[model]\n{model}\n[algorithm]\nname = 'fedavg'\n[training]\n{table}"
        f"[federation]\nclients = {len(SITES)}\nminimum_clients = {len(SITES)}\nclasses = 10\n"
        f"input_shape = {shape}\n"
    )
    (app / "data.py").write_text(DATA.format(batch=work.batch, shape=shape))
    lines = federation.finished(federation.run(name))
    return [line["seconds"] for line in lines][work.warm_up :]


def measure(tasks: list[str], rounds: int, repeats: int) -> dict[tuple[str, str], list[float]]:
    seconds: dict[tuple[str, str], list[float]] = {}
    here, one_worker, ray = ff.Execution(), ff.Execution(workers=1), ff.Execution(engine="ray")
    ways: dict[str, Callable[[Work], list[float]]] = {
        "local": lambda work: on(here, work, rounds),
        "Ray": lambda work: on(ray, work, rounds),
        "local, one worker": lambda work: on(one_worker, work, rounds),
        "Flower, one process": lambda work: in_process(work, rounds),
        "local, four clients": lambda work: on(here, work, rounds, len(SITES)),
    }
    turns = list(itertools.product(range(repeats), tasks, ways))
    for _, name, way in track(turns, "engines in turn", console=Console(stderr=True)):
        seconds.setdefault((name, way), []).extend(ways[way](TASKS[name]))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--deployed-rounds", type=int, default=5)
    parser.add_argument("--no-deployment", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measure(options.tasks, options.rounds, options.repeats)
    show(options.tasks, seconds)
    if options.no_deployment:
        return
    with tempfile.TemporaryDirectory() as folder, deployed(Path(folder)) as federation:
        for name in track(options.tasks, "deployment", console=Console(stderr=True)):
            rounds = in_deployment(federation, name, TASKS[name], options.deployed_rounds)
            # The last round also evaluates.
            seconds[name, "Flower, deployed"] = rounds[:-1]
    show(options.tasks, seconds)


def show(tasks: list[str], seconds: dict[tuple[str, str], list[float]]) -> None:
    """Median milliseconds of a round; ratios of the medians and of the best rounds."""
    cells = [["model", "engine", "a round", "beside", "its round", "more", "ratio", "of the best"]]
    for name, (engine, beside) in itertools.product(tasks, BESIDE.items()):
        if (name, engine) in seconds:
            both = [seconds[name, way] for way in (engine, beside)]
            ours, theirs = (1000 * statistics.median(lengths) for lengths in both)
            more, ratio = f"{ours - theirs:.0f}", f"{ours / theirs:.2f}"
            best = f"{min(both[0]) / min(both[1]):.2f}"
            cells.append([name, engine, f"{ours:.0f}", beside, f"{theirs:.0f}", more, ratio, best])
    sys.stdout.write(f"{markdown(cells)}\n\n")


if __name__ == "__main__":
    main()
