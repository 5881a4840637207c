"""What a round would cost past one machine, on paper, from pieces that are measured here.

    python benchmarks/beyond.py [--gigabits 10] [--uplink 5]

Measures, on one core, what a server does with one upload (check it, decode it, add it to a sum) and with a
round (merge, write the checkpoint), and computes from that a round with cohorts of 10^3 to 10^5 of 10^6
devices: traffic, state, the server's time, the devices' time on the line, and the same with a tree of
aggregators. Nothing of this has been run at that size.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import flatfed as ff
from flatfed.core.context import MergeContext
from flatfed.core.part import Compressor
from flatfed.core.random import torch_generator
from flatfed.core.rounds import server_round
from flatfed.core.state import Dimensions, initial_state
from flatfed.engines.sums import CohortSums, PairwiseSum, Piece
from flatfed.parts import Quantize

MODELS = {"MLP": 159_010, "FedDyn's CNN": 797_962, "ResNet-18": 11_173_962}
UPLOADS: dict[str, Compressor] = {"as they are": Compressor(), "4 bits": Quantize(4)}
DEVICES = 1_000_000
COHORTS = (1_000, 10_000, 100_000)
FAN_IN = 100
"""Uploads, or sums of uploads, that one aggregator of a tree takes."""


def seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    best = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


@dataclass(frozen=True)
class Pieces:
    """What was measured for one model and one compressor, in seconds and bytes."""

    upload_bytes: int
    decode: float
    """One upload: its checksum and its decoding."""
    add: float
    """One upload into the sum, in pairs of pairs."""
    merge: float
    """The server's rule, once a round."""


def measured(parameters: int, compress: Compressor, algorithm: ff.Algorithm) -> Pieces:
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

    dimensions = Dimensions(parameters, (1,))
    server = {"model": vector, **initial_state(algorithm.server_vectors, dimensions, vector)}
    mean = {"displacement": vector}
    context = MergeContext(round=0, fraction=0.1, total_rate=1.0)
    return Pieces(
        len(payload),
        seconds(decode),
        seconds(add) / count,
        seconds(lambda: server_round(algorithm, server, mean, context)),
    )


def levels(cohort: int) -> int:
    """Aggregators between a device and the server, above each other."""
    return max(0, math.ceil(math.log(cohort, FAN_IN)) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabits", type=float, default=10, help="of the server's line, each way")
    parser.add_argument("--uplink", type=float, default=5, help="megabits a second of a device")
    options = parser.parse_args()
    torch.set_num_threads(1)
    line, uplink = options.gigabits * 1e9 / 8, options.uplink * 1e6 / 8
    algorithm = ff.fedavg()
    pieces = Table(title="measured on one core", title_justify="left")
    for header in ("model", "uploads", "bytes up", "check and decode, ms", "add, ms", "merge, ms"):
        pieces.add_column(header, justify="left" if header in {"model", "uploads"} else "right")
    plan = Table(title=f"computed: FedAvg, {DEVICES:,} devices", title_justify="left")
    headers = ("cohort", "GB up", "GB down", "line, s", "server's core, s", "device's uplink, s")
    for header in ("model", "uploads", *headers, f"tree of {FAN_IN}: busiest node, s", "levels"):
        plan.add_column(header, justify="left" if header in {"model", "uploads"} else "right")
    for model, parameters in MODELS.items():
        for label, compress in UPLOADS.items():
            cost = measured(parameters, compress, algorithm)
            times = (f"{1000 * value:.3g}" for value in (cost.decode, cost.add, cost.merge))
            pieces.add_row(model, label, f"{cost.upload_bytes:,}", *times)
            for cohort in COHORTS:
                up, down = cohort * cost.upload_bytes, cohort * 4 * parameters
                node = FAN_IN * (cost.decode + cost.add) + FAN_IN * cost.upload_bytes / line
                plan.add_row(
                    *(model, label, f"{cohort:,}", f"{up / 1e9:,.1f}", f"{down / 1e9:,.1f}"),
                    f"{max(up, down) / line:,.1f}",
                    f"{cohort * (cost.decode + cost.add) + cost.merge:,.1f}",
                    f"{cost.upload_bytes / uplink:,.1f}",
                    f"{node:,.2f}",
                    str(levels(cohort)),
                )
    console = Console(width=150)
    console.print(pieces)
    console.print(plan)


if __name__ == "__main__":
    main()
