"""A hand-written loop: `python with_bare.py TASK COHORTS THREADS [channels_last] [bfloat16]`.

With channels_last it is the loop whose two copies, side by side on two cores, are taken for the limit.
"""

from __future__ import annotations

import torch
from work import Stopwatch, arguments, report, training_loss

task, cohorts, precision, more = arguments()
torch.set_num_threads(int(more[0]))
channels_last = "channels_last" in more and len(task.shape) == 3
model = task.model()
if channels_last:
    model = model.to(memory_format=torch.channels_last)
parameters = list(model.parameters())
watch = Stopwatch(task.warm_up)
for cohort in cohorts:
    start = [parameter.detach().clone() for parameter in parameters]
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for client in cohort:
        inputs, targets = task.client(client)
        if channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
        for _ in range(task.steps):
            loss = training_loss(model, inputs, targets, precision)
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(gradient, alpha=task.rate)
        with torch.no_grad():
            for whole, parameter in zip(total, parameters, strict=True):
                whole.add_(parameter)
    with torch.no_grad():
        for parameter, whole in zip(parameters, total, strict=True):
            parameter.copy_(whole / len(cohort))
    watch.tick()
report(task, model, watch)
