"""How a cohort is divided into chunks that are trained together; the same for any number of workers."""

import itertools
from collections.abc import Sequence

from flatfed.engines.devices import free_memory
from flatfed.engines.planning import Plan

MATRIX_CLIENTS = 64
"""At most so many clients in one chunk of the matrix path,"""
MATRIX_ENTRIES = 2**18
"""and about so many numbers in its matrix: more would fall out of a core's cache,"""
FEWEST_CLIENTS = 6
"""but not fewer clients than that, or calls would cost more than what they compute;"""
CHUNKS = 16
"""smaller where there would be fewer chunks than that, so that several workers have something to do."""
MEMORY_SHARE = 0.5
"""Of an accelerator's free memory, for the chunks that all workers train at a time."""


def chunks(plan: Plan, cohort: Sequence[int]) -> list[Sequence[int]]:
    """Clients that are trained together, in chunks as equal as they can be."""
    size = 1
    if plan.path == "matrix" and plan.device.type == "cpu":
        size = min(MATRIX_ENTRIES // plan.division.whole.size, -(-len(cohort) // CHUNKS))
        size = min(MATRIX_CLIENTS, max(FEWEST_CLIENTS, size))
    elif plan.path == "matrix":
        size = min(MATRIX_CLIENTS, plan.most_clients or MATRIX_CLIENTS)
    count = -(-len(cohort) // size)
    bounds = [len(cohort) * number // count for number in range(count + 1)]
    return [cohort[start:end] for start, end in itertools.pairwise(bounds)]


def fitting_clients(plan: Plan, workers: int) -> int | None:
    """How many clients of the matrix path fit into an accelerator's free memory, for each of its workers.

    A power of 2, so that chunks, and with them bits, stay the same if a little more or less is free.
    """
    free = free_memory(plan.device)
    if free is None or plan.path != "matrix":
        return None
    fitting = int(MEMORY_SHARE * free) // (workers * plan.client_bytes)
    return 1 << max(0, fitting.bit_length() - 1)
