"""Digests of trained models and histories, to show that a redesign changes not one bit.

    python benchmarks/digest.py > after.txt
    git worktree add ../before COMMIT
    PYTHONPATH=../before/src python benchmarks/digest.py > before.txt
    diff before.txt after.txt

A line a case: every registered algorithm on both paths, with plain, quantized and error-fed uploads; some
awkward trainings (buffers, dropout, unequal clients, clipping); a resumed run; a run on Ray. Algorithms that
one commit does not have show in the diff as lines of their own. Bits depend on the processor and on torch, so
both must run on one machine.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.algorithm import ImpossibleComposition

CLIENTS, FEATURES, CLASSES = 12, 6, 3
COMMON: dict[str, Any] = {
    "rounds": 4,
    "participants": 7,
    "local_steps": 3,
    "batch_size": 4,
    "lr": 0.1,
    "lr_decay": 0.9,
    "weight_decay": 0.01,
}
DISTILLED = {"samples_per_class": 2, "iterations": 3, "span": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "dynafed": {**DISTILLED, "models": 2, "steps": 1, "epochs": 2},
    "dynafed_syn_only": {**DISTILLED, "models": 2, "steps": 1, "epochs": 2},
    "fedsynsam": {**DISTILLED, "warm_rounds": 1, "synthetic_batch": 4},
}
"""What lets the algorithms that make samples do so within the few rounds."""
COMPRESSORS = {
    "plain": None,
    "quantized": ff.parts.Quantize(bits=4, bucket=16),
    "error feedback": ff.parts.ErrorFeedback(ff.parts.TopK(0.3)),
    "error feedback 21": ff.parts.ErrorFeedback21(ff.parts.TopK(0.3)),
}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def federation(shape: tuple[int, ...], unequal: bool = False) -> ff.Federation:
    rule = drawn(torch.Size(shape).numel(), CLASSES, seed=1)

    def samples(number: int, size: int) -> tuple[Tensor, Tensor]:
        inputs = drawn(size, *shape, seed=2 + number) + drawn(*shape, seed=100 + number)
        return inputs, (inputs.flatten(1) @ rule).argmax(1)

    clients = [samples(number, 5 + 3 * (number % 3) if unequal else 12) for number in range(CLIENTS)]
    return ff.Federation.from_tensors(clients, test=samples(99, 40))


def weighted(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(0.5 * drawn(*parameter.shape, seed=200 + number))
    return model


def dense() -> nn.Module:
    return weighted(nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES)))


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten()]
    return weighted(nn.Sequential(*layers, nn.Linear(64, CLASSES)))


def train(model: nn.Module, data: ff.Federation, algorithm: ff.Algorithm, **options: Any) -> ff.Run:
    if not hasattr(ff, "Task"):  # the commit before tasks
        return ff.train(model, data, algorithm, **options)
    execution = {key: options.pop(key) for key in list(options) if key in ff.Execution.model_fields}
    rest = {key: options.pop(key) for key in ("folder",) if key in options}
    return ff.train(
        ff.Task(model, data), algorithm, ff.Training(**options), execution=ff.Execution(**execution), **rest
    )


def digest(run: ff.Run) -> str:
    """Of the model, the history but for the clock, and all that server and clients remember."""

    def content(tensor: Tensor) -> str:
        return hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()

    rows = [content(run.clients.row(client)) for client in run.clients.clients()]
    model = [content(value) for value in run.model.state_dict().values()]
    # Vectors may be renamed, so that they come in another order.
    server = sorted(content(value) for value in run.server.values())
    history = [{key: value for key, value in line.items() if key != "seconds"} for line in run.history]
    everything = json.dumps([model, server, rows, history], sort_keys=True)
    return hashlib.sha256(everything.encode()).hexdigest()[:16]


def cases() -> Iterator[tuple[str, ff.Run]]:
    data = federation((FEATURES,))
    for name in sorted(ff.ALGORITHMS):
        algorithm = ff.ALGORITHMS[name](**OPTIONS.get(name, {}))
        for kind, compressor in COMPRESSORS.items():
            try:
                chosen = algorithm if compressor is None else replace(algorithm, compress=compressor)
            except ImpossibleComposition:
                continue
            for path in ("matrix", "client"):
                yield f"{name}, {kind}, {path}", train(dense(), data, chosen, path=path, **COMMON)
    unequal = federation((FEATURES,), unequal=True)
    epochs = {**COMMON, "local_steps": None, "local_epochs": 2, "weighting": "samples", "clip": 0.5}
    images = federation((1, 6, 6))
    for name in ("fedavg", "scaffold", "fedsmoo", "fedspeed", "fednsam_d", "fedlesam_s", "mimelite"):
        algorithm = ff.ALGORITHMS[name]()
        yield f"{name}, unequal clients", train(dense(), unequal, algorithm, **epochs)
        yield f"{name}, buffers and dropout", train(convolutional(), images, algorithm, **COMMON)
        bernoulli = {**COMMON, "sampling": "bernoulli", "clip": 0.3, "clip_stage": "total"}
        yield f"{name}, bernoulli", train(dense(), data, algorithm, **bernoulli)
        evaluated = {**COMMON, "evaluate": "active_mean", "workers": 1}
        yield f"{name}, active mean, one worker", train(dense(), data, algorithm, **evaluated)
    for name in ("fedmoswa", "fedsynsam", "fedsmoo"):
        algorithm = ff.ALGORITHMS[name](**OPTIONS.get(name, {}))
        with tempfile.TemporaryDirectory() as folder:
            for rounds in (2, 4):
                run = train(dense(), data, algorithm, folder=Path(folder), **{**COMMON, "rounds": rounds})
            yield f"{name}, resumed", run
    yield "fedmoswa, on Ray", train(dense(), data, ff.fedmoswa(), engine="ray", workers=2, **COMMON)


def main() -> None:
    everything = hashlib.sha256()
    for name, run in cases():
        line = f"{digest(run)}  {name}"
        everything.update(line.encode())
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{everything.hexdigest()[:16]}  everything\n")


if __name__ == "__main__":
    main()
