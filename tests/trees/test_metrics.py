"""Metrics that are means over samples, tokens or pixels, and those that are not."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import train
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.outputs import ignored_label
from flatfed.deployment.engine import weighted_means
from trees.tree_problems import Named, drawn, formed

WORK: dict[str, Any] = {
    "rounds": 2,
    "participants": 3,
    "local_steps": 2,
    "batch_size": 4,
    "lr": 0.2,
    "workers": 1,
}
LARGE = 1100
"""More test samples than are evaluated at once, in batches of unequal sizes."""


def large_test() -> tuple[Any, Tensor]:
    ((numbers, codes, labels),) = drawn(1, LARGE)
    return {"numbers": numbers, "codes": codes}, labels


def f1(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of class 0: not a mean of anything over samples."""
    chosen, right = outputs.argmax(1) == 0, targets == 0
    return 2 * (chosen & right).sum() / (chosen.sum() + right.sum())


class StreamingF1:
    """As torchmetrics has it: a callable object whose value lies in its state."""

    def __init__(self) -> None:
        self.reset()

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        raise AssertionError("it is a stream, and no function")

    def reset(self) -> None:
        self.both, self.total = 0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        chosen, right = outputs.argmax(1) == 0, targets == 0
        self.both += int((chosen & right).sum())
        self.total += int(chosen.sum() + right.sum())

    def compute(self) -> Tensor:
        return torch.tensor(2 * self.both / self.total)


@pytest.mark.parametrize("workers", [1, 2])
def test_whole_and_streaming_metrics_see_all_samples(workers):
    test, stream = large_test(), StreamingF1()
    federation = ff.Federation.from_tensors(formed("dictionary"), test=test)
    metrics = {"whole": ff.whole(f1), "share": ff.accuracy, "stream": stream, "batches": f1}
    run = train(
        Named(),
        federation,
        ff.fedavg(),
        metrics=metrics,
        evaluate_on_clients=True,
        **{**WORK, "workers": workers},
    )
    outputs = run.model(**test[0])
    line = run.history[-1]
    assert list(line)[-5:] == ["test_loss", "test_whole", "test_share", "test_stream", "test_batches"]
    assert line["test_whole"] == pytest.approx(float(f1(outputs, test[1])))
    assert line["test_stream"] == pytest.approx(float(f1(outputs, test[1])))
    assert line["test_share"] == pytest.approx(float(ff.accuracy(outputs, test[1])))
    assert line["test_batches"] != line["test_whole"], "a mean over batches is another number"
    inputs, labels = formed("dictionary")[4]
    assert run.per_client[4]["whole"] == pytest.approx(float(f1(run.model(**inputs), labels)))
    assert (stream.both, stream.total) == (0, 0), "the task's own metric stays as it is"


class Many(Named):
    """Returns more than one row a sample has."""

    def forward(self, numbers: Tensor, codes: Tensor) -> Any:
        outputs = super().forward(numbers, codes)
        return {"logits": outputs, "mean": outputs.mean(), "hidden": (numbers, None), "note": "text"}


def test_outputs_of_any_kind_are_put_together_for_a_whole_metric():
    seen = []

    def look(outputs: Any, targets: Any) -> float:
        seen.append((outputs, targets))
        return 1.0

    test = large_test()
    federation = ff.Federation.from_tensors(formed("dictionary"), test=test)
    run = train(Many(), federation, ff.fedavg(), metrics={"look": ff.whole(look)}, **WORK)
    outputs, targets = seen[-1]
    torch.testing.assert_close(outputs["logits"], run.model(**test[0])["logits"])
    assert torch.equal(outputs["hidden"][0], test[0]["numbers"]) and torch.equal(targets, test[1])
    assert outputs["mean"] is None and outputs["note"] is None and outputs["hidden"][1] is None


def test_a_whole_metric_and_a_stream_belong_to_the_identity(tmp_path):
    def go_on(metric: Any, rounds: int) -> ff.Run:
        federation = ff.Federation.from_tensors(formed("dictionary"), test=large_test())
        return train(
            Named(),
            federation,
            ff.fedavg(),
            metrics={"f": metric},
            folder=tmp_path,
            **{**WORK, "rounds": rounds},
        )

    go_on(ff.whole(f1), 1)
    go_on(ff.whole(f1), 2)
    for other in (f1, ff.whole(ff.accuracy), StreamingF1()):
        with pytest.raises(ff.FlatfedError, match="metrics"):
            go_on(other, 3)


def test_what_such_metrics_raise_is_one_line_with_their_name():
    def fails(outputs: Any, targets: Any) -> float:
        raise ValueError("one class only")

    class Fails(StreamingF1):
        def update(self, outputs: Tensor, targets: Tensor) -> None:
            raise ValueError("one class only")

    federation = ff.Federation.from_tensors(formed("dictionary"), test=formed("dictionary")[0])
    for metric, said in (
        (ff.whole(fails), "f: it cannot be evaluated on all samples (one class only)"),
        (Fails(), "f: it cannot be evaluated on 9 samples (one class only)"),
        (ff.whole(lambda outputs, targets: outputs), "f: it must return one number"),
    ):
        with pytest.raises(ff.FlatfedError) as refusal:
            train(Named(), federation, ff.fedavg(), metrics={"f": metric}, **WORK)
        assert said in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("method", ["__deepcopy__", "reset", "update", "compute"])
def test_any_method_of_a_metric_may_fail(method):
    def fail(*arguments: Any) -> Any:
        raise KeyError("lost")

    stream = type("Failing", (StreamingF1,), {"__init__": lambda self: None, method: fail})()
    federation = ff.Federation.from_tensors(formed("dictionary"), test=formed("dictionary")[0])
    with pytest.raises(ff.FlatfedError, match=r"^f: it cannot be .* \('lost'\)$") as refusal:
        train(Named(), federation, ff.fedavg(), metrics={"f": stream}, **WORK)
    assert isinstance(refusal.value.__cause__, KeyError)


def test_a_complex_number_is_not_recorded_as_its_real_part():
    class Complex(StreamingF1):
        def compute(self) -> Any:
            return torch.tensor(1 + 2j)

    federation = ff.Federation.from_tensors(formed("dictionary"), test=formed("dictionary")[0])
    for metric in (lambda outputs, targets: 1 + 2j, ff.whole(lambda outputs, targets: 1 + 2j), Complex()):
        with pytest.raises(ff.FlatfedError, match=r"^f: it must return a real number, not "):
            train(Named(), federation, ff.fedavg(), metrics={"f": metric}, **WORK)


def test_what_is_no_metric_is_refused():
    with pytest.raises(ff.FlatfedError, match="give a function of"):
        ff.whole(3)  # type: ignore[arg-type]
    federation = ff.Federation.from_tensors(formed("dictionary"))
    half = SimpleNamespace(update=print, compute=print)
    with pytest.raises(ff.FlatfedError, match="or an object with update, compute and reset"):
        ff.Task(Named(), federation, metrics={"half": half})


# -- sequences and dense maps ------------------------------------------------------------------------------

WORDS, LENGTH = 5, 7


class Tagger(nn.Module):
    """A class for every word: outputs [B, classes, T]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(WORDS, 3, dtype=torch.float64))

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        chosen = (words[..., None] == torch.arange(WORDS)).double() @ self.table
        return (chosen * mask[..., None]).transpose(-1, -2)


def sentences(clients: int, size: int, ignored: int) -> list[tuple[Any, Tensor]]:
    """Words and a mask, and a tag for every word that is not padding."""
    generator = torch.Generator().manual_seed(3)
    pairs = []
    for _ in range(clients):
        words = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
        lengths = torch.randint(1, LENGTH + 1, (size, 1), generator=generator)
        mask = torch.arange(LENGTH) < lengths
        pairs.append(((words, mask), torch.where(mask, words % 3, ignored)))
    return pairs


@pytest.mark.parametrize("path", ["client", "matrix"])
@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(ignore_index=255),
        functools.partial(F.cross_entropy, ignore_index=255),
    ],
    ids=["function", "module", "module with 255", "partial with 255"],
)
def test_every_token_counts_once_and_padding_not_at_all(loss, path):
    ignored = ignored_label(loss)
    assert ignored in (-100, 255)
    (test,) = sentences(1, LARGE, ignored)
    federation = ff.Federation.from_tensors(sentences(4, 8, ignored), test=test)
    run = train(Tagger(), federation, ff.fedsam(), loss=loss, path=path, **WORK)
    outputs, targets = run.model(*test[0]), test[1]
    right = total = 0
    losses = 0.0
    logarithms = outputs.log_softmax(1)
    for sentence in range(LARGE):
        for place in range(LENGTH):
            if (tag := int(targets[sentence, place])) != ignored:
                total += 1
                right += int(outputs[sentence, :, place].argmax()) == tag
                losses -= float(logarithms[sentence, tag, place].detach())
    assert total < LARGE * LENGTH
    assert run.history[-1]["test_accuracy"] == pytest.approx(right / total, rel=1e-12)
    assert run.history[-1]["test_loss"] == pytest.approx(losses / total, rel=1e-9)


def test_perplexity_is_a_function_of_all_tokens():
    def perplexity(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets).exp()

    (test,) = sentences(1, LARGE, -100)
    federation = ff.Federation.from_tensors(sentences(4, 8, -100), test=test)
    run = train(Tagger(), federation, ff.fedavg(), metrics={"perplexity": ff.whole(perplexity)}, **WORK)
    assert run.history[-1]["test_perplexity"] == pytest.approx(
        math.exp(run.history[-1]["test_loss"]), rel=1e-9
    )


def test_a_tag_out_of_range_is_refused_but_not_the_one_that_is_left_out():
    data = sentences(4, 8, 255)
    with pytest.raises(ff.FlatfedError, match="have the label 255, but the model has 3 outputs"):
        train(Tagger(), ff.Federation.from_tensors(data), ff.fedavg(), **WORK)
    data[1][1][0, 0] = 3
    with pytest.raises(ff.FlatfedError, match="have the label 3, but the model has 3 outputs"):
        loss = nn.CrossEntropyLoss(ignore_index=255)
        train(Tagger(), ff.Federation.from_tensors(data), ff.fedavg(), loss=loss, **WORK)


def test_accuracy_of_pixels():
    outputs = torch.tensor([[[[0.9, 0.1]], [[0.1, 0.9]]]])  # [1, 2, 1, 2]: classes 0 and 1
    assert float(ff.accuracy(outputs, torch.tensor([[[0, 0]]]))) == 0.5
    assert float(ff.accuracy(outputs, torch.tensor([[[0, -100]]]))) == 1.0
    assert float(ff.accuracy({"logits": outputs}, torch.tensor([[[0, 7]]]), ignore_index=7)) == 1.0
    assert math.isnan(float(ff.accuracy(outputs, torch.tensor([[[-100, -100]]]))))


def test_a_batch_without_targets_that_count_weighs_nothing():
    inputs, targets = sentences(1, LARGE, -100)[0]
    targets[:512] = -100
    federation = ff.Federation.from_tensors(sentences(4, 8, -100), test=(inputs, targets))
    run = train(Tagger(), federation, ff.fedavg(), **WORK)
    outputs = run.model(*inputs)
    assert run.history[-1]["test_loss"] == pytest.approx(float(F.cross_entropy(outputs, targets).detach()))
    assert run.history[-1]["test_accuracy"] == pytest.approx(float(ff.accuracy(outputs, targets)))


def test_sites_report_a_mean_of_their_own_values():
    assert weighted_means([{"samples": 1, "f": 0.0}, {"samples": 3, "f": 1.0}]) == {"clients_f": 0.75}


def test_outputs_of_transformers_are_put_together():
    outputs = pytest.importorskip("transformers").modeling_outputs.SequenceClassifierOutput
    metric = ff.whole(ff.accuracy)
    logits, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    for rows in (slice(0, 3), slice(3, 5)):
        metric.update(outputs(loss=torch.tensor(1.0), logits=logits[rows]), labels[rows])
    assert float(metric.compute()) == float(ff.accuracy(logits, labels))
