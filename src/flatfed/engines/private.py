"""What a client keeps to itself during a round: its private entries and their own local steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from flatfed.core.context import ClientContext, Oracle
from flatfed.core.flat import all_finite
from flatfed.core.rounds import LocalSteps
from flatfed.core.sharing import PRIVATE_MODEL
from flatfed.core.state import State, Vectors
from flatfed.engines.oracles import SplitOracle
from flatfed.engines.planning import Plan


class PrivateEntries:
    """The private entries [..., Q] of a client or a chunk, which take the plain steps of `Algorithm.alone`.

    The gradient of such a step is that of the shared entries' first evaluation, at the local model.
    """

    def __init__(self, plan: Plan, state: State, rates: Sequence[float], round_number: int) -> None:
        self.start = state[PRIVATE_MODEL]
        self.point = self.start.clone()
        algorithm = plan.algorithm.alone
        context = ClientContext(
            round=round_number,
            received={"model": self.start},
            client={key: state[f"private.{key}"] for key in (v.name for v in algorithm.client_vectors)},
            rates=rates,
            layout=plan.division.private,
            input_shape=plan.dimensions.input_shape,
            full_gradient=_no_full_gradient,
            displacement=torch.zeros_like(self.point),
        )
        self._steps = LocalSteps(algorithm, context, plan.training, self.point)
        self._rates, self._first = rates, plan.training.sharing.private_steps

    def beside(self, oracle: Oracle, step: int, received: Tensor) -> Iterator[Oracle]:
        """What the shared entries take a step with, if they do; the private ones take theirs as well."""
        split = SplitOracle(oracle, self.point)
        if self._first is None:
            yield split
        elif step < self._first:
            split(received)
        else:
            yield split
            return
        gradient = split.private_gradient
        assert gradient is not None, "no gradient has been taken"
        self._steps.take(self._rates[step], cast(Oracle, lambda _: gradient))

    def finished(self) -> Vectors:
        """The client's private vectors after the round, by key."""
        kept, _ = self._steps.finished()
        return {PRIVATE_MODEL: self.point, **{f"private.{key}": value for key, value in kept.items()}}

    @property
    def finite(self) -> bool:
        return all_finite(self.point)


def _no_full_gradient() -> Tensor:
    raise AssertionError("plain steps take none")
