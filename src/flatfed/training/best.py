"""Which round of a training is the best by the validation samples, and whether a better one is still awaited.

Both follow from the history alone, so a training that goes on from a checkpoint decides as one that never
stopped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from flatfed.core.errors import FlatfedError, did_you_mean
from flatfed.core.settings import Training

Record = Mapping[str, Any]


def check_validation(training: Training, evaluated: Collection[str], metrics: Collection[str]) -> None:
    """Refuses to choose by samples that there are not, or by a metric that is not measured."""
    for name in ("patience", "best_by"):
        if getattr(training, name) is not None and "validation" not in evaluated:
            raise FlatfedError(
                f"{name} = {getattr(training, name)!r}: there are no validation samples to choose by; hold "
                "some out with federation.with_validation(0.1) or data.validation = 0.1"
            )
    known = {"loss", *metrics}
    if training.best_by is not None and training.best_by not in known:
        raise FlatfedError(
            f"best_by = {training.best_by!r}: not measured; {did_you_mean(training.best_by, known)}"
        )


def validation_value(record: Record, best_by: str | None) -> tuple[str, float] | None:
    """What a round is judged by and its value, where more is better; None if it was not evaluated.

    The accuracy if there is one, or else the loss, unless a metric is named.
    """
    names = ["accuracy", "loss"] if best_by is None else [best_by]
    name = next((f"validation_{name}" for name in names if f"validation_{name}" in record), None)
    if name is None:
        return None
    value = record[name]
    if not isinstance(value, int | float):
        return None
    value = float(value)
    return name, -math.inf if math.isnan(value) else -value if name == "validation_loss" else value


def best_record(records: Iterable[Record], best_by: str | None) -> Record | None:
    """The first of the best rounds."""
    best, most = None, -math.inf
    for record in records:
        judged = validation_value(record, best_by)
        if judged is not None and judged[1] > most:
            best, most = record, judged[1]
    return best


def ended_early(history: Sequence[Record], patience: Any, best_by: Any) -> bool:
    """Whether the last round of a history is one after which a training with this patience ends."""
    if not isinstance(patience, int) or not history or not isinstance(best_by, str | None):
        return False
    best = best_record(history, best_by)
    return (
        best is not None
        and validation_value(history[-1], best_by) is not None
        and history[-1]["round"] - best["round"] >= patience
    )
