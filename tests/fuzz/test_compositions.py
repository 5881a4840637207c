"""Any parts with any options: refused by name, or an algorithm that trains and goes on to the same bits."""

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import torch
from compositions import Linear
from hypothesis import given
from hypothesis import strategies as st
from problems import train
from rule import SOME, limits, scratch
from values import words

import flatfed as ff
from flatfed.algorithms.registry import parts_by_name
from flatfed.core.part import SLOTS

PARTS = {slot: sorted(parts_by_name(slot)) for slot in SLOTS}
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(
        ["models", "samples_per_class", "iterations", "steps", "span", "inner_batch", "batch", "epochs"],
        st.integers(1, 4),
    ),
    "bits": st.integers(2, 8),
    "bucket": st.none() | st.integers(1, 9),
    "optimizer": st.sampled_from(["adam", "sgd"]),
    "option": st.sampled_from(["I", "II"]),
    "duals": st.sampled_from(["server", "participants"]),
    "memory": st.sampled_from(["client", "server", 0.3]),
    "upload": st.sampled_from(["residual", "dual"]),
    "units": st.sampled_from(["model", "gradient"]),
    "state": st.sampled_from(["reset", "kept", "averaged", "blocks"]),
    "scale": st.sampled_from(["original", "match_rms_adamw", "none"]),
    "norm": st.sampled_from(["l2", "max"]),
    "shift": st.sampled_from(["full", "diagonal", "channel"]),
    "of": st.sampled_from(PARTS["compress"])
    | st.fixed_dictionaries({"part": st.just("top_k"), "ratio": st.just(0.5)}),
}
FLAGS = ["normalize", "scale_norms", "warm_start", "nesterov", "absorb_shift", "aggregate", "augment"]
OPTIONS |= dict.fromkeys([*FLAGS, "normalise", "soft_labels", "average_targets"], st.booleans())
usual = st.sampled_from([0.0, 0.1, 1.0]) | st.floats(0.01, 0.49)
odd = st.sampled_from(
    [-1, 2**63, 10**30, 1e300, 1e-320, -0.0, 3e38, 2e-38, "x", None, [], {}, True, float("nan")]
)


@st.composite
def part(draw: st.DrawFn, slot: str) -> Any:
    """A part of the slot with some of its options, most of them good."""
    name = draw(st.sampled_from(PARTS[slot]))
    kind = parts_by_name(slot)[name]
    described: dict[str, Any] = {"part": name}
    for item in fields(kind) if is_dataclass(kind) else ():
        option, needed = item.name, item.default is MISSING
        if option != "initial" and (needed or draw(st.booleans())):
            described[option] = draw(OPTIONS.get(option, usual))
        if not draw(st.integers(0, 30)):
            described[option] = draw(odd)
    if not draw(st.integers(0, 30)):
        described[draw(words)] = draw(odd)
    return described


@st.composite
def composition(draw: st.DrawFn) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for slot in draw(st.lists(st.sampled_from(sorted(SLOTS)), unique=True, max_size=5)):
        many = st.lists(part("correct"), max_size=2)
        described[slot] = draw(many if slot == "correct" else part(slot))
    # What other parts read, more often than chance would have it.
    if draw(st.booleans()):
        described.setdefault("server", {"part": "momentum", "decay": 0.5})
    if draw(st.booleans()):
        sizes = {"models": 3, "samples_per_class": 1, "iterations": 2, "steps": 1, "span": 1}
        described.setdefault("synthetic", {"part": "trajectory_matching", **sizes})
    return described


def federation() -> ff.Federation:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    return ff.Federation.from_tensors([(own, (own[:, 0] > 0).long()) for own in inputs])


@SOME
@given(
    composition(),
    st.fixed_dictionaries(
        {},
        optional={
            "clip": st.sampled_from([0.1, 1e-30, 3e38]),
            "clip_stage": st.sampled_from(["loss", "total"]),
            "weight_decay": st.sampled_from([0.1, 3e38]),
            "lr_decay": st.sampled_from([0.5, 2e-38]),
            "participants": st.integers(1, 3),
            "weighting": st.just("samples"),
            "path": st.sampled_from(["matrix", "client"]),
        },
    ),
)
def test_any_composition(description, settings):
    with limits(), scratch() as folder:
        try:
            algorithm = ff.build(description)
            training = {"local_steps": 2, "batch_size": 3, "lr": 0.2, "workers": 1, **settings}
            straight = train(Linear(), federation(), algorithm, rounds=2, **training)
        except ff.FlatfedError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
            return
        assert ff.build(algorithm.describe()).describe() == algorithm.describe()
        addresses = [vector.untyped_storage().data_ptr() for vector in straight.server.values()]
        assert len(set(addresses)) == len(addresses)
        assert bool(torch.isfinite(straight.server["model"]).all())
        train(Linear(), federation(), algorithm, rounds=1, folder=folder / "run", **training)
        resumed = train(Linear(), federation(), algorithm, rounds=2, folder=folder / "run", **training)
    assert resumed.server.keys() == straight.server.keys()
    for key, vector in straight.server.items():
        assert torch.equal(vector, resumed.server[key]), key
