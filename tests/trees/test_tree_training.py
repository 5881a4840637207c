"""A model trains on trees of tensors as it does on the same numbers in one tensor, wherever it trains."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import train
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.tree import cloned, equal, leaves
from flatfed.data.transform import Transform
from trees.tree_problems import CLIENTS, FORMS, MODELS, SIZE, Batch, Named, Tabular, drawn, formed, plain

WORK: dict[str, Any] = {
    "rounds": 3,
    "participants": 4,
    "local_steps": 3,
    "batch_size": 4,
    "lr": 0.2,
    "workers": 1,
}
PATHS = ["client", "matrix"]


def same(one: ff.Run, other: ff.Run) -> None:
    """Bit for bit, but for the model's own names."""
    assert torch.equal(one.server["model"], other.server["model"])
    for mine, others in zip(one.history, other.history, strict=True):
        assert {**mine, "seconds": 0} == {**others, "seconds": 0}
    assert one.per_client == other.per_client


def trained(model: nn.Module, data: Any, algorithm: ff.Algorithm | None = None, **options: Any) -> ff.Run:
    federation = data
    if isinstance(data, list):
        federation = ff.Federation.from_tensors(data, test=data[0], client_tests=data[::-1])
    return train(model, federation, algorithm or ff.fedsam(), evaluate_on_clients=True, **{**WORK, **options})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_bits_of_one_tensor(form, path):
    one = trained(Tabular(), plain(), path=path)
    other = trained(MODELS[form](), formed(form), path=path)
    assert other.path == path
    same(one, other)
    assert one.history[-1]["test_loss"] < one.history[0]["test_loss"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["scaffold", "mimelite", "fedsmoo"])
def test_full_gradients_and_client_state_work_with_trees(name, path):
    algorithm = ff.ALGORITHMS[name]()
    same(
        trained(Tabular(), plain(), algorithm, path=path),
        trained(Named(), formed("dictionary"), algorithm, path=path),
    )


def test_worker_processes_give_the_same_bits():
    data = formed("dataclass")
    runs = [trained(MODELS["dataclass"](), data, path="client", workers=workers) for workers in (1, 2)]
    same(*runs)


@pytest.mark.parametrize("path", PATHS)
def test_data_from_a_function_and_from_a_dataset_are_the_same(path):
    data = formed("dictionary")
    loaded = ff.Federation.from_function(
        CLIENTS, lambda client: data[client], data[0], lambda c: data[-1 - c]
    )
    samples = [
        ({name: values[row] for name, values in inputs.items()}, targets[row])
        for inputs, targets in data
        for row in range(len(targets))
    ]
    size = len(data[0][1])
    listed = ff.Federation.from_dataset(
        samples,
        [range(client * size, (client + 1) * size) for client in range(CLIENTS)],
        test=data[0],
    )
    one = trained(Named(), data, path=path)
    same(one, trained(Named(), loaded, path=path, local_steps=3))
    from_dataset = trained(Named(), listed, path=path)
    assert torch.equal(one.server["model"], from_dataset.server["model"])


def test_unequal_clients_train_in_epochs():
    sizes = [4, 9, 6, 5, 7, 8]
    cut = [
        tuple(
            {"numbers": numbers[:size], "codes": codes[:size]} if part == 0 else labels[:size]
            for part in (0, 1)
        )
        for (numbers, codes, labels), size in zip(drawn(), sizes, strict=True)
    ]
    whole = [(inputs[:size], labels[:size]) for (inputs, labels), size in zip(plain(), sizes, strict=True)]
    options = {"local_steps": None, "local_epochs": 2, "weighting": "samples"}
    same(trained(Tabular(), whole, **options), trained(Named(), cut, **options))


def test_the_order_of_keys_does_not_matter():
    data = formed("dictionary")
    turned = [data[0], *((dict(reversed(inputs.items())), labels) for inputs, labels in data[1:])]
    same(trained(Named(), data), trained(Named(), turned))


class Doubled(Transform):
    """Draws in training, and sees the tree."""

    draws = True

    def train(self, inputs: Any, generator: torch.Generator | None) -> Any:
        noise = torch.randn(inputs["numbers"].shape, generator=generator, dtype=torch.float64)
        return {**inputs, "numbers": 2 * inputs["numbers"] + 0.1 * noise}

    def evaluate(self, inputs: Any) -> Any:
        return {**inputs, "numbers": 2 * inputs["numbers"]}


class DoubledTensor(Transform):
    draws = True

    def train(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        noise = torch.randn((len(inputs), 4), generator=generator, dtype=torch.float64)
        return torch.cat([2 * inputs[:, :4] + 0.1 * noise, inputs[:, 4:]], 1)

    def evaluate(self, inputs: Tensor) -> Tensor:
        return torch.cat([2 * inputs[:, :4], inputs[:, 4:]], 1)


@pytest.mark.parametrize("path", PATHS)
def test_a_transform_sees_the_tree(path):
    federations = []
    for data, transform in ((formed("dictionary"), Doubled()), (plain(), DoubledTensor())):
        federations.append(ff.Federation.from_tensors(data, test=data[0]))
        federations[-1].transform = transform
    same(
        *(
            trained(model, own, path=path)
            for model, own in zip((Named(), Tabular()), federations, strict=True)
        )
    )


# -- targets and outputs -----------------------------------------------------------------------------------


class TwoHeads(Tabular):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 1).double()

    def forward(self, numbers: Tensor, codes: Tensor) -> dict[str, Tensor]:
        return {"labels": self.outputs(numbers, codes.long()), "value": self.other(numbers)[:, 0]}


def two_losses(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs["labels"], targets["label"]) + F.mse_loss(
        outputs["value"], targets["value"]
    )


def two_targets() -> list[tuple[Any, Any]]:
    return [
        ({"numbers": numbers, "codes": codes}, {"label": labels, "value": numbers.sum(1)})
        for numbers, codes, labels in drawn()
    ]


def share(outputs: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    return (outputs["labels"].argmax(1) == targets["label"]).double().mean()


@pytest.mark.parametrize("path", PATHS)
def test_targets_and_outputs_may_be_trees(path):
    """Compared with a plain loop over rounds, clients and steps."""
    data, model = two_targets(), TwoHeads()
    options = {"path": path, "batch_size": None, "participants": CLIENTS, "loss": two_losses}
    run = trained(model, data, ff.fedavg(), metrics={"share": share}, **options)
    expected = copy.deepcopy(model)
    for _ in range(WORK["rounds"]):
        ends = []
        for inputs, targets in data:
            local = copy.deepcopy(expected)
            for _ in range(WORK["local_steps"]):
                gradients = torch.autograd.grad(
                    two_losses(local(**inputs), targets), list(local.parameters())
                )
                with torch.no_grad():
                    for parameter, gradient in zip(local.parameters(), gradients, strict=True):
                        parameter.sub_(WORK["lr"] * gradient)
            ends.append(list(local.parameters()))
        with torch.no_grad():
            for parameter, *values in zip(expected.parameters(), *ends, strict=True):
                parameter.copy_(torch.stack(values).mean(0))
    for mine, other in zip(run.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
    inputs, targets = data[0]
    outputs = expected(**inputs)
    assert run.history[-1]["test_loss"] == pytest.approx(float(two_losses(outputs, targets)), rel=1e-9)
    assert run.history[-1]["test_share"] == pytest.approx(float(share(outputs, targets)))
    assert run.per_client[2]["share"] == pytest.approx(float(share(expected(**data[2][0]), data[2][1])))


def test_torchs_losses_want_one_tensor_of_targets():
    with pytest.raises(
        ff.FlatfedError, match="cross_entropy takes one tensor of targets, and they are a dict of"
    ):
        trained(TwoHeads(), two_targets())


# -- nobody's data change ----------------------------------------------------------------------------------


class EditsNumbers(Named):
    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        return super().forward(numbers.sub_(0.5), codes)


class LeavesNumbers(Named):
    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        return super().forward(numbers - 0.5, codes)


class EditsBatch(Tabular):
    """Puts another tensor into the batch that it is given."""

    def forward(self, batch: Batch) -> Tensor:
        batch.numbers = batch.numbers - 0.5
        return self.outputs(batch.numbers, batch.codes.long())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("form", "model"), [("dictionary", EditsNumbers), ("tuple", EditsNumbers), ("dataclass", EditsBatch)]
)
def test_a_model_that_edits_its_inputs_edits_a_copy(form, model, path):
    data = formed(form)
    before = cloned(data)
    loaded = ff.Federation.from_function(CLIENTS, lambda client: data[client], data[0], lambda _: data[1])
    expected = trained(LeavesNumbers(), formed("dictionary"), path=path)
    for federation in (ff.Federation.from_tensors(data, data[0], [data[1]] * CLIENTS), loaded):
        run = trained(model(), federation, path=path)
        assert torch.equal(run.server["model"], expected.server["model"])
        assert [line["test_loss"] for line in run.history] == [line["test_loss"] for line in expected.history]
    assert equal(data, before)


def test_an_edit_that_comes_later_is_refused():
    calls = []

    class Later(Tabular):
        def forward(self, batch: Batch) -> Tensor:
            calls.append(0)
            if len(calls) > 10:
                batch.numbers = batch.numbers - 0.5
            return self.outputs(batch.numbers, batch.codes.long())

    with pytest.raises(ff.FlatfedError, match="edited its inputs"):
        trained(Later(), formed("dataclass"), path="client")


def test_a_loss_that_edits_a_target_is_refused():
    def edits(outputs: Any, targets: Any) -> Tensor:
        targets["value"].zero_()
        return two_losses(outputs, targets)

    with pytest.raises(ff.FlatfedError, match="edits the targets in place"):
        trained(TwoHeads(), two_targets(), loss=edits, metrics={})


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedrobust", "fedsynsam", "dynafed"])
def test_parts_that_change_or_make_up_inputs_want_one_tensor(name):
    with pytest.raises(ff.FlatfedError) as refusal:
        trained(Named(), formed("dictionary"), ff.ALGORITHMS[name]())
    assert (
        "changes or makes up inputs, which must be one tensor of floats, not inputs {numbers: [4] float64, "
        in str(refusal.value)
    )
    assert "codes: [2] int32}, targets [] int64" in str(refusal.value)


def test_what_a_model_does_not_take_is_said_with_what_it_was_given():
    with pytest.raises(ff.FlatfedError) as refusal:
        trained(Tabular(), formed("dictionary"))
    assert "(inputs {numbers: [4, 4] float64, codes: [4, 2] int32}, targets [4] int64)" in str(refusal.value)
    assert "unexpected keyword argument 'numbers'" in str(refusal.value)


def test_labels_out_of_range_are_found_behind_tree_inputs():
    data = formed("dictionary")
    data[3][1][2] = 9
    with pytest.raises(
        ff.FlatfedError, match="the client data have the label 9, but the model has 3 outputs"
    ):
        trained(Named(), data)


class Embedded(nn.Module):
    """Looks codes up, whose range must be seen before a matrix of tables is trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))

    def forward(self, numbers: Tensor, codes: Tensor) -> Tensor:
        return F.embedding(codes.long(), self.table).sum(1)


@pytest.mark.parametrize("path", PATHS)
def test_codes_beyond_an_embedding_are_refused(path):
    with pytest.raises(ff.FlatfedError, match="index out of range"):
        trained(Embedded(), formed("dictionary"), path=path)


def test_transformed_inputs_that_are_not_finite_are_named():
    class Divided(Transform):
        def evaluate(self, inputs: Any) -> Any:
            return {**inputs, "numbers": inputs["numbers"] / 0}

    federation = ff.Federation.from_tensors(formed("dictionary"))
    federation.transform = Divided()
    with pytest.raises(ff.FlatfedError, match=r"the inputs\['numbers'\] of client 0 contain NaN or infinity"):
        trained(Named(), federation)


# -- the same run ------------------------------------------------------------------------------------------


def test_a_folder_is_continued_with_the_same_tree_only(tmp_path):
    def go_on(data: Any, rounds: int) -> ff.Run:
        return trained(Named(), data, folder=tmp_path / "run", rounds=rounds)

    go_on(formed("dictionary"), 1)
    resumed = go_on(formed("dictionary"), 3)
    assert torch.equal(resumed.server["model"], trained(Named(), formed("dictionary")).server["model"])
    other = formed("dictionary")
    other[2][0]["codes"][0, 0] = (other[2][0]["codes"][0, 0] + 1) % 7
    for changed in (other, formed("tuple")):
        with pytest.raises(ff.FlatfedError, match="data"):
            go_on(changed, 4)


def test_diagnostics_look_at_trees():
    data = formed("dictionary")
    run = trained(Named(), data)
    others = trained(Tabular(), plain())
    gradients = []
    for model, own, finished in ((Named(), data, run), (Tabular(), plain(), others)):
        task = ff.Task(model, ff.Federation.from_tensors(own, test=own[0]))
        with ff.diagnostics.inspect(task, run=finished) as subject:
            gradients += [
                subject.gradient(subject.model, subject.training_data(20)),
                subject.gradient(subject.model, subject.test_data(5)),
            ]
    assert torch.equal(gradients[0], gradients[2]) and torch.equal(gradients[1], gradients[3])


@pytest.mark.parametrize("form", FORMS)
def test_diagnostics_count_samples_and_not_the_parts_of_a_tree(form):
    data = formed(form)
    task = ff.Task(MODELS[form](), ff.Federation.from_tensors(data, test=data[0]))
    run = trained(MODELS[form](), data)
    with ff.diagnostics.inspect(task, run=run) as subject:
        result = ff.diagnostics.clients(subject)
    assert result["samples"] == [SIZE] * CLIENTS


def test_leaves_of_nothing_are_none():
    assert leaves(None) == [] and leaves({"a": None, "b": ()}) == []
