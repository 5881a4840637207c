"""fluke: `python with_fluke.py TASK COHORTS THREADS`."""

from __future__ import annotations

from collections.abc import Sequence

import declared_operations  # noqa: F401 (before fluke)
import torch
from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.server import Server
from fluke.utils import FederationObserver
from torch import nn
from work import CLIENTS, PARTICIPANTS, Stopwatch, arguments, report

task, cohorts, _, (threads,) = arguments()
torch.set_num_threads(int(threads))


class GivenCohorts(Server):
    def get_eligible_clients(self, eligible_perc: float) -> Sequence[Client]:
        return [self.clients[member] for member in next(members)]


class Ticks(FederationObserver):
    def end_round(self, round: int) -> None:
        watch.tick()


FlukeENV().set_eval_cfg(server=False)
members = iter(cohorts)
sgd = OptimizerConfigurator(DDict(name="SGD", lr=task.rate))
clients = [
    Client(
        index=number,
        train_set=FastDataLoader(*task.client(number), num_labels=task.classes, batch_size=task.batch),
        test_set=None,
        optimizer_cfg=sgd,
        loss_fn=nn.CrossEntropyLoss(),
        local_epochs=task.steps,
    )
    for number in range(CLIENTS)
]
server = GivenCohorts(task.model(), None, clients)
federation = CentralizedFL(CLIENTS, None, None, clients=clients, server=server)
federation.set_callbacks([Ticks()])
watch = Stopwatch(task.warm_up)
federation.run(len(cohorts), PARTICIPANTS / CLIENTS)
report(task, server.model, watch)
