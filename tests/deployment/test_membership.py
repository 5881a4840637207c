"""Which sites belong to a federation, and how many of them a round needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from problems import FEATURES, federation, generic, in_float32, network
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flatfed as ff

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'flatfed[flower]'")

from federation_in_process import (
    NAMES,
    Deployment,
    Single,
    assert_same_bits,
    changed_header,
    local,
    only,
    trained_in,
)
from flwr.app import Context, Message

# -- enough clients ----------------------------------------------------------------------------------------


def test_a_round_with_too_few_uploads_is_repeated(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.scaffold(), minimum_clients=3)
    client, failures = deployment.members(2)[1], []

    def fail_twice(reply: Message) -> Message | None:
        failures.append(client)
        return None if len(failures) < 3 else reply

    only(deployment, client, 2, fail_twice)
    served = deployment.serve()
    assert len(failures) == 3 and "round 3: 2 of at least 3 uploads after attempt 2 of 3" in caplog.text
    assert_same_bits(local(deployment), served)


def test_after_the_last_attempt_the_run_stops_and_can_go_on(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), minimum_clients=3, attempts=2)
    only(deployment, deployment.members(2)[1], 2, lambda reply: None)
    with pytest.raises(
        ff.FlatfedError, match=r"^minimum_clients = 3: round 3 had 2 valid uploads after 2 attempts"
    ):
        deployment.serve()
    deployment.restart()
    assert_same_bits(local(deployment), deployment.serve())


@pytest.mark.parametrize("steps", [8, 30])
def test_divergence_at_every_site_is_told_as_such(steps, tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), lr=3e38, local_steps=steps)
    names = ", ".join(NAMES[client] for client in deployment.members(0))
    with pytest.raises(ff.DivergedError, match=f"^round 1: training diverged at {names}; lower lr "):
        deployment.serve()
    trained = [site for site, message in deployment.grid.sent if trained_in(message) is not None]
    assert len(trained) == 3, "they would do the same again"


def test_divergence_of_buffers_alone_is_told_as_such(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), lambda: nn.Sequential(Single(3e38), network()))
    with pytest.raises(ff.DivergedError, match=r"^round 1: training diverged at "):
        deployment.serve()


def test_sites_that_are_missing_have_not_diverged(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), lr=3e38, local_steps=30, attempts=2)
    only(deployment, deployment.members(0)[0], 0, lambda reply: None)
    with pytest.raises(ff.FlatfedError, match=r"^minimum_clients = 1: round 1 had 0 valid uploads"):
        deployment.serve()


def test_a_node_that_comes_back_is_waited_for(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), minimum_clients=3, round_timeout=10.0)
    looks, (client, *_) = [], deployment.members(2)
    real = deployment.grid.get_nodes

    def get_nodes() -> Any:
        if deployment.grid.offline:
            looks.append(client)
            if len(looks) == 3:
                deployment.grid.offline = set()
        return real()

    deployment.grid.get_nodes = get_nodes  # type: ignore[method-assign]

    def leave(progress: ff.Progress) -> None:
        if progress.round == 2:
            deployment.grid.offline = {NAMES[client]}

    deployment.callbacks.append(leave)
    assert_same_bits(local(deployment), deployment.serve())
    assert len(looks) == 3


@pytest.mark.parametrize("lost", [1, 3])
def test_a_site_whose_description_was_lost_is_asked_again(lost, tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), registered=False, rounds=2)
    deployment.serve()
    deployment.restart(rounds=9)
    queries = []

    def lose(site: str, message: Message, reply: Message) -> Message | None:
        if (site, message.metadata.message_type) == (NAMES[3], "query"):
            queries.append(site)
            return None if len(queries) <= lost else reply
        return reply

    deployment.grid.fault = lose
    served = deployment.serve()
    member = [number for number in range(2, 9) if 3 in deployment.members(number)]
    # One query comes with the first round, then one with each round in which it is missing.
    assert_same_bits(local(deployment, {(number, 3) for number in member[: lost - 1]}), served)
    assert len(queries) == lost + 1


def test_a_stranger_that_says_nothing_is_asked_once(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), registered=False, clients=tuple(NAMES))
    deployment.grid.ids["stranger"], deployment.grid.nodes["stranger"] = 99, {"name": "stranger"}
    deployment.grid.fault = lambda site, message, reply: None if site == "stranger" else reply
    assert_same_bits(local(deployment), deployment.serve())
    assert [site for site, _ in deployment.grid.sent].count("stranger") == 1


# -- who belongs to it -------------------------------------------------------------------------------------


def test_a_node_that_does_not_belong_is_never_asked_to_train(tmp_path):
    """Neither one under a name of its own nor one that claims the name of a registered one."""
    members = NAMES[:6]
    deployment = Deployment(tmp_path, ff.scaffold(), clients=tuple(reversed(members)))
    deployment.data = federation(6)
    deployment.grid.ids["intruder"] = 99
    deployment.grid.nodes["intruder"] = {"name": NAMES[2], "state": str(tmp_path / "intruder")}
    real = deployment.grid.get_nodes

    def get_nodes() -> Any:
        nodes = list(real())
        nodes[-1].ClearField("name")
        return nodes

    deployment.grid.get_nodes = get_nodes  # type: ignore[method-assign]
    served = deployment.serve()
    assert_same_bits(local(deployment), served)
    asked = {site for site, message in deployment.grid.sent if message.metadata.message_type != "query"}
    assert asked == set(members)


@pytest.mark.parametrize(
    ("clients", "complaint"),
    [
        (7, "clients = 7: 8 sites are connected"),
        (9, r"clients = 9: after 0.05 s only 8 sites are connected \(site-0, "),
        ((*NAMES, "site-x"), "only 8 sites are connected"),
    ],
)
def test_a_federation_that_is_not_complete_does_not_begin(clients, complaint, tmp_path):
    with pytest.raises(ff.FlatfedError, match=complaint):
        Deployment(tmp_path, ff.fedavg(), clients=clients).serve()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("claim", "complaint"),
    [
        ({"samples": 10**13}, "samples = 10000000000000: "),
        ({"samples": 10**19}, "samples = 10000000000000000000: "),
        ({"input_shape": [-1]}, "input_shape.0 = -1: "),
        ({"input_shape": [2**20, 2**20]}, "input_shape: 1099511627776 values in one sample"),
    ],
    ids=["many samples", "more samples than a number holds", "negative shape", "huge shape"],
)
def test_sites_with_impossible_data_do_not_belong(claim, complaint, tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.fedavg())

    def boast(site: str, message: Message, reply: Message) -> Message:
        return changed_header(**claim)(reply) if message.metadata.message_type == "query" else reply

    deployment.grid.fault = boast
    with pytest.raises(ff.FlatfedError, match="only 0 sites are connected"):
        deployment.serve()
    assert complaint in caplog.text


def test_a_site_with_very_many_samples_costs_the_server_nothing(tmp_path):
    """What it draws from them is its own affair; its server only counts the steps."""
    deployment = Deployment(tmp_path, ff.fedavg(), rounds=2, participants=8)
    claimed = 10**8

    def boast(site: str, message: Message, reply: Message) -> Message:
        boasting = site == NAMES[3] and message.metadata.message_type in {"query", "train"}
        return changed_header(samples=claimed)(reply) if boasting else reply

    deployment.grid.fault = boast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", limited(torch.randperm))
        served = deployment.serve()
    assert [line["participants"] for line in served.history] == [8, 8]


class Made(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made, and not only described."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.on = 0, True

    def __torch_dispatch__(self, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        outputs = function(*given, **(named or {}))
        for value in tree_leaves(outputs):
            if self.on and isinstance(value, torch.Tensor) and value.device.type != "meta":
                self.largest = max(self.largest, value.nbytes)
        return outputs


class Narrow(nn.Module):
    """Looks at the first of however many features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs[:, :FEATURES])


def test_the_server_makes_no_data_of_its_own(tmp_path):
    """Not one sample: sites say how many and how large theirs are, which may be too much for it."""
    deployment = Deployment(tmp_path, ff.fedavg(), Narrow, rounds=2)
    made, answer, planned = Made(), deployment.grid.call, []

    def call(site: str, message: Message) -> Message:
        made.on = False  # what a site does is its own affair
        reply = answer(site, message)
        made.on = True
        if message.metadata.message_type == "query":
            return changed_header(samples=10**8, input_shape=[2**28])(reply)
        return changed_header(samples=10**8)(reply) if trained_in(message) is not None else reply

    deployment.grid.call = call  # type: ignore[method-assign]
    deployment.callbacks.append(lambda progress: planned.append(progress.dimensions.input_shape))
    with made:
        served = deployment.serve()
    assert [line["participants"] for line in served.history] == [3, 3] and planned == [(2**28,)] * 2
    assert 0 < made.largest < 2**16


MISFITS: dict[str, tuple[Callable[[], nn.Module], ff.Algorithm, dict[str, Any], str]] = {
    "model": (
        lambda: nn.Linear(FEATURES + 1, 3).double(),
        ff.fedavg(),
        {},
        r"^model: it cannot be trained on inputs \[4\] float64, targets \[\] int64: .*4.*5",
    ),
    "layer inside": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Flatten(), network()),
        ff.fedavg(),
        {},
        r"^model: it cannot be trained on inputs \[4\] float64, targets \[\] int64: ",
    ),
    "loss": (
        network,
        ff.fedavg(),
        {"target_shape": [2]},
        r"^model: it cannot be trained on inputs \[4\] float64, targets \[2\] int64: .*target",
    ),
    "inputs that cannot be shifted": (
        lambda: nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(8, 3)),
        generic("fedrobust"),
        {"input_dtype": "int64"},
        r"^algorithm: fedrobust changes or makes up inputs, which must be floats, not inputs \[4\] int64, ",
    ),
    "targets that are no classes": (
        network,
        generic("fedsynsam"),
        {"target_shape": [3], "target_dtype": "float64"},
        r"^algorithm: fedsynsam makes up samples of every class, so targets must be class labels ",
    ),
    "unknown dtype": (network, ff.fedavg(), {"input_dtype": "float65"}, r"^dtype = 'float65': unknown"),
}
"""A model and an algorithm, what sites claim about their samples, and the complaint."""


@pytest.mark.parametrize("kind", MISFITS)
def test_samples_that_do_not_fit_are_refused_before_the_first_round(kind, tmp_path):
    model, algorithm, claim, complaint = MISFITS[kind]
    deployment = Deployment(tmp_path, algorithm, model)

    def describe(site: str, message: Message, reply: Message) -> Message:
        return changed_header(**claim)(reply) if message.metadata.message_type == "query" else reply

    deployment.grid.fault = describe
    with pytest.raises(ff.FlatfedError, match=complaint) as raised:
        deployment.serve()
    assert "\n" not in str(raised.value)
    assert {message.metadata.message_type for _, message in deployment.grid.sent} == {"query"}
    assert not (tmp_path / "run").exists()


class Looks(nn.Module):
    """Has a tensor that is no buffer, makes another, and looks at its inputs' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.centre = network(), torch.full((FEATURES,), 0.1, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        shifted = inputs - self.centre - 0.01 * torch.arange(FEATURES)
        return self.inner(-shifted if float(inputs.mean()) > 0 else shifted)


def test_a_model_that_cannot_be_tried_without_numbers_is_tried_at_the_sites(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), Looks)
    assert_same_bits(local(deployment), deployment.serve())
    with pytest.raises(ff.FlatfedError, match="fedsynsam makes up samples of every class, but how many"):
        Deployment(tmp_path / "classes", generic("fedsynsam"), Looks).serve()


def test_what_only_the_sites_can_see_is_in_the_error(tmp_path):
    """Numbers of another precision fit as far as shapes go."""
    deployment = Deployment(tmp_path, ff.fedavg(), lambda: network().float(), attempts=2)
    first = NAMES[deployment.members(0)[0]]
    complaint = (
        rf"had 0 valid uploads after 2 attempts \({first}: train: error 1000: model: it cannot be trained "
        r"on a batch of client 0 \(inputs \[5, 4\] float64, "
    )
    with pytest.raises(ff.FlatfedError, match=complaint) as raised:
        deployment.serve()
    assert "\n" not in str(raised.value)


def test_sites_train_in_the_precision_of_the_spec(tmp_path):
    _, data = in_float32()
    deployment = Deployment(tmp_path, ff.scaffold(), lambda: in_float32()[0], data, precision="bfloat16")
    served = deployment.serve()
    assert_same_bits(local(deployment), served)
    assert not torch.equal(served.server["model"], local(deployment, precision="float32").server["model"])
    model = deployment.spec.model()
    other = replace(deployment.spec, training=deployment.spec.training.replaced(precision="float32"))
    assert other.digest(model) != deployment.spec.digest(model)


def limited(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def drawn(count: int, **options: Any) -> torch.Tensor:
        assert count < 10**6
        return draw(count, **options)

    return drawn


def test_nodes_of_one_name_do_not_take_part(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.fedavg(), registered=False)
    deployment.grid.nodes["site-3"] = deployment.grid.nodes["site-4"]
    with pytest.raises(ff.FlatfedError, match="only 6 sites are connected"):
        deployment.serve()
    assert "2 nodes are called 'site-4'; none of them takes part" in caplog.text


def test_a_run_is_not_continued_with_other_clients_or_another_algorithm(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg())
    deployment.serve()
    with pytest.raises(ff.FlatfedError, match="clients = 9: the run in the folder is that of site-0, "):
        Deployment(tmp_path, ff.fedavg(), clients=9).serve()
    with pytest.raises(ff.FlatfedError, match="it holds another run"):
        Deployment(tmp_path, ff.scaffold()).serve()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda stored: stored | {"run": "../.."}, r"config\.json: federation\.run = '\.\./\.\.': "),
        (lambda stored: stored | {"samples": "many"}, r"config\.json: federation\.samples = 'many': "),
        (
            lambda stored: stored | {"samples": [3]},
            r"config\.json: federation: samples: 1 numbers for 8 names",
        ),
        (lambda stored: stored | {"names": 3}, r"config\.json: federation\.names = 3: "),
        (lambda stored: stored | {"extra": 3}, r"config\.json: federation\.extra: unknown"),
        (lambda stored: 3, r"config\.json: federation = 3: "),
    ],
)
def test_a_damaged_population_is_refused(damage, complaint, tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), rounds=1)
    deployment.serve()
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"federation": damage(config["federation"])}))
    with pytest.raises(ff.FlatfedError, match=complaint):
        deployment.serve()


def test_sites_whose_samples_differ_in_form_are_refused(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg())
    real = deployment.load

    def load(context: Context) -> Any:
        inputs, targets = real(context)
        return (inputs.float() if context.node_config["name"] == "site-3" else inputs), targets

    deployment.load = load  # type: ignore[method-assign]
    deployment.restart()
    with pytest.raises(ff.FlatfedError, match="input_dtype: float32 at site-3, float64 at site-0"):
        deployment.serve()
