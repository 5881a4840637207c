"""Flower's simulation with two workers: `python with_flower.py TASK COHORTS`."""

from __future__ import annotations

import os

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from work import PARTICIPANTS, RATE, TASKS, Stopwatch, asked, report

client, server = ClientApp(), ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    asked_for = message.content["work"]
    task = TASKS[asked_for["task"]]
    model = task.model()
    model.load_state_dict(message.content["model"].to_torch_state_dict())
    inputs, targets = task.client(asked_for["client"])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(task.steps):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return Message(RecordDict({"model": ArrayRecord(model.state_dict())}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    task, cohorts, _ = asked()
    model = task.model()
    name = next(key for key, value in TASKS.items() if value is task)
    nodes: list[int] = []
    while len(nodes) < PARTICIPANTS:
        nodes = list(grid.get_node_ids())
    watch = Stopwatch()
    for cohort in cohorts:
        sent = ArrayRecord(model.state_dict())
        messages = [
            Message(
                RecordDict({"model": sent, "work": ConfigRecord({"client": member, "task": name})}),
                dst_node_id=node,
                message_type="train",
            )
            for member, node in zip(cohort, nodes, strict=False)
        ]
        replies = [reply.content["model"].to_torch_state_dict() for reply in grid.send_and_receive(messages)]
        assert len(replies) == len(cohort)
        model.load_state_dict(
            {key: torch.stack([reply[key] for reply in replies]).mean(0) for key in replies[0]}
        )
        watch.tick()
    report(task, model, watch)


if __name__ == "__main__":
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=PARTICIPANTS,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2}},
    )
