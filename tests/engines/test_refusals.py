"""What users get wrong, or bring in an unusual shape: taken where it can be, else refused in one line."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import train
from torch import nn

import flatfed as ff
from flatfed.core.flat import unit
from flatfed.core.sampling import cohort

WORK = {"rounds": 2, "local_steps": 2, "batch_size": 4, "workers": 1}


def data(count: int = 6, size: int = 10, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 8, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def federation(**options) -> ff.Federation:
    clients = data(**options)
    return ff.Federation.from_tensors(clients, test=clients[0])


def net(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, outputs))


def refusal(call) -> str:
    with pytest.raises(ff.FlatfedError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_arrays_and_lists_are_as_good_as_tensors():
    clients = data()
    expected = train(net(), ff.Federation.from_tensors(clients), ff.fedavg(), **WORK)
    for made in (
        [(inputs.numpy(), targets.numpy()) for inputs, targets in clients],
        [(inputs.tolist(), targets.tolist()) for inputs, targets in clients],
    ):
        run = train(net(), ff.Federation.from_tensors(made), ff.fedavg(), **WORK)
        assert torch.equal(run.server["model"], expected.server["model"])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((net(), federation(), "fedavg"), "algorithm = 'fedavg': call its constructor"),
        ((net(), federation(), ff.fedavg), "call its constructor"),
        ((net(), data(), ff.fedavg()), "federation = "),
        ((nn.Linear, federation(), ff.fedavg()), "model = "),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments, complaint):
    assert complaint in refusal(lambda: train(*arguments, **WORK))


def test_regression_needs_a_loss_of_its_own():
    clients = [(inputs, inputs.sum(1, keepdim=True)) for inputs, _ in data()]
    made = ff.Federation.from_tensors(clients)
    assert "mse_loss" in refusal(lambda: train(net(1), made, ff.fedavg(), **WORK))
    run = train(net(1), made, ff.fedavg(), loss=F.mse_loss, **WORK)
    assert run.history[-1]["train_loss"] > 0


def test_soft_labels_are_counted_by_their_largest():
    clients = [(inputs, F.one_hot(targets, 3).float()) for inputs, targets in data()]
    soft = train(net(), ff.Federation.from_tensors(clients, test=clients[0]), ff.fedavg(), **WORK)
    hard = train(net(), federation(), ff.fedavg(), **WORK)
    assert soft.history[-1]["test_accuracy"] == hard.history[-1]["test_accuracy"]


def test_losses_must_be_one_number():
    for loss, complaint in [
        (lambda outputs, targets: 1.0, "must return a tensor, not float"),
        (lambda outputs, targets: F.cross_entropy(outputs, targets)[None], "not a tensor shaped [1]"),
        (lambda outputs, targets: outputs["logits"], "cannot be trained on a batch of client 0"),
    ]:
        assert complaint in refusal(lambda: train(net(), federation(), ff.fedavg(), loss=loss, **WORK))  # noqa: B023


def test_metrics_may_return_plain_numbers():
    def share(outputs, targets):
        return float((outputs.argmax(1) == targets).float().mean())

    run = train(net(), federation(), ff.fedavg(), metrics={"share": share}, **WORK)
    assert 0 <= run.history[-1]["test_share"] <= 1


def test_callbacks_add_numbers_but_replace_none():
    run = train(
        net(), federation(), ff.fedavg(), callbacks=[lambda now: {"n": np.float32(now.round)}], **WORK
    )
    assert [record["n"] for record in run.history] == [1.0, 2.0]
    message = refusal(
        lambda: train(net(), federation(), ff.fedavg(), callbacks=[lambda now: {"round": 7}], **WORK)
    )
    assert "'round'" in message


def test_a_folder_is_never_continued_with_something_else(tmp_path):
    train(net(), federation(), ff.fedavg(), folder=tmp_path, **WORK)
    other_weights = net()
    with torch.no_grad():
        other_weights[0].bias.add_(1)
    other_activation = net()
    other_activation[1] = nn.ReLU()
    changed = {
        "data": (net(), federation(seed=1), {}),
        "first weights": (other_weights, federation(), {}),
        "model": (other_activation, federation(), {}),
        "loss": (net(), federation(), {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}),
    }
    for component, (model, made, more) in changed.items():
        message = refusal(lambda: train(model, made, ff.fedavg(), folder=tmp_path, **more, **WORK))  # noqa: B023
        assert f"it holds another run (not the same: {component})" in message
    again = train(net(), federation(), ff.fedavg(), folder=tmp_path, **WORK)
    assert len(again.history) == 2


def test_an_edited_config_is_noticed(tmp_path):
    train(net(), federation(), ff.fedavg(), folder=tmp_path, **WORK)
    config = json.loads((tmp_path / "config.json").read_text())
    config["training"]["lr"] = 0.05
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(lambda: train(net(), federation(), ff.fedavg(), folder=tmp_path, lr=0.05, **WORK))
    assert f"{tmp_path / 'config.json'}: damaged or edited" in message


def test_an_edited_identity_is_noticed(tmp_path):
    train(net(), federation(), ff.fedavg(), folder=tmp_path, **WORK)
    other = tmp_path / "other"
    train(net(), federation(seed=1), ff.fedavg(), folder=other, **WORK)
    (tmp_path / "identity.json").write_bytes((other / "identity.json").read_bytes())
    message = refusal(lambda: train(net(), federation(seed=1), ff.fedavg(), folder=tmp_path, **WORK))
    assert f"{tmp_path / 'identity.json'}: damaged or edited" in message
    (tmp_path / "identity.json").write_text("[]")
    message = refusal(lambda: train(net(), federation(), ff.fedavg(), folder=tmp_path, **WORK))
    assert str(tmp_path / "identity.json") in message
    assert "damaged" in message
    (tmp_path / "identity.json").unlink()
    for seed in (0, 1):
        message = refusal(lambda: train(net(), federation(seed=seed), ff.fedavg(), folder=tmp_path, **WORK))  # noqa: B023
        assert f"{tmp_path / 'identity.json'}: cannot be read" in message


def test_lost_history_is_noticed(tmp_path):
    train(net(), federation(), ff.fedavg(), folder=tmp_path, **WORK)
    history = tmp_path / "history.jsonl"
    history.write_text(history.read_text().splitlines(keepends=True)[0])
    message = refusal(
        lambda: train(net(), federation(), ff.fedavg(), folder=tmp_path, **(WORK | {"rounds": 3}))
    )
    assert f"{tmp_path / 'history.jsonl'}: damaged or edited" in message


def test_what_is_recorded_of_an_algorithm_is_all_of_it():
    changed = replace(ff.fedavg(), server=ff.parts.Momentum(0.9))
    labelled = ff.Algorithm(name="mine", gradient=ff.parts.SharpnessAware(0.1))
    for algorithm in (changed, labelled):
        again = ff.build(algorithm.describe())
        assert again.parts == algorithm.parts


def test_corrections_may_be_a_list():
    assert (
        ff.Algorithm(correct=[ff.parts.Proximal(0.1)]).parts
        == ff.Algorithm(correct=ff.parts.Proximal(0.1)).parts
    )


@pytest.mark.parametrize("path", ["auto", "client", "matrix"])
def test_an_index_beyond_the_embedding_never_reads_another_clients(path):
    clients = [(torch.randint(0, 50, (8, 5)), torch.randint(0, 3, (8,))) for _ in range(5)]
    clients[1][0][:] = 60
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(20, 3))
    message = refusal(
        lambda: train(model, ff.Federation.from_tensors(clients), ff.fedavg(), path=path, **WORK)
    )
    assert "index out of range" in message


def test_sparse_gradients_are_as_good_as_dense_ones():
    clients = [(torch.randint(0, 50, (8, 5)), torch.randint(0, 3, (8,))) for _ in range(3)]
    results = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 4, sparse=sparse), nn.Flatten(), nn.Linear(20, 3))
        results.append(train(model, ff.Federation.from_tensors(clients), ff.fedsam(), **WORK).server["model"])
    assert torch.equal(*results)


def test_batch_normalisation_of_one_sample_is_refused_with_the_client():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    work = {"rounds": 1, "local_epochs": 1, "batch_size": 3}
    message = refusal(lambda: train(model, federation(), ff.fedavg(), **work))
    assert "client 0" in message


def test_no_direction_has_no_length_in_any_precision():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(unit(torch.zeros(2, 3, dtype=dtype)), torch.zeros(2, 3, dtype=dtype))


def test_hardly_anybody_coming_takes_no_longer():
    settings = ff.Training(rounds=1, participation=1e-12, sampling="bernoulli")
    cohorts = [cohort(settings, 1000, round_number) for round_number in range(400)]
    assert all(len(members) == 1 for members in cohorts)
    # Whoever comes alone is anybody: the mean of 400 draws from 0 … 999 has a standard error of 14.4.
    assert abs(np.mean(cohorts) - 499.5) < 5 * 14.4


def test_a_test_set_of_another_shape_is_refused_at_once():
    message = refusal(lambda: ff.Federation.from_tensors(data(), test=(torch.ones(3, 7), torch.ones(3))))
    assert "test: its inputs are shaped [7]" in message


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        (torch.zeros(3), "returns tensor([0., 0., 0.]); return nothing, or a dictionary"),
        ({"n": "many"}, "returns {'n': 'many'}; return nothing, or a dictionary of names and numbers"),
        ({"n": torch.ones(2)}, "return nothing, or a dictionary of names and numbers"),
        ({7: 1.0}, "returns {7: 1.0}; return nothing"),
        ({"a\nb": 1.0}, "return nothing, or a dictionary of names and numbers"),
        (True, "returns True; return nothing"),
    ],
)
def test_what_callbacks_return_is_numbers_by_name_or_nothing(returned, complaint):
    said = refusal(lambda: train(net(), federation(), ff.fedavg(), callbacks=[lambda now: returned], **WORK))
    assert said.startswith("callbacks: ") and complaint in said


@pytest.mark.parametrize("which", ["server", "before"])
@pytest.mark.parametrize("change", ["edit", "replace"])
def test_callbacks_only_look_at_vectors(which, change, tmp_path):
    def meddle(now):
        vectors = getattr(now, which)
        if change == "edit":
            vectors["model"].zero_()
        else:
            vectors["model"] = torch.zeros_like(vectors["model"])

    said = refusal(lambda: train(net(), federation(), ff.fedavg(), callbacks=[meddle], **WORK))
    assert "meddle changes the server's vectors or buffers; let it change clones" in said


def test_callbacks_only_look_at_the_history():
    def rewrite(now):
        now.record["train_loss"] = 0.0

    said = refusal(lambda: train(net(), federation(), ff.fedavg(), callbacks=[rewrite], **WORK))
    assert "rewrite changes the round's record; let it return what it adds" in said
    lines = []
    train(
        net(), federation(), ff.fedavg(), callbacks=[lambda now: lines.append(json.dumps(now.record))], **WORK
    )
    assert len(lines) == WORK["rounds"] and "train_loss" in json.loads(lines[0])


@pytest.mark.parametrize("callbacks", [[5], [None], "ab"])
def test_callbacks_are_functions(callbacks):
    task = ff.Task(net(), federation())
    said = refusal(lambda: ff.train(task, ff.fedavg(), ff.Training(rounds=1), callbacks=callbacks))
    assert said.startswith("callbacks[0] = ") and "give a function" in said


@pytest.mark.parametrize("folder", [5, b"run"])
def test_a_folder_is_a_path(folder):
    task = ff.Task(net(), federation())
    said = refusal(lambda: ff.train(task, ff.fedavg(), ff.Training(rounds=1), folder=folder))
    assert said == f"folder = {folder!r}: give a path"
    assert refusal(lambda: ff.load_run(folder, task)) == f"folder = {folder!r}: give a path"


def test_functions_that_leave_the_program_are_errors_like_any_other():
    def leave(*_):
        raise SystemExit(0)

    def leave_later(outputs, targets):
        leave_later.calls += 1
        return leave() if leave_later.calls > 12 else F.cross_entropy(outputs, targets)

    leave_later.calls = 0
    training = ff.Training(rounds=9, local_steps=2, batch_size=4, path="client")
    for options in ({"loss": leave}, {"loss": leave_later}, {"metrics": {"m": leave}}):
        task = ff.Task(net(), federation(), **options)
        said = refusal(lambda task=task: ff.train(task, ff.fedavg(), training))
        assert "be trained on" in said or said == "m: it cannot be evaluated on 10 samples (0)"


def test_complex_targets_are_refused_by_the_loss_and_too_many_fine_tuning_steps_at_once():
    clients = [(inputs, targets + 1j) for inputs, targets in data()]
    said = refusal(lambda: train(net(), ff.Federation.from_tensors(clients), ff.fedavg(), **WORK))
    assert "it cannot be trained on a batch of client 0" in said
    said = refusal(lambda: train(net(), federation(), ff.fedavg(), **WORK, fine_tuning_steps=10**9))
    assert said.startswith("fine_tuning_steps = 1000000000: every client takes them at the end; use at most")


def test_memory_that_runs_out_while_data_are_loaded_is_said():
    def load(client):
        raise MemoryError

    said = refusal(lambda: train(net(), ff.Federation.from_function(3, load), ff.fedavg(), **WORK))
    assert said.startswith("clients[0]: memory ran out while its data were loaded")


@pytest.mark.parametrize("client", [-1, 6, "x", None, 1.5, True])
def test_a_client_that_there_is_not_has_neither_data_nor_a_model(client, tmp_path):
    own = federation()
    task, training = ff.Task(net(), own, name="net", version="1"), ff.Training(rounds=1, local_steps=1)
    run = ff.train(task, ff.fedavg(), training, folder=tmp_path / "run")
    stored = ff.load_run(tmp_path / "run", task)
    for ask in (run.client_model, stored.client_model, own.client, own.client_test):
        assert refusal(lambda ask=ask: ask(client)) == f"client = {client!r}: give a number, 0 … 5"
    assert len(own.client(np.int64(5))) == 10 and stored.client_model(np.int64(5)) is not None


def test_populations_beyond_measure():
    def everybody(clients, **options):
        own = ff.Federation.from_function(clients, lambda number: data()[0])
        training = ff.Training(rounds=1, local_steps=1, batch_size=4, **options)
        return ff.train(ff.Task(net(), own), ff.fedavg(), training, evaluate_on_clients=True)

    assert refusal(lambda: everybody(10**30)).startswith("clients = 1000000000000000000000000000000: must be")
    assert refusal(lambda: everybody(10**12)).startswith("participants = 1000000000000: a round has at most")
    with pytest.warns(ff.FlatfedWarning, match="the final model is not evaluated on 1000000000000 clients"):
        run = everybody(10**12, participants=2)
    assert run.per_client == [] and len(run.history) == 1


def test_a_model_is_not_written_over_a_pipe(tmp_path):
    run = train(net(), federation(), ff.fedavg(), **WORK)
    os.mkfifo(tmp_path / "pipe")
    said = refusal(lambda: run.save(tmp_path / "pipe"))
    assert said == f"{tmp_path / 'pipe'}: no regular file, and it would be replaced; choose another name"
    assert (tmp_path / "pipe").is_fifo()
    for path in ("", "a\0b"):
        assert refusal(lambda path=path: run.save(path)) == f"path = {path!r}: no path; choose another name"


def test_vectors_and_models_are_torchs():
    assert refusal(lambda: ff.vector_to_model([1.0], net())) == "vector = [1.0]: give a torch Tensor"
    assert refusal(lambda: ff.vector_to_model(torch.zeros(3), 5)) == "module = 5: give a torch Module"
