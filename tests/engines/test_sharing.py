"""What of a model is shared: private parameters, normalisation layers, and what clients end up with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation_in_process import NAMES, Deployment, assert_same_bits, local
from problems import CLIENTS, DEFAULTS, FEATURES, federation, generic, network, run
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.rounds import Broadcast
from flatfed.core.sampling import batches, cohort
from flatfed.core.settings import Sharing
from flatfed.core.sharing import PRIVATE_BUFFERS, PRIVATE_MODEL
from flatfed.data.federation import Federation
from flatfed.deployment import FederationSpec
from flatfed.engines.worker import Worker
from flatfed.training.config import Config
from flatfed.training.start import start_engine

HEAD = Sharing(private=("2",))
LOCAL = Sharing(normalisation="local")


def normalised() -> nn.Sequential:
    first, *others = network()
    return nn.Sequential(first, nn.BatchNorm1d(5).double(), *others)


def with_tests() -> Federation:
    """The problem's clients, each with test samples of its own."""
    own = federation()
    samples = [own.client(number).whole() for number in range(CLIENTS)]
    return ff.Federation.from_tensors(
        [(inputs[:8], targets[:8]) for inputs, targets in samples],
        client_tests=[(inputs[8:], targets[8:]) for inputs, targets in samples],
    )


class Literal:
    """Federated averaging in which some entries of a state dictionary stay with the clients, written out."""

    def __init__(self, model: nn.Module, kept: list[str], first_steps: int | None = None, **options: Any):
        self.model, self.kept, self.first_steps, self.data = model, kept, first_steps, federation()
        self.training = ff.Training(
            **{key: value for key, value in {**DEFAULTS, **options}.items() if key != "workers"}
        )
        first = {name: value.clone() for name, value in model.state_dict().items()}
        self.server = first
        self.own = [{name: first[name].clone() for name in kept} for _ in range(CLIENTS)]

    def run(self) -> None:
        for number in range(self.training.rounds):
            members = cohort(self.training, CLIENTS, number)
            results = [self.client(client, number) for client in members]
            for name in self.server.keys() - set(self.kept):
                mean = sum(result[name].double() for result in results) / len(members)
                self.server[name] = mean if mean.dim() else mean.round().to(self.server[name].dtype)

    def client(self, client: int, number: int) -> dict[str, Tensor]:
        training, data = self.training, self.data.client(client)
        self.model.load_state_dict({**self.server, **self.own[client]})
        self.model.train()
        parameters = dict(self.model.named_parameters())
        for step, chosen in enumerate(batches(training, len(data), number, client)):
            inputs, targets = data.batch(chosen)
            loss = F.cross_entropy(self.model(inputs), targets)
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            with torch.no_grad():
                for (name, value), gradient in zip(parameters.items(), gradients, strict=True):
                    private_step = self.first_steps is not None and step < self.first_steps
                    if self.first_steps is None or private_step == (name in self.kept):
                        value.sub_(training.rate(number) * (gradient + training.weight_decay * value))
        after = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.own[client] = {name: after[name] for name in self.kept}
        return after


def assert_like(finished: ff.Run, literal: Literal) -> None:
    """The same shared entries, and every client's own."""
    for name, value in finished.model.state_dict().items():
        assert torch.allclose(value.double(), literal.server[name].double(), rtol=0, atol=1e-12), name
    for client in range(CLIENTS):
        model = finished.client_model(client).state_dict()
        for name, value in literal.own[client].items():
            assert torch.allclose(model[name].double(), value.double(), rtol=0, atol=1e-12), (client, name)


# -- against literal loops ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_private_heads_are_fedper(path):
    literal = Literal(network(), ["2.weight", "2.bias"])
    literal.run()
    finished = run(ff.fedavg(), sharing=HEAD, path=path)
    assert_like(finished, literal)
    assert any(not torch.equal(literal.own[0][name], literal.own[1][name]) for name in literal.kept)


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_private_steps_first_are_fedrep(path):
    literal = Literal(network(), ["2.weight", "2.bias"], first_steps=2)
    literal.run()
    sharing = HEAD.replaced(private_steps=2)
    assert_like(run(ff.fedavg(), sharing=sharing, path=path), literal)
    together = run(ff.fedavg(), sharing=HEAD, path=path)
    assert not torch.allclose(together.server["model"], run(ff.fedavg(), sharing=sharing).server["model"])


def test_local_normalisation_is_fedbn():
    kept = [f"1.{name}" for name in normalised()[1].state_dict()]
    literal = Literal(normalised(), kept)
    literal.run()
    finished = run(ff.fedavg(), model=normalised(), sharing=LOCAL)
    assert_like(finished, literal)
    assert int(literal.own[0]["1.num_batches_tracked"]) > 0
    assert finished.history[0]["bytes_up"] == 3 * 8 * 43, "neither parameters nor buffers of the layer"


def test_frozen_normalisation_stays_as_it_was_and_in_evaluation_mode():
    model = normalised()
    with torch.no_grad():
        model[1].running_mean.fill_(0.3)
        model[1].weight.fill_(1.5)
    finished = run(ff.fedavg(), model=model, sharing=Sharing(normalisation="frozen"), path="client")
    for name, value in model[1].state_dict().items():
        assert torch.equal(finished.model[1].state_dict()[name], value), name
    # The same model, with the layer written as the constant map that it is.
    scale = 1.5 / (1 + model[1].eps) ** 0.5

    class Constant(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return (inputs - 0.3) * scale

    first, *others = network()
    plain = run(ff.fedavg(), model=nn.Sequential(first, Constant(), *others), path="client")
    assert torch.allclose(finished.server["model"], plain.server["model"], rtol=0, atol=1e-12)
    assert finished.history[0]["bytes_up"] == plain.history[0]["bytes_up"]


def test_recomputed_statistics_are_those_of_the_servers_samples():
    data, sharing = federation().with_validation(0.3, 0), Sharing(normalisation="recompute")
    finished = run(ff.fedavg(), model=normalised(), data=data, sharing=sharing)
    inputs, _ = data.validation
    with torch.no_grad():
        seen = finished.model[0](inputs)
    assert torch.allclose(finished.model[1].running_mean, seen.mean(0), rtol=0, atol=1e-12)
    assert torch.allclose(finished.model[1].running_var, seen.var(0), rtol=0, atol=1e-12)
    assert finished.history[0]["bytes_up"] == 3 * 8 * 53, "the layer's parameters travel, its buffers do not"
    # Local steps take the statistics of their batches: the averaged ones are for evaluation alone.
    averaged = run(ff.fedavg(), model=normalised(), data=data)
    assert torch.equal(finished.server["model"], averaged.server["model"])
    assert not torch.equal(finished.model[1].running_mean, averaged.model[1].running_mean)


def test_private_entries_take_the_steps_of_the_algorithms_optimizer():
    """With one client that always takes part, private or shared makes no difference."""
    one = ff.Federation.from_tensors([federation().client(0).whole()])
    for state in ("reset", "kept", "averaged"):
        algorithm = ff.Algorithm(optimizer=ff.parts.AdamW(state=state))
        options = {"data": one, "participants": 1, "rounds": 3, "path": "client"}
        together, apart = run(algorithm, **options), run(algorithm, sharing=HEAD, **options)
        personal = apart.client_model(0).state_dict()
        for name, value in together.model.state_dict().items():
            assert torch.allclose(personal[name], value, rtol=0, atol=1e-12), (state, name)


# -- engines, folders, compression -------------------------------------------------------------------------

SITUATIONS: dict[str, dict[str, Any]] = {
    "head": {"sharing": HEAD, "algorithm": generic("scaffold")},
    "normalisation": {"sharing": LOCAL, "model": normalised()},
    "optimizer": {"sharing": HEAD, "algorithm": ff.Algorithm(optimizer=ff.parts.AdamW(state="kept"))},
}


def remembered(finished: ff.Run) -> dict[str, Tensor]:
    rows = {f"client {client}": finished.clients.row(client) for client in finished.clients.clients()}
    return {**finished.server, **rows, **finished.model.state_dict()}


def assert_same(left: ff.Run, right: ff.Run) -> None:
    ours, theirs = remembered(left), remembered(right)
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_run_goes_on_with_what_clients_kept(situation, tmp_path):
    options = {"algorithm": ff.fedavg(), **SITUATIONS[situation]}
    algorithm = options.pop("algorithm")
    straight = run(algorithm, **options)
    run(algorithm, **options, rounds=3, folder=tmp_path)
    resumed = run(algorithm, **options, folder=tmp_path)
    assert_same(straight, resumed)
    kept = {PRIVATE_MODEL, PRIVATE_BUFFERS} & resumed.clients.read(0, resumed.server["model"]).keys()
    assert kept == ({PRIVATE_MODEL, PRIVATE_BUFFERS} if situation == "normalisation" else {PRIVATE_MODEL})
    with pytest.raises(ff.FlatfedError, match="training"):
        run(algorithm, **{**options, "sharing": Sharing()}, rounds=6, folder=tmp_path)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_processes_train_the_same_bits(situation):
    options = {"algorithm": ff.fedavg(), **SITUATIONS[situation]}
    algorithm = options.pop("algorithm")
    assert_same(run(algorithm, **options), run(algorithm, **options, workers=2))


@pytest.mark.parametrize("situation", SITUATIONS)
def test_sites_keep_what_is_private_on_their_disks(situation, tmp_path):
    options = {"algorithm": ff.fedavg(), **SITUATIONS[situation]}
    model = options.pop("model", None)
    algorithm = options.pop("algorithm")
    deployment = Deployment(
        tmp_path, algorithm, (lambda: model) if model else network, with_tests(), **options
    )
    finished = deployment.serve()
    assert_same_bits(finished, local(deployment))
    for _, message in deployment.grid.sent:
        vectors = message.content.get("vectors", {})
        assert all("private" not in key for key in vectors)
        shared = finished.server["model"].nbytes
        assert all(len(array.data) <= shared for array in vectors.values())
    with pytest.raises(ff.FlatfedError, match="at their sites"):
        finished.client_model(0)
    assert [record["client"] for record in finished.per_client] == list(range(len(NAMES)))
    took_part = {client for number in range(DEFAULTS["rounds"]) for client in deployment.members(number)}
    differ = {site["client"] for site in finished.per_client if site["personal_loss"] != site["loss"]}
    assert differ == took_part
    # The sites' own models are those of the local engine.
    alike = run(
        algorithm,
        data=deployment.data,
        model=model,
        **{**options, "path": "client", "evaluate_on_clients": True},
    )
    for site, here in zip(finished.per_client, alike.per_client, strict=True):
        assert site["personal_loss"] == pytest.approx(here["personal_loss"], abs=1e-12)


def test_sites_without_their_files_cannot_go_on(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), sharing=HEAD, minimum_clients=3)
    deployment.serve()
    client = deployment.returning(0)
    for path in deployment.files(client):
        path.unlink()
    deployment.restart(rounds=DEFAULTS["rounds"] + 20)
    with pytest.raises(ff.FlatfedError, match=r"is not in .*; put it back, or start a new run"):
        deployment.serve()


def test_a_server_of_sites_has_nothing_to_recompute_statistics_from(tmp_path):
    sharing = Sharing(normalisation="recompute")
    with pytest.raises(ff.FlatfedError, match="normalisation = 'recompute': a federation's server"):
        Deployment(tmp_path, ff.fedavg(), normalised, sharing=sharing).serve()


def test_server_and_sites_must_have_the_same_frozen_layers(tmp_path):
    """They never travel, so that one side could silently have others."""
    models = [normalised() for _ in range(200)]

    def other() -> nn.Module:
        model = models.pop()
        with torch.no_grad():
            model[1].running_mean.fill_(float(len(models)))
        return model

    with pytest.raises(ff.FlatfedError, match="another model, algorithm or settings"):
        Deployment(tmp_path, ff.fedavg(), other, sharing=Sharing(normalisation="frozen")).serve()


@pytest.mark.parametrize("compress", ["quantize", "topk", "sign", "ef21"])
def test_a_compressor_sees_the_shared_entries_alone(compress):
    part = {
        "quantize": ff.parts.Quantize(bits=4),
        "topk": ff.parts.TopK(ratio=0.2),
        "sign": ff.parts.Sign(),
        "ef21": ff.parts.ErrorFeedback21(ff.parts.TopK(ratio=0.2)),
    }[compress]
    algorithm = ff.Algorithm(compress=part)
    shared = run(algorithm, sharing=HEAD)
    # As if the body were the model: that is what the server has.
    generator = torch.Generator().manual_seed(0)
    payload = part.encode(torch.randn(25, dtype=torch.float64, generator=generator), generator)
    assert shared.history[-1]["bytes_up"] == 3 * len(payload)
    assert shared.server["model"].shape == (25,)


def test_a_worker_of_a_cluster_is_given_and_gives_back_what_is_private():
    """What Ray's workers do: `Worker.train` on states that were sent to them."""
    task, training = ff.Task(network(), federation()), ff.Training(rounds=1, local_steps=2, sharing=HEAD)
    engine = start_engine(task, ff.fedavg(), training, ff.Execution(workers=1))
    try:
        model = engine.plan.layout.vector(task.model)
        states = [engine.clients.read(client, model) for client in (0, 1)]
        worker = Worker(engine.plan, task.model, task.federation)
        _, kept = worker.train([0, 1], Broadcast({"model": model}, {}), states, 0)
        engine.train(Broadcast({"model": model}, {}), 0, [0, 1])
        engine.clients.commit()
        for client, own in zip((0, 1), kept, strict=True):
            assert own.keys() == {PRIVATE_MODEL}
            assert torch.equal(own[PRIVATE_MODEL], engine.clients.row(client))
    finally:
        engine.close()


# -- what clients end up with ------------------------------------------------------------------------------


def test_read_outs_of_every_client(tmp_path):
    data = with_tests()
    options = {"sharing": HEAD, "fine_tuning_steps": 4, "path": "client", "evaluate_on_clients": True}
    finished = run(ff.fedavg(), data=data, folder=tmp_path, **options)
    last = finished.training.rounds - 1
    for client, record in enumerate(finished.per_client):
        inputs, targets = data.client_test(client).whole()
        personal, tuned = finished.client_model(client).eval(), finished.client_model(client)
        own = data.client(client)
        steps = finished.training.replaced(local_steps=4)
        for chosen in batches(steps, len(own), last, client):
            batch, labels = own.batch(chosen)
            gradients = torch.autograd.grad(F.cross_entropy(tuned(batch), labels), list(tuned.parameters()))
            with torch.no_grad():
                for value, gradient in zip(tuned.parameters(), gradients, strict=True):
                    value.sub_(steps.rate(last) * (gradient + steps.weight_decay * value))
        with torch.no_grad():
            for name, model in (("", finished.model), ("personal_", personal), ("fine_tuned_", tuned)):
                loss = float(F.cross_entropy(model(inputs), targets))
                assert record[f"test_{name}loss"] == pytest.approx(loss, abs=1e-12), (client, name)
    assert json.loads((tmp_path / "clients.json").read_text())["clients"] == finished.per_client
    losses = [record["test_personal_loss"] for record in finished.per_client]
    assert losses != [record["test_loss"] for record in finished.per_client]


def test_the_spread_over_clients_is_that_of_every_kind_of_model():
    task = ff.Task(network(), with_tests())
    training = ff.Training(rounds=2, sharing=HEAD, fine_tuning_steps=2)
    finished = ff.train(task, ff.fedavg(), training, ff.Execution(workers=1), evaluate_on_clients=True)
    kinds = [f"{own}{samples}" for own in ("", "personal ", "fine_tuned ") for samples in ("train", "test")]
    assert list(finished.client_spreads) == kinds
    mean = sum(record["test_personal_accuracy"] for record in finished.per_client) / CLIENTS
    assert finished.client_spreads["personal test"].mean == pytest.approx(mean)


def test_fine_tuning_leaves_the_run_as_it_is():
    tuned = run(ff.fedavg(), model=normalised(), fine_tuning_steps=3, evaluate_on_clients=True)
    plain = run(ff.fedavg(), model=normalised(), evaluate_on_clients=True)
    assert_same(tuned, plain)
    for one, other in zip(tuned.per_client, plain.per_client, strict=True):
        assert {name: one[name] for name in other} == other
        assert one["fine_tuned_loss"] < one["loss"]


def test_diagnostics_look_at_the_shared_part():
    """The private one has its first values there, as on the server."""
    task, training = ff.Task(network(), federation()), ff.Training(rounds=2, sharing=HEAD)
    finished = ff.train(task, ff.fedavg(), training, ff.Execution(workers=1))
    with ff.diagnostics.inspect(task, run=finished) as subject:
        assert subject.model.shape == (25,)
        inputs, targets = subject.training_data(None)
        with torch.no_grad():
            loss = F.cross_entropy(finished.model(inputs), targets)
        assert float(subject.seen_loss(subject.model, inputs, targets)) == pytest.approx(float(loss))
        assert subject.gradient(subject.model, (inputs, targets)).shape == (25,)
        steps = []
        subject.local_models([0], lambda client, step, model: steps.append(model.clone()))
        assert len(steps) > 1 and all(model.shape == (25,) for model in steps)


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sharing", "line"),
    [
        (
            {"private": ["haed"]},
            r"sharing.private = 'haed': the model trains nothing of that name; choose from: 0, 2",
        ),
        (
            {"normalisation": "local"},
            "sharing.normalisation = 'local': the model has no normalisation layers",
        ),
        ({"normalisation": "batch"}, "normalisation = 'batch': input should be"),
        ({"private_steps": 1}, "private_steps = 1: nothing is private; name it in private"),
        ({"privat": "2"}, "privat: unknown; did you mean 'private'"),
        ({"private": "2", "private_steps": 3}, "private_steps = 3: a client takes 3 local steps"),
    ],
)
def test_what_cannot_be_shared_so_is_refused_in_one_line(sharing, line):
    with pytest.raises(ff.FlatfedError, match=line) as error:
        run(ff.fedavg(), sharing=sharing)
    assert "\n" not in str(error.value)


def test_statistics_cannot_be_recomputed_from_nothing():
    sharing = Sharing(normalisation="recompute")
    with pytest.raises(
        ff.FlatfedError, match=r"the server has no samples; hold some out with data.validation"
    ):
        run(ff.fedavg(), model=normalised(), sharing=sharing)
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    with pytest.raises(ff.FlatfedError, match="no BatchNorm with running statistics"):
        run(ff.fedavg(), model=model, sharing=sharing)
    with pytest.raises(ff.FlatfedError, match="'frozen': the model has no other trainable parameters"):
        run(
            ff.fedavg(),
            model=nn.Sequential(nn.BatchNorm1d(FEATURES)).double(),
            sharing=Sharing(normalisation="frozen"),
        )
    with pytest.raises(ff.FlatfedError, match="evaluate = 'active_mean'"):
        run(ff.fedavg(), model=normalised(), sharing=sharing, evaluate="active_mean")


def test_a_private_part_that_diverges_is_noticed():
    """Here the last step of a round: the loss of its batch was still finite."""

    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(FEATURES, 3).double(), nn.Parameter(torch.zeros(3).double())

        def forward(self, inputs: Tensor) -> Tensor:
            return self.body(inputs) + 1e300 * (self.head - self.head.detach())

    with pytest.raises(ff.DivergedError, match=r"the private part of client \d is no longer finite"):
        run(
            ff.fedavg(),
            model=Steep(),
            sharing=Sharing(private=("head",)),
            path="client",
            local_steps=1,
            lr=1e20,
        )


def test_settings_in_files_and_on_the_command_line(tmp_path: Path):
    path = tmp_path / "config.toml"
    path.write_text(
        '[model]\nname = "mlp"\nhidden = [4]\n[training]\nrounds = 1\n[training.sharing]\nprivate = ["3"]\n'
    )
    assert Config.read(path).training.sharing == Sharing(private=("3",))
    changed = Config.read(path, ['training.sharing.private=["1.*", "3"]', "training.sharing.private_steps=2"])
    assert changed.training.sharing == Sharing(private=("1.*", "3"), private_steps=2)
    assert Config.checked(json.loads(changed.model_dump_json())) == changed


def test_the_file_of_a_federation_has_the_same_table(tmp_path: Path):
    path = tmp_path / "federation.toml"
    path.write_text(
        '[model]\nname = "mlp"\nhidden = [4]\n[training]\nrounds = 1\n[training.sharing]\nprivate = ["3"]\n'
        "[federation]\nclients = 2\ninput_shape = [5]\nclasses = 3\n"
    )
    spec = FederationSpec.read(path)
    assert spec.site_training.sharing == Sharing(private=("3",))
    other = FederationSpec.read(path)
    path.write_text(path.read_text().replace('["3"]', '["1"]'))
    assert spec.digest(spec.model()) == other.digest(other.model())
    assert spec.digest(spec.model()) != FederationSpec.read(path).digest(spec.model())
