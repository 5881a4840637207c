"""Diagnostics in the course of a training: their numbers go into the history, every so many rounds.

with ff.diagnostics.inspect(task, algorithm, training) as subject:
    sharpness = ff.diagnostics.DuringTraining(subject, "sharpness", {"sharpness": "global"}, every=10)
    ff.train(task, algorithm, training, callbacks=[sharpness])
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatfed.diagnostics.folder import check
from flatfed.diagnostics.registry import DIAGNOSTICS
from flatfed.diagnostics.subject import Subject
from flatfed.runs.statistics import finite, mean
from flatfed.training.loop import Progress


@dataclass(frozen=True)
class DuringTraining:
    """A callback that measures a diagnostic and records some of its numbers.

    `numbers` says what they are called in the history and where in the result they are, for instance
    {"loss_gap": "gap.loss"}; of lists the mean is taken. It is measured every so many rounds, in the first
    and in the last one. The training's own numbers stay as they are.
    """

    subject: Subject
    """The task that is trained, with the same algorithm and settings."""
    diagnostic: str
    numbers: Mapping[str, str]
    every: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check([self.diagnostic], self.options)

    def __call__(self, progress: Progress) -> dict[str, float]:
        if progress.round % self.every and progress.round not in {1, self.subject.training.rounds}:
            return {}
        known = DIAGNOSTICS[self.diagnostic]
        result = known.measure(self.subject.later(progress), **known.options(self.options))
        values = {name: _number(result, path) for name, path in self.numbers.items()}
        return {name: value for name, value in values.items() if value is not None}


def _number(result: Any, path: str) -> float | None:
    """What a dotted path leads to; None where there is no number."""
    for key in path.split("."):
        result = result.get(key) if isinstance(result, Mapping) else None
    return mean(result) if isinstance(result, list | tuple) else finite(result)
