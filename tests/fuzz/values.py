"""Values that somebody might write into a config, good and absurd, but none that is only slow to train."""

import datetime
import inspect
from typing import Any

from hypothesis import strategies as st

from flatfed.algorithms import ALGORITHMS
from flatfed.core.part import ServerTask
from flatfed.core.settings import Training
from flatfed.data.partition import PARTITIONS
from flatfed.engines.execution import Execution

SIZES = (10**6, 10**9, 2**31, 2**32, 2**63, 2**64, 10**12, 10**30, 10**400)
integers = st.integers(-2, 5) | st.sampled_from([sign * size for size in SIZES for sign in (1, -1)])
numbers = integers | st.floats() | st.sampled_from([1e-320, 1e-45, 1e38, 3.5e38, 1e300, -0.0, 0.5, 1.0])
# Not those whose server trains by itself in every round, which takes its time.
QUICK = sorted(
    name
    for name, make in ALGORITHMS.items()
    if not any(isinstance(part, ServerTask) for part in make().parts)
)
# Networks that take more than a moment, data that would have to be fetched and clusters are left out.
NAMES = [
    *QUICK,
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


def _algorithm(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """A named algorithm with a few of its own options."""
    known = sorted(inspect.signature(ALGORITHMS[name]).parameters)
    options = st.dictionaries(st.sampled_from(known), numbers, max_size=2) if known else st.just({})
    return options.map(lambda chosen: {"name": name, **chosen})


shares = st.sampled_from([0.01, 0.3, 1.0, 1e-300]) | st.floats(0, 1)
positive = st.sampled_from([0.01, 0.5, 1.0, 10.0, 1e-45, 1e-300, 1e38, 1e300]) | st.floats(0, 100)
counts = st.integers(1, 12) | st.sampled_from([10**6, 10**9, 10**15])
compressors = st.one_of(
    st.builds(lambda bits: {"part": "quantize", "bits": bits}, st.integers(1, 32)),
    st.builds(lambda share: {"part": "top_k", "share": share}, shares),
    st.sampled_from(["sign", "none", "error_feedback"]),
    st.just({"part": "error_feedback", "of": {"part": "top_k", "share": 0.1}}),
)
# What could well be meant, field by field, at the edge of sense and beyond.
PLAUSIBLE: dict[tuple[str, str], st.SearchStrategy[Any]] = {
    ("data", "clients"): st.integers(1, 40) | counts,
    ("data", "client_tests"): st.integers(1, 40) | st.just("matching"),
    ("partition", "concentration"): positive,
    ("model", "hidden"): st.lists(counts, max_size=3),
    ("algorithm", "compress"): compressors,
    ("training", "participation"): shares,
    ("training", "participants"): counts,
    ("training", "sampling"): st.sampled_from(["fixed", "bernoulli"]),
    ("training", "local_epochs"): st.integers(1, 3),
    ("training", "local_steps"): st.integers(1, 5) | st.sampled_from([10**9, 10**15]),
    ("training", "batch_size"): st.integers(1, 3000) | counts | st.just("full"),
    ("training", "lr"): positive,
    ("training", "lr_decay"): shares,
    ("training", "lr_decay_every"): counts,
    ("training", "lr_cosine"): counts,
    ("training", "lr_warmup"): counts,
    ("training", "radius_schedule"): st.sampled_from(["constant", "lr", "sqrt"]),
    ("training", "weight_decay"): positive,
    ("training", "clip"): positive,
    ("training", "clip_stage"): st.sampled_from(["loss", "total"]),
    ("training", "weighting"): st.sampled_from(["uniform", "samples"]),
    ("training", "evaluate_every"): counts,
    ("training", "evaluate"): st.sampled_from(["broadcast", "active_mean"]),
    ("training", "seed"): st.integers(0, 2**64),
    ("training", "path"): st.sampled_from(["auto", "matrix", "client"]),
    ("training", "rounds"): st.integers(1, 3),
    ("execution", "client_memory"): st.sampled_from([0, 1, 10**6, 10**18]),
    ("execution", "checkpoint_every"): counts,
    ("execution", "device"): st.sampled_from(["cpu", "meta", "cuda:7", "cpu:3"]),
}
partitions = st.one_of(
    st.builds(
        lambda name, value: {"name": name, "concentration": value}, st.sampled_from([*PARTITIONS]), positive
    ),
    st.builds(
        lambda name, count: {"name": name, "classes_per_client": count},
        st.sampled_from(["pathological_balanced", "pathological_independent"]),
        st.integers(1, 12),
    ),
    st.sampled_from(["iid", "natural"]).map(lambda name: {"name": name}),
)
plausible = st.one_of(
    st.sampled_from(sorted(PLAUSIBLE)).flatmap(lambda key: PLAUSIBLE[key].map(lambda value: (key, value))),
    partitions.map(lambda table: (("partition", ""), table)),
    st.sampled_from(QUICK).flatmap(_algorithm).map(lambda table: (("algorithm", ""), table)),
    st.tuples(keys, scalars),
)
"""Where (a table and its key, or a whole table) and what."""
