"""How well each method guesses the global gradient, round by round: the FedSynSAM paper's Figure 2.

    python docs/results/fedsynsam_cosines.py CONFIG.toml FOLDER [KEY=VALUE …]

Trains what the config describes (FedSynSAM, for instance on Path(1)) and records, every few rounds, the
cosine of the true gradient ∇F(x_t) of the loss on all training data to three estimates, as means over the
clients: the gradient of the client's own batch (`local`, FedSAM's), x_{t−1} − x_t (`lesam`, FedLESAM's)
and the mix with the synthetic samples (`mix`, FedSynSAM's); `samples` is the synthetic gradient alone.
First at the model x_t that clients receive; then, as `…_path`, as means over the points x_{i,k} that a
client passes in its local steps; and, as `…_there`, the cosine of these to the true gradient ∇F(x_{i,k})
at the same point, on every TENTH-th sample, with the lengths of all gradients (`length_…`). The numbers
land in the history of the run in FOLDER.
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
TENTH = 10


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

    rows = torch.cat([federation.rows(client) for client in range(len(federation))])
    pooled, labels = federation.transform.evaluate(federation.inputs[rows]), federation.targets[rows]

    def measure(now: ff.Progress) -> dict[str, float]:
        point, last = now.server["model"], before["model"]
        before["model"] = point.clone()
        if now.round % EVERY:
            return {}
        truth = unit(gradient(point, pooled, labels))
        synthetic = matching.seen(now.server)
        ready = bool(synthetic["synthetic_ready"][0])
        values: dict[str, list[float]] = {"cosine_lesam": [float(unit(last - point) @ truth)]}

        def keep(name: str, estimate: Tensor, step: int, there: Tensor) -> None:
            cosine = float(unit(estimate) @ truth)
            values.setdefault(f"cosine_{name}_path", []).append(cosine)
            values.setdefault(f"cosine_{name}_there", []).append(float(unit(estimate) @ unit(there)))
            values.setdefault(f"length_{name}", []).append(float(estimate.norm()))
            if step == 0:
                values.setdefault(f"cosine_{name}", []).append(cosine)

        for client in range(len(federation)):
            own, here = federation.client(client), point.clone()
            for step, chosen in enumerate(batches(training, len(own), now.round, client)):
                inputs, targets = own.batch(chosen)
                local = gradient(here, federation.transform.evaluate(inputs), targets)
                true = gradient(here, pooled[::TENTH], labels[::TENTH])
                keep("local", local, step, true)
                keep("lesam_moved", last - point, step, true)
                if ready:
                    made = gradient(here, *samples_of(synthetic, tuple(pooled.shape[1:])))
                    keep("samples", made, step, true)
                    keep("mix", torch.lerp(made, local, weight), step, true)
                here -= training.rate(now.round) * local
        return {name: sum(several) / len(several) for name, several in values.items()}

    run_config(config, folder, [measure], ff.Task(model, federation))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
