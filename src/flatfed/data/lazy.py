"""Samples of a map-style dataset that are read when their client takes part."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import index
from typing import Any

from flatfed.core import random
from flatfed.core.errors import FlatfedError, first_line, name_of, shown, user_errors
from flatfed.data.samples import Samples, collated, stacked_samples

MOST_LOADERS = 256


class LazySamples:
    """Loads a client's samples."""

    def __init__(
        self,
        dataset: Any,
        indices: Sequence[Sequence[int]],
        collate: Callable[[list[Any]], Samples] | None,
        loaders: int,
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise FlatfedError("dataset: it has no length or no numbered samples; give a map-style dataset")
        if not isinstance(loaders, int) or isinstance(loaders, bool) or not 1 <= loaders <= MOST_LOADERS:
            raise FlatfedError(f"loaders = {shown(loaders)}: give a number of threads, 1 to {MOST_LOADERS}")
        with user_errors(f"dataset: the length of {name_of(dataset)}"):
            count = len(dataset)
        try:
            self._rows = [list(map(_row, own)) for own in indices]
        except (TypeError, ValueError) as error:
            raise FlatfedError(f"indices: give each client's sample numbers ({first_line(error)})") from None
        for client, own in enumerate(self._rows):
            if not own:
                raise FlatfedError(f"indices[{client}]: no samples; leave the client out or give it some")
            if not 0 <= min(own) <= max(own) < count:
                odd = next(number for number in own if not 0 <= number < count)
                raise FlatfedError(f"indices[{client}]: no sample {odd}; the data have 0 … {count - 1}")
        self._dataset, self._collate, self._loaders = dataset, collate, loaders

    @property
    def total(self) -> int:
        return sum(map(len, self._rows))

    @property
    def common_size(self) -> int | None:
        """The number of samples of every client, if they all have as many."""
        sizes = set(map(len, self._rows))
        return sizes.pop() if len(sizes) == 1 else None

    def __call__(self, client: int) -> Samples:
        rows = self._rows[client]
        if self._loaders == 1:
            samples = [self._sample(row) for row in rows]
        else:
            # Not processes: workers may not start some, and decoding leaves the interpreter lock free.
            with ThreadPoolExecutor(self._loaders) as pool:
                samples = list(pool.map(self._sample, rows))
        return stacked_samples(samples) if self._collate is None else collated(samples, self._collate)

    def _sample(self, row: int) -> Any:
        with random.routed(random.torch_generator(0, "lazy sample", row)):
            return self._dataset[row]


def _row(number: Any) -> int:
    if isinstance(number, bool) or str(getattr(number, "dtype", "")).endswith("bool"):
        raise TypeError(f"{number} is a boolean")
    return index(number)
