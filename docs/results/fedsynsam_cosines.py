"""How well each method guesses the global gradient, round by round: the FedSynSAM paper's Figure 2.

    python docs/results/fedsynsam_cosines.py CONFIG.toml FOLDER [KEY=VALUE …]

Trains what the config describes (FedSynSAM on Path(1)) and records, every few rounds, the cosine of the true
gradient ∇F(x_t) of the loss on all training data to three estimates, as means over the clients: the gradient
of the client's own batch (`local`, FedSAM's), x_{t−1} − x_t (`lesam`, FedLESAM's) and the mix with the
synthetic samples (`mix`, FedSynSAM's); `samples` is the synthetic gradient alone. First at the model x_t that
clients receive; then, as `…_path`, as means over the points x_{i,k} that a client passes in its local steps.
The numbers land in the history of the run in FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad

import flatfed as ff
from flatfed.core.flat import Layout, unit
from flatfed.core.sampling import batches
from flatfed.parts.synthetic import TrajectoryMatching, samples_of
from flatfed.runs.train import run_config
from flatfed.training.config import Config

EVERY = 5


def main(path: Path, folder: Path, assignments: list[str]) -> None:
    config = Config.read(path, assignments)
    federation = config.make_federation()
    model = config.make_model(federation)
    layout, training = Layout(model), config.training
    before = {"model": layout.vector(model)}
    weight = config.algorithm.get("local_weight", 0.9)
    members = config.make_algorithm().members
    matching = next(member for member in members if isinstance(member.part, TrajectoryMatching))

    def loss(point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, layout.views(point), (inputs,)), targets)

    def gradient(point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return grad(loss)(point, inputs, targets)

    pooled = federation.transform.evaluate(federation.inputs[federation.all_rows])
    labels = federation.targets[federation.all_rows]

    def measure(now: ff.Progress) -> dict[str, float]:
        point, last = now.server["model"], before["model"]
        before["model"] = point.clone()
        if now.round % EVERY:
            return {}
        truth = unit(gradient(point, pooled, labels))
        synthetic = matching.seen(now.server)
        ready = bool(synthetic["synthetic_ready"][0])
        cosines: dict[str, list[float]] = {"lesam": [float(unit(last - point) @ truth)]}

        def keep(name: str, estimate: Tensor, step: int) -> None:
            cosine = float(unit(estimate) @ truth)
            cosines.setdefault(f"{name}_path", []).append(cosine)
            if step == 0:
                cosines.setdefault(name, []).append(cosine)

        for client in range(len(federation)):
            own, here = federation.client(client), point.clone()
            for step, chosen in enumerate(batches(training, len(own), now.round, client)):
                inputs, targets = own.batch(chosen)
                local = gradient(here, federation.transform.evaluate(inputs), targets)
                keep("local", local, step)
                if ready:
                    there = gradient(here, *samples_of(synthetic, tuple(pooled.shape[1:])))
                    keep("samples", there, step)
                    keep("mix", torch.lerp(there, local, weight), step)
                here -= training.rate(now.round) * local
        return {f"cosine_{name}": sum(values) / len(values) for name, values in cosines.items()}

    run_config(config, folder, [measure], ff.Task(model, federation))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
