"""Every diagnostic on an accelerator that is not there, of runs whose state lies on it."""

from __future__ import annotations

import sys

import pytest
import torch
from accelerator import pretended
from problems import generic, in_float32

import flatfed as ff
from flatfed.core.errors import FlatfedError
from flatfed.diagnostics import DIAGNOSTICS

OPTIONS = {
    "clients": {},
    "hessian": {"eigenvalues": 1, "probes": 1, "steps": 2, "clients": 1},
    "plane": {"points": 2, "clients": 2},
    "surface": {"points": 2},
    "theory": {"clients": 1},
    "global_stability": {"replacements": 1, "bound": False},
}


@pytest.mark.parametrize("name", sorted(set(DIAGNOSTICS) - {"line"}))
def test_diagnostics_work_where_the_model_is(name, monkeypatch):
    model, data = in_float32()
    samples = [data.client(number).whole() for number in range(3)]
    task = ff.Task(model, ff.Federation.from_tensors(samples, samples[0]))
    # The one of all algorithms whose every vector a diagnostic looks at.
    algorithm = generic("fedsynsam" if name == "perturbation" else "fedmoswa")
    training = ff.Training(rounds=4, participants=2, local_steps=2, batch_size=5, evaluate_every=4)
    execution = ff.Execution(device="cuda", workers=1)
    with pretended(monkeypatch):
        run = ff.train(task, algorithm, training, execution)
        with ff.diagnostics.inspect(task, execution=execution, run=run) as subject:
            measure, options = DIAGNOSTICS[name].measure, OPTIONS.get(name, {})
            if name == "plane":
                # Made-up eigenvalues do not span one.
                with pytest.raises(FlatfedError, match="different directions"):
                    measure(subject, **options)
                monkeypatch.setattr(
                    sys.modules["flatfed.diagnostics.plane"],
                    "widest_plane",
                    lambda displacements: displacements,
                )
            assert measure(subject, **options)
            if name == "drift":
                end = torch.zeros_like(subject.model)
                assert ff.diagnostics.between(subject, end, subject.buffers, [0, 1])
