"""What a round would cost past one machine, on paper, from pieces that are measured here.

    python benchmarks/beyond.py [--gigabits 10] [--cores 16] [--uplink 5] [--downlink 20]

Measures, on one core, what a device does in a round (FedAvg, the steps and batches of benchmarks/peers),
what a server does with one upload (check it, decode it, add it to a sum) and with a round (merge, write the
checkpoint), and computes from that rounds with cohorts of 10^3 to 10^5 of 10^6 devices: traffic, state,
time, what takes longest, and the same with a tree of aggregators. Nothing of this has been run at that size.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from tables import markdown

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from work import TASKS, Task

import flatfed as ff
from flatfed.core.context import MergeContext
from flatfed.core.part import Compressor
from flatfed.core.random import torch_generator
from flatfed.core.rounds import server_round
from flatfed.core.state import Dimensions, initial_state
from flatfed.engines.sums import CohortSums, PairwiseSum, Piece
from flatfed.parts import Quantize
from flatfed.runs.files import write_atomically

MODELS = {"MLP": "mlp", "FedDyn's CNN": "cnn", "ResNet-18": "resnet18"}
UPLOADS: dict[str, Compressor] = {"as they are": Compressor(), "4 bits": Quantize(4)}
DEVICES = 1_000_000
COHORTS = (1_000, 10_000, 100_000)
FAN_IN = 100
"""Uploads, or sums of uploads, that one aggregator of a tree takes."""


def seconds(
    work: Callable[[], Any], clock: Callable[[], float] = time.process_time, repeats: int = 5
) -> float:
    """The best of several, of the processor, which other programs disturb less than the clock."""
    best = math.inf
    for _ in range(repeats):
        began = clock()
        work()
        best = min(best, clock() - began)
    return best


@dataclass(frozen=True)
class Upload:
    """What one costs, in bytes and seconds."""

    size: int
    encode: float
    decode: float
    """With its checksum."""
    add: float
    """Into a sum in pairs of pairs."""

    @property
    def taken(self) -> float:
        """By whoever receives it."""
        return self.decode + self.add


@dataclass(frozen=True)
class Model:
    """What a round costs whatever the uploads, in seconds."""

    parameters: int
    training: float
    """On a device."""
    merge: float
    """The server's rule."""
    checkpoint: float
    """Written and safely on the disk, by the clock."""

    @property
    def size(self) -> int:
        return 4 * self.parameters


def of_upload(parameters: int, compress: Compressor) -> Upload:
    generator = torch_generator(0, "benchmark")
    vector = 0.01 * torch.randn(parameters, generator=generator)
    payload = compress.encode(vector, generator)

    def decode() -> None:
        hashlib.sha256(payload).digest()
        compress.decode(payload, parameters, vector.dtype)

    count = 16

    def add() -> None:
        total = PairwiseSum()
        for number in range(count):
            total.add(Piece(number, 1, CohortSums(uploads={"displacement": vector})))
        total.total()

    encode = seconds(lambda: compress.encode(vector, generator))
    return Upload(len(payload), encode, seconds(decode), seconds(add) / count)


def of_model(task: Task) -> Model:
    ends = [time.process_time()]
    model = task.model()
    ff.train(
        ff.Task(model, ff.Federation.from_tensors([task.client(number) for number in range(2)])),
        ff.fedavg(),
        ff.Training(rounds=6, participants=1, local_steps=task.steps, batch_size=task.batch, lr=task.rate),
        ff.Execution(workers=1),
        callbacks=[lambda progress: ends.append(time.process_time())],
    )
    vector, algorithm = ff.model_to_vector(model), ff.fedavg()
    dimensions = Dimensions(len(vector), (1,))
    server = {"model": vector, **initial_state(algorithm.server_vectors, dimensions, vector)}
    context = MergeContext(round=0, fraction=0.1, total_rate=1.0)
    mean = {"displacement": vector}
    with tempfile.TemporaryDirectory() as folder:

        def write() -> None:
            content = save_tensors(server)
            hashlib.sha256(content).digest()
            write_atomically(Path(folder) / "server", content)

        return Model(
            len(vector),
            min(after - before for before, after in itertools.pairwise(ends)),
            seconds(lambda: server_round(algorithm, server, mean, context)),
            seconds(write, time.perf_counter),
        )


def levels(cohort: int) -> int:
    """Aggregators between a device and the server, above each other."""
    return max(0, math.ceil(math.log(cohort, FAN_IN)) - 1)


@dataclass(frozen=True)
class Network:
    """Bytes a second, and the server's cores."""

    line: float
    uplink: float
    downlink: float
    cores: int


def plan(name: str, model: Model, label: str, upload: Upload, cohort: int, network: Network) -> list[str]:
    up, down = cohort * upload.size, cohort * model.size
    stages = {
        "the devices": model.size / network.downlink + model.training + upload.size / network.uplink,
        "the server's line": max(up, down) / network.line,
        "the server's cores": cohort * upload.taken / network.cores,
    }
    # Aggregators work beside each other, and one level after the other. What they hand on is a sum.
    leaf = FAN_IN * max(upload.taken / network.cores, max(upload.size, model.size) / network.line)
    whole = of_sums(model, network)
    return [
        *(name, label, f"{cohort:,}", f"{up / 1e9:,.1f}", f"{down / 1e9:,.1f}"),
        *(f"{value:,.1f}" for value in stages.values()),
        f"{cohort * model.size / 1e9:,.1f}",
        max(stages, key=lambda stage: stages[stage]),
        f"{leaf + levels(cohort) * whole:,.2f}",
        f"{FAN_IN * model.size / 1e9:,.2f}",
        str(levels(cohort)),
    ]


def of_sums(model: Model, network: Network) -> float:
    """Seconds that a node above the lowest level takes for the sums of those below it."""
    return FAN_IN * max(SUMS[model.parameters].taken / network.cores, model.size / network.line)


SUMS: dict[int, Upload] = {}
"""Of each model's size, what an upload costs that is not compressed, as sums are."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabits", type=float, default=10, help="of a server's line, each way")
    parser.add_argument("--cores", type=int, default=16, help="of a server")
    parser.add_argument("--uplink", type=float, default=5, help="megabits a second of a device")
    parser.add_argument("--downlink", type=float, default=20, help="megabits a second of a device")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bits = (options.gigabits * 1e9, options.uplink * 1e6, options.downlink * 1e6)
    network = Network(*(rate / 8 for rate in bits), options.cores)
    pieces = [["model", "uploads", "bytes up", "encode, ms", "check and decode, ms", "add, ms"]]
    fixed = [["model", "parameters", "a device's steps, ms", "merge, ms", "checkpoint, MB", "written, ms"]]
    state = [
        ["model", "FedAvg: the server, MB", "SCAFFOLD: the server, MB", "a device, MB", "all devices, GB"]
    ]
    devices = f"of {DEVICES:,}"
    plans = [
        *[["model", "uploads", f"cohort {devices}", "GB up", "GB down", "devices, s", "line, s", "cores, s"]],
    ]
    plans[0] += ["uploads in memory, GB", "longest", f"tree of {FAN_IN}, s", "a node's memory, GB", "levels"]
    for name, task in MODELS.items():
        model = of_model(TASKS[task])
        times = (f"{1000 * value:.3g}" for value in (model.training, model.merge))
        megabytes = f"{model.size / 1e6:.1f}"
        written = f"{1000 * model.checkpoint:.3g}"
        fixed.append([name, f"{model.parameters:,}", *times, megabytes, written])
        # The server's control variate is sent, and every device keeps its own.
        both = f"{2 * model.size / 1e6:.1f}"
        state.append([name, megabytes, both, megabytes, f"{DEVICES * model.size / 1e9:,.0f}"])
        for label, compress in UPLOADS.items():
            upload = of_upload(model.parameters, compress)
            SUMS.setdefault(model.parameters, upload)
            parts = (f"{1000 * value:.3g}" for value in (upload.encode, upload.decode, upload.add))
            pieces.append([name, label, f"{upload.size:,}", *parts])
            plans += [plan(name, model, label, upload, cohort, network) for cohort in COHORTS]
    sys.stdout.write("\n\n".join(map(markdown, (fixed, pieces, state, plans))) + "\n")


if __name__ == "__main__":
    main()
