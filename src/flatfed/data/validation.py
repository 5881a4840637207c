"""Which of the clients' samples are held out to choose settings by; nobody trains on them.

All samples are put in a line, class after class, within a class client after client, and otherwise at random.
Of n samples in the line share · n are taken at equal distances, from a random start. Every class therefore
gives its share, up to one sample, and so does what a client holds of it: many clients with few samples of
a class give as many together as one client with all of them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatfed.data.partition.base import Indices


def held_out_rows(
    rows: Indices,
    clients: Indices,
    labels: NDArray[Any] | None,
    share: float,
    generator: np.random.Generator,
) -> Indices:
    """Some of the `rows`, each of which one of the `clients` holds; `labels` are those of all samples."""
    # A sample that several clients hold is one sample, and held out from all of them.
    samples, places = np.unique(rows, return_index=True)
    classes = np.zeros(len(samples)) if labels is None else labels[samples]
    line = np.lexsort((generator.random(len(samples)), clients[places], classes))
    taken = np.diff(np.floor(share * np.arange(len(samples) + 1) + generator.random())) > 0
    return np.sort(samples[line[taken]])
