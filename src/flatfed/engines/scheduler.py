"""Handing out jobs to several workers and taking the results in order: the same way for every engine."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol


class Workers(Protocol):
    """Processes or machines that carry out numbered jobs."""

    @property
    def idle(self) -> int:
        """How many more jobs can be started now."""
        ...

    def start(self, number: int, job: Any) -> None: ...

    def finished(self) -> Iterable[tuple[int, Any]]:
        """Waits until something happens; the jobs that have ended since, with their results or errors."""
        ...


def in_order(workers: Workers, jobs: Iterable[Any], ahead: int) -> Iterator[Any]:
    """Results in the order of the jobs, of which at most `ahead` are under way or waiting for their turn.

    After an error no more jobs are started, and the error is raised in its job's turn: whichever worker was
    faster, it is always the first one in order.
    """
    results: dict[int, Any] = {}
    remaining = enumerate(jobs)
    following = next(remaining, None)
    upcoming = running = 0
    failed = False
    while following is not None or running or results:
        while following is not None and not failed and workers.idle and following[0] < upcoming + ahead:
            workers.start(*following)
            running += 1
            following = next(remaining, None)
        if upcoming in results:
            result = results.pop(upcoming)
            if isinstance(result, Exception):
                raise result
            yield result
            upcoming += 1
            continue
        for number, outcome in workers.finished():
            results[number] = outcome
            running -= 1
            failed = failed or isinstance(outcome, Exception)
