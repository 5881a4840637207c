"""Values that somebody might write into a config, good and absurd, but none that is only slow to train."""

import datetime
from typing import Any

from hypothesis import strategies as st

from flatfed.algorithms import ALGORITHMS
from flatfed.core.settings import Training
from flatfed.data.partition import PARTITIONS
from flatfed.engines.execution import Execution

SIZES = (10**6, 10**9, 2**31, 2**32, 2**63, 2**64, 10**12, 10**30, 10**400)
integers = st.integers(-2, 5) | st.sampled_from([sign * size for size in SIZES for sign in (1, -1)])
numbers = integers | st.floats() | st.sampled_from([1e-320, 1e-45, 1e38, 3.5e38, 1e300, -0.0, 0.5, 1.0])
# Networks that take more than a moment, data that would have to be fetched and clusters are left out.
NAMES = [
    *ALGORITHMS,
    *PARTITIONS,
    *("digits", "npz", "image_folder", "logistic_regression", "mlp", "lenet5", "char_lstm", "convnet"),
    *(
        "client",
        "matrix",
        "auto",
        "samples",
        "uniform",
        "bernoulli",
        "cuda",
        "meta",
        "cpu",
        "mps",
        "local",
        "",
    ),
    *("quantize", "top_k", "error_feedback", "sharpness_aware", "momentum", "trimmed_mean", "fedavg:lr=1"),
]
words = st.sampled_from(NAMES) | st.text(max_size=12)
scalars: st.SearchStrategy[Any] = numbers | st.booleans() | words
values: st.SearchStrategy[Any] = st.recursive(
    scalars | st.dates() | st.just(datetime.time(1, 2)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=4,
)
KEYS = {
    "data": [
        "dataset",
        "clients",
        "client_tests",
        "options",
        "options.mean",
        "options.std",
        "options.folder",
    ],
    "partition": ["name", "concentration", "classes_per_client", "groups", "minimum"],
    "model": ["name", "hidden", "width", "bias"],
    "algorithm": ["name", "radius", "momentum", "server_lr", "gradient", "correct", "compress", "aggregate"],
    "training": list(Training.model_fields),
    "execution": [name for name in Execution.model_fields if name != "engine"],
}
keys = st.sampled_from([(table, key) for table, names in KEYS.items() for key in names])
