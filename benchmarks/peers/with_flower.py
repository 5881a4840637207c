"""Flower's simulation: `python with_flower.py TASK COHORTS WORKERS THREADS [bfloat16]`."""

from __future__ import annotations

import os

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from work import PARTICIPANTS, TASKS, Stopwatch, arguments, report, training_loss

client, server = ClientApp(), ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    wanted = message.content["work"]
    torch.set_num_threads(wanted["threads"])
    task = TASKS[wanted["task"]]
    model = task.kept_model()
    model.load_state_dict(message.content["model"].to_torch_state_dict())
    inputs, targets = task.client(wanted["client"])
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rate)
    for _ in range(task.steps):
        optimizer.zero_grad()
        training_loss(model, inputs, targets, wanted["precision"]).backward()
        optimizer.step()
    return Message(RecordDict({"model": ArrayRecord(model.state_dict())}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    task, cohorts, precision, (_, threads) = arguments()
    model = task.model()
    name = next(key for key, value in TASKS.items() if value is task)
    work = {"task": name, "threads": int(threads), "precision": precision}
    nodes: list[int] = []
    while len(nodes) < PARTICIPANTS:
        nodes = list(grid.get_node_ids())
    watch = Stopwatch(task.warm_up)
    for cohort in cohorts:
        sent = ArrayRecord(model.state_dict())
        messages = [
            Message(
                RecordDict({"model": sent, "work": ConfigRecord({**work, "client": member})}),
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
    workers, cores = int(arguments()[-1][0]), len(os.sched_getaffinity(0))
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=PARTICIPANTS,
        backend_config={
            "client_resources": {"num_cpus": cores / workers},
            "init_args": {"num_cpus": cores},
        },
    )
