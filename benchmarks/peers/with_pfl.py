"""pfl: `python with_pfl.py TASK COHORTS THREADS [bfloat16]`; under torchrun its processes share a cohort."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from work import PARTICIPANTS, Stopwatch, arguments, report

task, cohorts, precision, (threads,) = arguments()
torch.set_num_threads(int(threads))
processes, rank = (
    int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0"))
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = task.model()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)

    def loss(self, inputs: Tensor, targets: Tensor, is_eval: bool = False) -> Tensor:
        return F.cross_entropy(self(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, float]:
        return {}


class Ticks(TrainingProcessCallback):
    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        watch.tick()
        return False, Metrics()


def dataset(users: Iterator[int]) -> FederatedDataset:
    return FederatedDataset(
        lambda user: Dataset(raw_data=list(task.client(user)), user_id=str(user)), lambda: next(users)
    )


data = dataset(itertools.chain(*cohorts, itertools.repeat(0)))
model = Model()
watch = Stopwatch(task.warm_up)
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=len(cohorts),
        evaluation_frequency=10**9,  # the first round alone, which is not timed
        train_cohort_size=PARTICIPANTS,
        val_cohort_size=processes,
    ),
    backend=SimulatedBackend(training_data=data, val_data=dataset(itertools.repeat(0))),
    model=PyTorchModel(
        model=model,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        amp_dtype=torch.bfloat16 if precision == "bfloat16" else None,
    ),
    model_train_params=NNTrainHyperParams(
        local_learning_rate=task.rate, local_num_epochs=task.steps, local_batch_size=task.batch
    ),
    callbacks=[Ticks()],
    send_metrics_to_platform=False,
)
if rank == 0:
    report(task, model, watch)
if torch.distributed.is_initialized():
    torch.distributed.barrier()  # Or one aborts because the other has left.
    torch.distributed.destroy_process_group()
