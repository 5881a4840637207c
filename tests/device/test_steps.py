"""Every algorithm on an accelerator that is not there: nothing left on the CPU, no waiting in local steps.

Whatever crosses between host and accelerator outside of the steps is in the list below.
"""

from __future__ import annotations

import importlib
import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerator import DEVICE, Accelerator, Event, pretended
from compositions import VARIANTS, composed
from problems import generic
from torch import Tensor, nn

import flatfed as ff
from flatfed import parts
from flatfed.core.context import Carry, ClientContext, Oracle, Stepped
from flatfed.core.errors import FlatfedError
from flatfed.core.flat import length, scaled_length
from flatfed.core.part import Correction, Gradient, Part
from flatfed.core.rounds import broadcast
from flatfed.core.state import initial_state
from flatfed.core.tree import leaves
from flatfed.data.federation import PooledFederation
from flatfed.data.pool import Pool
from flatfed.data.transform import ImageTransform
from flatfed.engines.planning import make_plan
from flatfed.engines.remote import RemoteJob, RemoteTrainer

CROSSINGS: dict[tuple[str, str], str] = {
    # Once per engine.
    ("core/flat.py", "BoundModel.__init__"): "each worker has a model of its own there",
    ("data/federation.py", "PooledFederation.to"): "the data lie there",
    ("data/federation.py", "LoadedFederation.to"): "test data lie there",
    ("data/pool.py", "Pool.to"): "the data lie there",
    ("data/transform.py", "_pixels"): "means and deviations that images are normalised with",
    ("training/loop.py", "TrainingState.initial"): "the first model and its buffers",
    ("engines/trial.py", "try_model"): "the model is tried before it is trained",
    ("engines/trial.py", "_check_loading"): "the model is tried before it is trained",
    ("engines/trial.py", "_check_state"): "the model is tried before it is trained",
    ("engines/trial.py", "_transformed"): "the model is tried before it is trained",
    ("engines/planning.py", "_matrix_obstacle"): "the model is tried before it is trained",
    ("engines/dense.py", "has_labels"): "the model is tried before it is trained",
    ("runs/train.py", "module_of"): "the final model goes back to where the user's is",
    ("core/flat.py", "load_buffers"): "the final model goes back to where the user's is",
    # Once per round of a client, or of a chunk of them.
    ("data/federation.py", "LoadedFederation._loaded"): "data that are loaded when a client takes part",
    ("data/pool.py", "all_labelled"): "closed forms are not for labels that are left out",
    ("engines/worker.py", "Worker._positions"): "which samples the steps take is drawn on the CPU",
    ("engines/worker.py", "Worker._train_client"): "the recorded loss, which must be finite",
    ("engines/worker.py", "Worker._train_matrix"): "clients' weights; what is recorded of the round",
    ("engines/worker.py", "Worker.train"): "what is recorded of the round",
    ("engines/client_store.py", "ClientStore.load"): "what clients remember is kept by the CPU",
    ("engines/client_store.py", "ClientStore.write"): "what clients remember is kept by the CPU",
    (
        "engines/sums.py",
        "_StoredRows.write",
    ): "all uploads of a cohort may be larger than an accelerator's memory",
    (
        "engines/sums.py",
        "_StoredRows.blocks",
    ): "all uploads of a cohort may be larger than an accelerator's memory",
    ("engines/sums.py", "CohortCollector.aggregate"): "the weights of those rows",
    ("engines/worker.py", "Worker._encoded"): "uploads become bytes",
    ("core/rounds.py", "encode_uploads"): "uploads become bytes, and what the server sees comes of bytes",
    ("core/part.py", "Compressor.encode"): "uploads become bytes",
    ("parts/compress.py", "_single"): "uploads become bytes",
    ("core/sharing.py", "Division.packed"): "whether the model's dtype holds a client's own buffers",
    (
        "parts/synthetic.py",
        "SyntheticMix.begin",
    ): "whether there are made-up samples decides about an evaluation",
    # Once per round.
    (
        "core/flat.py",
        "all_finite",
    ): "a model, an upload or made-up samples that are not finite end a training",
    ("core/flat.py", "no_longer_finite"): "a buffer that is not finite ends a training",
    ("core/aggregate.py", "Aggregate.flatness_distance"): "the history",
    ("training/loop.py", "TrainingLoop._record"): "the history",
    ("engines/server_loss.py", "server_loss"): "a model for the server's own tasks",
    # Between rounds, in steps of the server's own that are not the clients'.
    ("parts/synthetic.py", "TrajectoryMatching.before_round"): "how many iterations are done",
    ("parts/synthetic.py", "TrajectoryMatching._first"): "first samples are drawn on the CPU",
    ("parts/synthetic.py", "TrajectoryMatching._target"): "which models are averaged is drawn on the CPU",
    ("parts/synthetic.py", "TrajectoryMatching._trained"): "the order of made-up samples is drawn on the CPU",
    ("parts/synthetic.py", "_recent"): "the recorded matching loss",
    (
        "parts/synthetic.py",
        "FineTune.after_round",
    ): "whether there are samples, and their order in every epoch",
    ("parts/synthetic.py", "FineTune.update"): "whether there are made-up samples",
    ("parts/augment.py", "augmented"): "how made-up samples are changed is drawn on the CPU",
    ("parts/augment.py", "_crop"): "how made-up samples are changed is drawn on the CPU",
    ("parts/augment.py", "_cutout"): "how made-up samples are changed is drawn on the CPU",
    # Once per evaluated batch.
    ("engines/evaluator.py", "Evaluator.evaluate"): "the evaluated samples",
    ("engines/evaluator.py", "Evaluator._load"): "what a client keeps to itself, or its first value",
    ("engines/evaluator.py", "_weight"): "how many targets count",
    ("engines/metrics.py", "one_number"): "the losses and metrics of an evaluation",
    ("training/task.py", "accuracy"): "whether all targets count",
}
"""Where something moves between host and accelerator, or the host waits for a number, and why."""
AUGMENTATION = ("data/transform.py", "augmented")
"""The one crossing in local steps, with augmentation only: where to crop is drawn on the CPU."""

CLIENTS, CLASSES = 5, 3


def images(transform: ImageTransform) -> PooledFederation:
    """Clients with small pictures, and test samples."""
    generator = torch.Generator().manual_seed(0)
    clients = [
        (
            torch.randint(256, (6, 3, 6, 6), generator=generator, dtype=torch.uint8),
            torch.randint(CLASSES, (6,), generator=generator),
        )
        for _ in range(CLIENTS)
    ]
    return PooledFederation(Pool.joined("clients", clients), clients[0], transform)


def plain_images(augmentation: str = "none") -> PooledFederation:
    return images(ImageTransform((0.5, 0.4, 0.3), (0.2, 0.3, 0.2), augmentation))


def convolutional(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 3), *more, nn.Flatten(), nn.Tanh(), nn.Linear(32, CLASSES))


def dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 5), nn.Tanh(), nn.Linear(5, CLASSES))


MODELS = {"client": convolutional, "matrix": dense}


def trained(
    monkeypatch: pytest.MonkeyPatch, algorithm: ff.Algorithm, path: str, **settings: Any
) -> Accelerator:
    """What the accelerator saw of a few rounds of a training."""
    data, model = settings.pop("data", None) or plain_images(), settings.pop("model", None) or MODELS[path]()
    # Made-up samples need three models first.
    rounds = 4 if algorithm.server_tasks else 2
    work = {"rounds": rounds, "participants": 2, "local_steps": 2, "batch_size": 2, "evaluate_every": 4}
    training = ff.Training(**{**work, "path": path, **settings})
    with pretended(monkeypatch) as accelerator:
        task = ff.Task(model, data)
        run = ff.train(task, algorithm, training, ff.Execution(device="cuda", workers=1))
    assert run.path == path
    assert all(vector.device == DEVICE for vector in run.server.values())
    return accelerator


def check_steps(monkeypatch: pytest.MonkeyPatch, algorithm: ff.Algorithm, path: str, **settings: Any) -> None:
    accelerator = trained(monkeypatch, algorithm, path, **settings)
    assert not accelerator.in_steps
    unlisted = {event for event in accelerator.outside if (event.file, event.function) not in CROSSINGS}
    assert not unlisted


both_paths = pytest.mark.parametrize("path", ["matrix", "client"])


@both_paths
@pytest.mark.parametrize("name", sorted(ff.ALGORITHMS))
def test_steps_of_every_algorithm_stay_on_the_accelerator(name, path, monkeypatch):
    check_steps(monkeypatch, generic(name), path)


def acting(part: Part) -> bool:
    return not isinstance(part, parts.TrajectoryMatching)


@pytest.mark.parametrize(("number", "part"), list(enumerate(filter(acting, VARIANTS))), ids=str)
def test_every_option_of_every_part_stays_on_the_accelerator(number, part, monkeypatch):
    check_steps(monkeypatch, composed(part), ["matrix", "client"][number % 2])


@pytest.mark.parametrize(
    "settings",
    [
        {"clip": 0.1},
        {"clip": 0.1, "clip_stage": "total"},
        {"weight_decay": 0.1, "weighting": "samples"},
        {"batch_size": None},
        {"evaluate": "active_mean"},
    ],
    ids=str,
)
def test_settings_of_the_training_do_not_matter(settings, monkeypatch):
    check_steps(monkeypatch, ff.scaffold(), "matrix", **settings)


def test_buffers_random_layers_and_loaded_data_do_not_matter(monkeypatch):
    data = plain_images()
    loaded = ff.Federation.from_function(CLIENTS, lambda client: data.client(client).whole(), data.test)
    loaded.transform = data.transform
    model = convolutional(nn.BatchNorm2d(2), nn.Dropout(0.2))
    check_steps(monkeypatch, ff.fedsam(), "client", model=model, data=loaded)


@both_paths
@pytest.mark.parametrize(
    "sharing", [{"private": ("*.bias",)}, {"normalisation": "local"}, {"normalisation": "frozen"}], ids=str
)
def test_what_clients_keep_to_themselves_is_there_too(sharing, path, monkeypatch):
    if path == "client":
        model = convolutional(nn.BatchNorm2d(2))
    else:
        model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES))
    check_steps(monkeypatch, ff.scaffold(), path, model=model, sharing=sharing)


@both_paths
def test_augmented_batches_bring_only_what_was_drawn(path, monkeypatch):
    data = plain_images("crop_flip")
    accelerator = trained(monkeypatch, ff.fedavg(), path, data=data)
    # Two rounds, clients and steps.
    assert accelerator.in_steps == Counter({Event("up", *AUGMENTATION): 2**3})


@both_paths
def test_workers_elsewhere_take_and_give_what_is_on_the_cpu(path, monkeypatch):
    algorithm = composed(parts.ControlVariate(), parts.TrimmedMean(0.2))
    training = ff.Training(rounds=1, local_steps=1, batch_size=2, path=path)
    model, data = MODELS[path](), plain_images()
    with pretended(monkeypatch):
        plan = make_plan(model, data, algorithm, F.cross_entropy, {}, training, "cuda")
        vector = plan.layout.vector(model)
        server = {"model": vector, **initial_state(algorithm.server_vectors, plan.dimensions, vector)}
        state = initial_state(algorithm.client_vectors, plan.dimensions, vector)
        members = [0, 1] if path == "matrix" else [0]
        job = RemoteJob(members, broadcast(algorithm, server, {}), [state for _ in members], 0)
        answer = RemoteTrainer(plan, model, data)(job)
    tensors = [leaf for leaf in leaves(answer) if isinstance(leaf, Tensor)]
    assert len(tensors) > 4 and all(tensor.device.type == "cpu" for tensor in tensors)


def test_every_listed_function_is_there():
    for file, function in [*CROSSINGS, AUGMENTATION]:
        module = importlib.import_module("flatfed." + file.removesuffix(".py").replace("/", "."))
        assert operator.attrgetter(function)(module), (file, function)


# -- would it be noticed? ----------------------------------------------------------------------------------


def _ones(gradient: Tensor) -> Tensor:
    return torch.ones(gradient.numel(), dtype=torch.int64, device=gradient.device)


def _clamped(gradient: Tensor) -> Tensor:
    changed = gradient.clone()
    changed[changed > 1] = torch.ones((), device=gradient.device).expand(1)
    return changed


OFFENCES = {
    "cpu": lambda gradient: gradient.cpu().to(gradient.device),
    "item": lambda gradient: gradient * (1.0 + 0 * gradient.sum().item()),
    "float": lambda gradient: gradient * (1.0 + 0 * float(gradient.sum())),
    "bool": lambda gradient: gradient if gradient.isfinite().all() else -gradient,
    "tolist": lambda gradient: gradient * gradient.mean(-1).reshape(-1).tolist()[0],
    "equal": lambda gradient: gradient if torch.equal(gradient, gradient) else -gradient,
    "nonzero": lambda gradient: gradient + 0 * gradient.nonzero().sum(),
    "mask": lambda gradient: gradient + gradient[gradient > 0].sum(),
    "masked assignment": _clamped,
    "unique": lambda gradient: gradient + gradient.unique().sum(),
    "repeat": lambda gradient: gradient + gradient.repeat_interleave(_ones(gradient)).sum(),
    "numpy": lambda gradient: gradient + float(gradient.numpy(force=True).sum()),
    "literal": lambda gradient: gradient * torch.tensor([1.0], device=gradient.device),
    "new literal": lambda gradient: gradient * gradient.new_tensor([1.0]),
    "left on the CPU": lambda gradient: gradient + torch.zeros(gradient.shape[-1]),
    "indices on the CPU": lambda gradient: gradient + 0 * gradient[..., torch.tensor([0])],
    "copied": lambda gradient: gradient + torch.empty_like(gradient).copy_(torch.zeros(gradient.shape[-1])),
}


@dataclass(frozen=True)
class BadGradient(Gradient):
    offence: str

    def gradient(self, point: Tensor, oracle: Oracle, context: ClientContext, carry: Carry) -> Stepped:
        return OFFENCES[self.offence](oracle(point)), carry


@dataclass(frozen=True)
class BadCorrection(Correction):
    offence: str

    def direction(self, direction: Tensor, context: ClientContext, carry: Carry) -> Stepped:
        return OFFENCES[self.offence](direction), carry


@pytest.mark.parametrize("offence", OFFENCES)
@pytest.mark.parametrize("slot", ["gradient", "correct"])
def test_an_offence_in_the_step_of_a_part_is_noticed(offence, slot, monkeypatch):
    bad = {"gradient": BadGradient, "correct": BadCorrection}[slot](offence)
    with pytest.raises((AssertionError, FlatfedError)) as caught:
        check_steps(monkeypatch, ff.Algorithm(**{slot: bad}), "matrix")
    refused = isinstance(caught.value, FlatfedError)
    assert refused == (
        offence in {"nonzero", "mask", "masked assignment", "unique", "repeat", "left on the CPU"}
    )


def test_without_an_offence_the_same_parts_pass(monkeypatch):
    monkeypatch.setitem(OFFENCES, "none", lambda gradient: 1.5 * gradient)
    check_steps(
        monkeypatch, ff.Algorithm(gradient=BadGradient("none"), correct=BadCorrection("none")), "matrix"
    )


# -- the same numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lengths_that_nobody_looks_at_are_those_that_are(dtype):
    generator, limits = torch.Generator().manual_seed(0), torch.finfo(dtype)
    vectors = torch.randn(7, 50, generator=generator, dtype=dtype)
    vectors[1], vectors[2] = vectors[1] * limits.tiny, vectors[2].sign() * limits.max / 8
    vectors[3], vectors[4, 0], vectors[5, 0] = 0, float("inf"), float("nan")
    vectors[6] *= 1e-30
    torch.testing.assert_close(
        scaled_length(vectors), length(vectors), rtol=2 * limits.eps, atol=0, equal_nan=True
    )
