"""flatfed: `python with_flatfed.py TASK COHORTS [ALGORITHM] [bfloat16]`."""

from __future__ import annotations

from work import CLIENTS, PARTICIPANTS, Stopwatch, arguments, report

import flatfed as ff

task, cohorts, precision, more = arguments()
federation = ff.Federation.from_tensors([task.client(number) for number in range(CLIENTS)])
watch = Stopwatch(task.warm_up)


def tick(progress: ff.Progress) -> None:
    assert list(progress.cohort) == cohorts[progress.round - 1]
    watch.tick()


training = ff.Training(
    rounds=len(cohorts),
    participants=PARTICIPANTS,
    local_steps=task.steps,
    batch_size=task.batch,
    lr=task.rate,
    **({} if precision == "float32" else {"precision": precision}),
)
algorithm = ff.build(more[0] if more else "fedavg")
run = ff.train(ff.Task(task.model(), federation), algorithm, training, callbacks=[tick])
evaluations = run.history[-1]["gradient_evaluations"] / (PARTICIPANTS * task.steps)
report(task, run.model, watch, path=run.path, reason=run.path_reason, evaluations=evaluations)
