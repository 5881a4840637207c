"""Bounds on how far two trainings drift apart, for any composition of parts.

Two trainings, whatever their clients, whose gradients are no longer than Θ and which start from one model
are after T rounds at most

    D_T = 2 Θ Σ_r Σ_j |(A^(T−1−r) B_j)_x|

apart, with the response s ← A s + B u of a round (`response`). Without memory on clients that is the exact
worst case: gradients ± Θ with the response's signs attain it. With step sizes that change from round to
round, the product of the rounds' A takes the place of the power.

Weight decay is part of the response, and brings trainings together. Where clients remember, it is counted
to the gradients instead, and Θ must be a bound for these. Adam on the server is bounded by the linear rule
that it names (`majorant`), whose steps are added up by length. There is no bound for local AdamW and Muon,
extrapolation, rules that must see all uploads, and under compression.

With unequal numbers of local steps the bound is that of clients that all take the most of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from flatfed.core.algorithm import Algorithm
from flatfed.core.part import Optimizer
from flatfed.core.settings import Training
from flatfed.theory.response import NEGLIGIBLE, Probe, Response, readable


def stability_bound(
    algorithm: Algorithm, training: Training, steps: int, gradient_bound: float, rounds: int
) -> list[float] | None:
    """The bound on ‖x_t − x'_t‖ after each of `rounds` rounds; None if the algorithm has none.

    `gradient_bound` is Θ, for gradients with and without weight decay.
    """
    bounded = _bounded(algorithm, training, steps, gradient_bound, range(rounds))
    return None if bounded is None else list(bounded.distances())


def local_bound(
    algorithm: Algorithm, training: Training, steps: int, gradient_bound: float, round_number: int = 0
) -> list[float] | None:
    """The bound on how far two clients of one round are apart after 0, 1, … `steps` local steps."""
    bounded = _bounded(algorithm, training, steps, gradient_bound, [round_number])
    return None if bounded is None else (2 * bounded.longest * bounded.responses[0].local).tolist()


class _Bounded(NamedTuple):
    """The responses of the rounds, and how long a gradient may be."""

    responses: Sequence[Response]
    longest: float
    added_up: bool
    """Whether the model's steps are to be added up by length, because another rule's are no longer."""

    def distances(self) -> Iterator[float]:
        """After each round."""
        reached = torch.zeros(len(self.responses[0].state), 0, dtype=torch.float64)
        total = 0.0
        for response in self.responses:
            before = reached[0]
            reached = torch.cat([response.state @ reached, response.inputs], 1)
            if self.added_up:
                moved = reached[0].clone()
                moved[: len(before)] -= before
                total += float(moved.abs().sum())
            else:
                total = float(reached[0].abs().sum())
            yield 2 * self.longest * total


def _bounded(
    algorithm: Algorithm, training: Training, steps: int, gradient_bound: float, rounds: Sequence[int]
) -> _Bounded | None:
    majorant, clips_all = (
        algorithm.server.majorant,
        training.clip is not None and training.clip_stage == "total",
    )
    linear = algorithm if majorant is None else replace(algorithm, server=majorant)
    if clips_all:
        # What corrections and the optimizer make of a gradient is clipped as a whole.
        if any(part.alters_displacement or part.shifts_model for part in algorithm.corrections):
            return None
        linear = replace(linear, correct=(), optimizer=Optimizer())
        longest = training.clip or gradient_bound
    else:
        longest = gradient_bound if training.clip is None else min(gradient_bound, training.clip)
    bare, rates = readable(linear), [training.rate(number) for number in rounds]
    if bare is None or not (probe := Probe(bare, training, steps)).is_linear(rates[0]):
        return None
    first = probe.response(rates[0])
    if training.weight_decay and (first is None or majorant is not None):
        # With the weight decay in the gradients.
        if clips_all or not probe.decays_gradients(rates[0]):
            return None
        probe, longest = Probe(bare, training.replaced(weight_decay=0.0), steps), gradient_bound
        first = probe.response(rates[0])
    if first is None or (majorant is not None and not _ignores_place(first)):
        return None
    by_rate = {rate: probe.response(rate) for rate in dict.fromkeys(rates)}
    responses = [response for rate in rates if (response := by_rate[rate]) is not None]
    return _Bounded(responses, longest, majorant is not None) if len(responses) == len(rates) else None


def _ignores_place(response: Response) -> bool:
    """Whether a round does the same wherever the model is."""
    from_model = response.state[:, 0].clone()
    from_model[0] -= 1
    return bool((from_model.abs() < NEGLIGIBLE).all())
