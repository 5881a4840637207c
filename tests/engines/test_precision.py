"""Less precision in the model and its loss: what autocast does in a loop written by hand."""

import os
import signal
import warnings

import pytest
import torch
import torch.nn.functional as F
from problems import generic, train
from torch import nn

import flatfed as ff
from flatfed.core.errors import FlatfedError, FlatfedWarning
from flatfed.core.flat import Layout
from flatfed.core.sampling import batches, cohort
from flatfed.diagnostics import inspect
from flatfed.engines import precision
from flatfed.engines.dense import dense_gradients, dense_layers
from flatfed.engines.oracles import MatrixGradients

SETTINGS = {"rounds": 3, "participants": 3, "local_steps": 4, "batch_size": 8, "lr": 0.2, "workers": 1}


class Squashed(nn.Module):
    """A stack that is not known to be one, so that it is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = dense()

    def forward(self, inputs):
        return self.layers(inputs)


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 4))


def federation(*shape: int, clients: int = 6) -> ff.Federation:
    generator = torch.Generator().manual_seed(1)
    samples = [
        (torch.randn(24, *shape, generator=generator), torch.randint(4, (24,), generator=generator))
        for _ in range(clients)
    ]
    return ff.Federation.from_tensors(samples, test=samples[0])


def naive(model: nn.Module, data: ff.Federation) -> nn.Module:
    """FedAvg as one would write it with torch.autocast."""
    training = ff.Training(**{key: value for key, value in SETTINGS.items() if key != "workers"})
    parameters = list(model.parameters())
    for number in range(training.rounds):
        received = [parameter.detach().clone() for parameter in parameters]
        members, total = cohort(training, len(data), number), [torch.zeros_like(p) for p in parameters]
        for client in members:
            with torch.no_grad():
                for parameter, value in zip(parameters, received, strict=True):
                    parameter.copy_(value)
            own = data.client(client)
            for positions in batches(training, len(own), number, client):
                inputs, targets = own.batch(positions)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(inputs), targets)
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.sub_(gradient, alpha=training.lr)
            for whole, parameter in zip(total, parameters, strict=True):
                whole.add_(parameter.detach())
        with torch.no_grad():
            for parameter, whole in zip(parameters, total, strict=True):
                parameter.copy_(whole / len(members))
    return model


def moved(model: nn.Module, start: nn.Module) -> torch.Tensor:
    return ff.model_to_vector(model) - ff.model_to_vector(start)


@pytest.mark.parametrize(
    ("make", "shape", "path"),
    [
        (dense, (12,), "matrix"),
        (dense, (12,), "client"),
        (Squashed, (12,), "matrix"),
        (convolutional, (3, 8, 8), "matrix"),
        (convolutional, (3, 8, 8), "client"),
    ],
)
def test_a_training_is_that_of_a_loop_with_autocast(make, shape, path):
    data = federation(*shape)
    run = train(make(), data, ff.fedavg(), precision="bfloat16", path=path, **SETTINGS)
    exact = train(make(), data, ff.fedavg(), path=path, **SETTINGS)
    by_hand, start = naive(make(), data), make()
    assert run.path == path
    assert run.server["model"].dtype == torch.float32
    reference = moved(by_hand, start)
    apart = float((moved(run.model, start) - reference).norm() / reference.norm())
    from_exact = float((moved(exact.model, start) - reference).norm() / reference.norm())
    # Batched products round some of the three digits otherwise; client by client nothing does.
    assert apart < (5e-3 if path == "matrix" else 1e-5)
    assert from_exact > 1e-4 and (path == "matrix" or from_exact > 50 * apart)
    with torch.no_grad():
        inputs, targets = data.test
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = run.model(inputs)
            loss = F.cross_entropy(outputs, targets)
    assert run.history[-1]["test_loss"] == pytest.approx(float(loss), abs=1e-6)
    assert run.history[-1]["test_accuracy"] == pytest.approx(
        float((outputs.argmax(1) == targets).float().mean())
    )


def test_closed_form_gradients_are_those_of_autocast():
    model = dense()
    layout = Layout(model)
    point = layout.vector(model).expand(3, -1).clone()
    inputs, targets = torch.randn(3, 8, 12), torch.randint(4, (3, 8))
    differentiated = MatrixGradients(model, layout, F.cross_entropy, "bfloat16").differentiated
    expected, losses = differentiated(point, inputs, targets)
    layers = dense_layers(model, layout, F.cross_entropy)
    gradient, own_losses, slopes = dense_gradients(layers, point, inputs, targets, "bfloat16", of_inputs=True)
    exact, _, exact_slopes = dense_gradients(layers, point, inputs, targets, of_inputs=True)
    assert gradient.dtype == own_losses.dtype == slopes.dtype == torch.float32
    assert float((gradient - expected).norm() / expected.norm()) < 0.01
    assert float((slopes - exact_slopes).norm() / exact_slopes.norm()) < 0.02
    assert float((gradient - exact).norm() / exact.norm()) > 1e-4
    torch.testing.assert_close(own_losses, losses, atol=5e-3, rtol=0)


@pytest.mark.parametrize("algorithm", ["fedsam", "fedrobust", "fedsynsam", "mimelite"])
@pytest.mark.parametrize("path", ["matrix", "client"])
def test_algorithms_have_the_same_bits_for_any_number_of_workers(algorithm, path):
    settings = {**SETTINGS, "rounds": 2, "precision": "bfloat16", "path": path}
    models = [
        train(dense(), federation(12), generic(algorithm), **{**settings, "workers": workers}).server["model"]
        for workers in (1, 2)
    ]
    assert torch.equal(*models)
    exact = train(dense(), federation(12), generic(algorithm), **{**settings, "precision": "float32"})
    assert not torch.equal(models[0], exact.server["model"])


def test_a_resumed_run_has_the_same_bits_and_precision_belongs_to_its_identity(tmp_path):
    settings = {**SETTINGS, "precision": "bfloat16"}
    data, algorithm = federation(3, 8, 8), ff.scaffold()
    whole = train(convolutional(), data, algorithm, **settings)
    train(convolutional(), data, algorithm, folder=tmp_path / "run", **{**settings, "rounds": 1})
    resumed = train(convolutional(), data, algorithm, folder=tmp_path / "run", **{**settings, "workers": 2})
    assert torch.equal(whole.server["model"], resumed.server["model"])
    assert '"precision": "bfloat16"' in (tmp_path / "run" / "config.json").read_text()
    with pytest.raises(FlatfedError, match="training"):
        train(
            convolutional(), data, algorithm, folder=tmp_path / "run", **{**settings, "precision": "float32"}
        )


def test_losses_and_metrics_of_the_users_own_get_wide_numbers():
    seen = []

    def spread(outputs, targets):
        seen.append((outputs.dtype, torch.is_autocast_enabled("cpu")))
        return outputs.numpy().std()  # numpy has no bfloat16

    def product(outputs, targets):
        return (outputs @ outputs.T).mean() ** 2

    settings = {**SETTINGS, "precision": "bfloat16", "lr": 0.01}
    run = train(dense(), federation(12), ff.fedavg(), loss=product, metrics={"spread": spread}, **settings)
    assert set(seen) == {(torch.float32, False)}
    assert run.history[-1]["train_loss"] != float(torch.tensor(run.history[-1]["train_loss"]).bfloat16())


def test_diagnostics_measure_in_float32_and_say_so():
    data = federation(12)
    settings = {**SETTINGS, "precision": "bfloat16"}
    run = train(dense(), data, ff.fedavg(), **settings)
    with (
        pytest.warns(FlatfedWarning, match="measured in float32"),
        inspect(ff.Task(dense(), data), run=run) as subject,
    ):
        measured = subject.evaluate(subject.model, data.test)
        gradient = subject.gradient(subject.model, data.test)
    with torch.enable_grad():
        loss = F.cross_entropy(run.model(data.test[0]), data.test[1])
        exact = torch.autograd.grad(loss, list(run.model.parameters()))
    assert measured["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert run.history[-1]["test_loss"] != pytest.approx(float(loss.detach()), abs=1e-6)
    torch.testing.assert_close(gradient, torch.cat([piece.flatten() for piece in exact]))


def test_other_dtypes_and_words_are_refused():
    doubles = ff.Federation.from_tensors([(torch.randn(8, 12).double(), torch.randint(4, (8,)))])
    with pytest.raises(FlatfedError, match=r"precision = 'bfloat16'.*float64.*model\.float\(\)"):
        train(dense().double(), doubles, ff.fedavg(), rounds=1, precision="bfloat16")
    with pytest.raises(FlatfedError, match="precision"):
        ff.Training(rounds=1, precision="float16")


@pytest.mark.parametrize(
    ("flags", "note"), [({"avx2"}, True), ({"avx2", "avx512_bf16"}, False), (set(), False), ({"bf16"}, False)]
)
def test_a_machine_that_gains_nothing_is_told_so(monkeypatch, flags, note):
    monkeypatch.setattr(precision, "processor_flags", lambda: frozenset(flags))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(dense(), federation(12), ff.fedavg(), **{**SETTINGS, "rounds": 1, "precision": "bfloat16"})
        train(dense(), federation(12), ff.fedavg(), **{**SETTINGS, "rounds": 1})
    assert [str(warning.message) for warning in caught if "avx512_bf16" in str(warning.message)] == (
        [precision.slow_precision("bfloat16", "cpu")] if note else []
    )


def test_a_processor_that_crashes_is_found_before_training(monkeypatch):
    assert precision.failure_of(precision._small_products) is None
    assert precision.failure_of(lambda: os.kill(os.getpid(), signal.SIGILL)) == "SIGILL"
    monkeypatch.setattr(precision, "processor_flags", lambda: frozenset({"amx_bf16"}))
    monkeypatch.setattr(precision, "_amx_failure", lambda: "SIGILL")
    with pytest.raises(FlatfedError, match=r"lists AMX.*SIGILL.*ONEDNN_MAX_CPU_ISA"):
        train(dense(), federation(12), ff.fedavg(), **{**SETTINGS, "precision": "bfloat16"})
