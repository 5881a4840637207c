"""One small problem whose inputs are a tensor, or the same numbers in containers of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CLIENTS, SIZE, CLASSES, WORDS = 6, 9, 3, 7
Data = list[tuple[Any, Any]]


@dataclass
class Batch:
    numbers: Tensor
    codes: Tensor
    weights: Tensor | None = None


class Pair(NamedTuple):
    numbers: Tensor
    codes: Tensor


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda numbers, codes: (numbers, codes),
    "dictionary": lambda numbers, codes: {"numbers": numbers, "codes": codes},
    "dataclass": Batch,
    "named tuple": Pair,
    "nested": lambda numbers, codes: {"numbers": numbers, "more": {"codes": (codes,)}},
}
"""Ways to give numbers [N, 4] and codes [N, 2], which are whole numbers below WORDS."""


class Tabular(nn.Module):
    """One tensor [N, 6] of numbers and codes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(0.5 * torch.randn(WORDS, 3, dtype=torch.float64))
        self.head = nn.Linear(4 + 2 * 3, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.outputs(inputs[:, :4], inputs[:, 4:].long())

    def outputs(self, numbers: Tensor, codes: Tensor) -> Tensor:
        chosen = (codes[..., None] == torch.arange(WORDS)).to(numbers.dtype) @ self.table
        return self.head(torch.cat([numbers, chosen.flatten(1)], 1))


class Named(Tabular):
    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        assert codes.dtype == torch.int32, "whole numbers stay what they are"
        return self.outputs(numbers, codes.long())


class OneObject(Tabular):
    def forward(self, batch: Any) -> Tensor:
        return self.outputs(batch.numbers, batch.codes.long())


class Nested(Tabular):
    def forward(self, numbers: Tensor, more: dict[str, Any]) -> Tensor:
        return self.outputs(numbers, more["codes"][0].long())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tuple": Named,
    "dictionary": Named,
    "dataclass": OneObject,
    "named tuple": OneObject,
    "nested": Nested,
}


def drawn(clients: int = CLIENTS, size: int = SIZE) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Numbers, codes and labels of each client."""
    generator = torch.Generator().manual_seed(11)
    return [
        (
            torch.randn(size, 4, generator=generator, dtype=torch.float64) + client / 4,
            torch.randint(0, WORDS, (size, 2), generator=generator, dtype=torch.int32),
            torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for client in range(clients)
    ]


def formed(form: str, clients: int = CLIENTS, size: int = SIZE) -> Data:
    return [(FORMS[form](numbers, codes), labels) for numbers, codes, labels in drawn(clients, size)]


def plain(clients: int = CLIENTS, size: int = SIZE) -> Data:
    return [(torch.cat([numbers, codes], 1), labels) for numbers, codes, labels in drawn(clients, size)]
