"""Trees of tensors between sites, and on the workers of a cluster: the bits of the local engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from federation_in_process import NAMES, Deployment, local
from pydantic import ValidationError

import flatfed as ff
from flatfed.deployment import wire
from flatfed.deployment.sites import Sites
from flatfed.engines.planning import SampleShape
from trees.tree_problems import MODELS, Named, Tabular, formed


@pytest.mark.parametrize("form", ["tuple", "dictionary", "dataclass", "nested"])
def test_sites_with_trees_give_the_bits_of_the_local_engine(tmp_path, form):
    data = ff.Federation.from_tensors(formed(form, len(NAMES)))
    deployment = Deployment(tmp_path, ff.scaffold(), MODELS[form], data)
    served = deployment.serve()
    assert torch.equal(served.server["model"], local(deployment).server["model"])
    stored = Sites.stored(tmp_path / "run")
    assert stored is not None
    shape = SampleShape.of(*data.client(0).whole())
    dtypes = wire.dtypes_of(stored.input_dtype)
    assert (stored.input_shape, dtypes, stored.target_shape) == (shape.inputs, shape.input_dtype, ())
    deployment.restart(rounds=deployment.spec.training.rounds + 1)
    assert len(deployment.serve().history) == deployment.spec.training.rounds


def test_sites_of_other_forms_do_not_fit_together(tmp_path):
    data = ff.Federation.from_tensors(formed("dictionary", len(NAMES)))

    class Mixed(Deployment):
        def load(self, context: Any) -> Any:
            inputs, targets = super().load(context)
            other = (inputs["numbers"], inputs["codes"])
            return other if context.node_config["name"] == "site-3" else inputs, targets

    with pytest.raises(ff.FlatfedError, match=r"input_shape: .* at site-3, .* at site-0; all sites need"):
        Mixed(tmp_path, ff.fedavg(), Named, data).serve()


def test_a_server_refuses_a_model_that_does_not_take_the_sites_inputs(tmp_path):
    data = ff.Federation.from_tensors(formed("dictionary", len(NAMES)))
    with pytest.raises(ff.FlatfedError, match=r"cannot be trained on inputs {numbers: \[4\] float64"):
        Deployment(tmp_path, ff.fedavg(), Tabular, data).serve()


@pytest.mark.parametrize(
    ("shape", "dtype", "complaint"),
    [
        ({"a": [3]}, "int64", "another form"),
        ([[3], [4]], ["int64"], "another form"),
        ({"a": [3]}, {"b": "int64"}, "another form"),
        ({"a": [3]}, {"a": ["int64"]}, "another form"),
        ({"a": None}, {"a": "int64"}, "another form"),
        ({"a": [3, -1]}, {"a": "int64"}, "greater than or equal to 0"),
        ({"a": [[2], 3]}, {"a": ["int64", "int64"]}, "tuple"),
        ({"a": [2**20, 2**20]}, {"a": "int64"}, "values in one sample"),
        ({"a\u0007": [1]}, {"a\u0007": "int64"}, "cannot be shown"),
        ({"a": [1] * 17}, {"a": "int64"}, "at most 16"),
        ({"a": [1]}, {"a": "x" * 201}, "at most 200"),
        ({"a": [1]}, {"a": 3}, "valid string"),
    ],
)
def test_forged_descriptions_are_refused(shape, dtype, complaint):
    forged = {"name": "x", "samples": 1, "target_shape": [], "target_dtype": "int64"}
    with pytest.raises(ValidationError, match=complaint):
        wire.SiteDescription.model_validate_json(
            json.dumps({**forged, "input_shape": shape, "input_dtype": dtype})
        )


def test_a_description_of_trees_travels_and_comes_back():
    shape = {"a": (3,), "b": ((), {"c": (2, 2)}), "d": None}
    dtype = {"a": "int64", "b": ("bool", {"c": "f"}), "d": None}
    sent = wire.SiteDescription(
        name="x", samples=1, input_shape=shape, input_dtype=dtype, target_shape=(), target_dtype="int64"
    )
    assert wire.read_header(wire.SiteDescription, wire.content(sent)) == sent
    assert sent.input_shape == shape and sent.input_dtype == dtype


def test_a_deeply_nested_description_is_refused():
    text = '{"name": "x", "samples": 1, "input_shape": ' + "[" * 30000 + "]" * 30000
    text += ', "input_dtype": "f", "target_shape": [], "target_dtype": "int64"}'
    message = wire.content(wire.Header())
    message["header"]["json"] = text  # type: ignore[index]
    with pytest.raises(ff.FlatfedError, match="message: "):
        wire.read_header(wire.SiteDescription, message)
