"""Bounds against values computed by hand, and constants against naive estimates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from problems import Quadratics, federation, gradient_of, mean_output, network, run
from typer.testing import CliRunner

import flatfed as ff
from flatfed.cli import app
from flatfed.core.sampling import batches
from flatfed.diagnostics import DIAGNOSTICS, drift, global_stability, inspect, perturbation_difference, theory
from flatfed.diagnostics.constants import HOW, estimated_constants, gradient_bound
from flatfed.runs.train import run_config
from flatfed.theory import Setting
from flatfed.theory.selection import Constants, applicable
from flatfed.theory.stability import stability_bound
from flatfed.training.config import Config

SMALL = {
    "data": {"dataset": "digits", "clients": 4},
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"rounds": 1, "participants": 2, "local_steps": 2, "batch_size": 8},
    "execution": {"workers": 1},
}


def test_constants_are_those_of_naive_estimates():
    data = federation()
    result = run(ff.fedavg(), data=data, rounds=2)
    with inspect(ff.Task(network(), data), run=result) as subject:
        found = estimated_constants(subject, clients=None, count=2)
        settings, model = subject.training, subject.model
        samples = [subject.data(client) for client in range(8)]
    full = torch.stack([gradient_of(network(), model, *pair) for pair in samples])
    spread, longest, first_batches = [], 0.0, []
    for client, (inputs, targets) in enumerate(samples):
        chosen = batches(settings, 12, 2, client)
        small = [gradient_of(network(), model, inputs[each], targets[each]) for each in chosen[:2]]
        first_batches += small
        spread.append(sum(float((slope - full[client]).square().sum()) for slope in small) / 2)
        for at in (torch.nn.utils.parameters_to_vector(network().parameters()).detach(), model):
            for each in chosen[:3]:
                slope = gradient_of(network(), at, inputs[each], targets[each])
                for whole in (slope, slope + settings.weight_decay * at):
                    longest = max(longest, float(whole.norm()))
    assert found["gradient_bound"] == pytest.approx(longest)
    assert found["lipschitz"] == pytest.approx(float(full.norm(dim=1).max()))
    assert found["gradient_deviation"] == pytest.approx(math.sqrt(sum(spread) / 8))
    apart = (full - full.mean(0)).norm(dim=1)
    assert found["heterogeneity"] == pytest.approx(math.sqrt(float((apart**2).mean())))
    assert found["largest_heterogeneity"] == pytest.approx(float(apart.max()))
    assert found["mean_heterogeneity"] == pytest.approx(float(apart.mean()))
    assert found["gradient"] == pytest.approx(float(full.mean(0).norm()))
    # Of samples by themselves: two of each client, the first and the last.
    ends = [
        gradient_of(network(), model, inputs[[place]], targets[[place]])
        for inputs, targets in samples
        for place in (0, 11)
    ]
    alone = torch.stack(ends)
    assert found["sample_lipschitz"] == pytest.approx(float(alone.norm(dim=1).max()))
    deviation = (alone - full.repeat_interleave(2, 0)).square().sum(1).mean()
    assert found["sample_deviation"] == pytest.approx(math.sqrt(float(deviation)))
    units = [slope / slope.norm() for slope in first_batches]
    own = (full / full.norm(dim=1, keepdim=True)).repeat_interleave(2, 0)
    deviation = (torch.stack(units) - own).square().sum(1).mean()
    assert found["unit_deviation"] == pytest.approx(math.sqrt(float(deviation)))
    losses = [F.cross_entropy(network()(inputs), targets).item() for inputs, targets in samples]
    assert found["first_loss"] == pytest.approx(sum(losses) / 8)
    noise, farthest, longest = found["gradient_deviation"], found["largest_heterogeneity"], found["lipschitz"]
    squares = noise**2 + 2 * farthest**2 + 2 * longest**2
    assert found["printed_gradient_bound"] == pytest.approx(math.sqrt(squares))
    assert found["sufficient_gradient_bound"] == pytest.approx(math.hypot(noise, longest))
    assert set(found) == set(HOW)


def test_smoothness_is_the_largest_curvature_of_a_client():
    problem = Quadratics.random(clients=3, size=4)
    result = problem.train(ff.fedmoswa(), rounds=2)
    with inspect(ff.Task(result.model, problem.federation, mean_output), run=result) as subject:
        found = theory(subject, clients=None)
    assert found["constants"]["smoothness"] == pytest.approx(
        float(torch.linalg.eigvalsh(problem.curvatures).max())
    )
    assert set(found["bounds"]) == {"stability"}


def test_unequal_clients_have_one_bound_in_both_diagnostics():
    data = federation(unequal=True)
    options = {"local_epochs": 1, "batch_size": 2, "rounds": 3}
    with inspect(ff.Task(network(), data), ff.fedavg(), ff.Training(**options)) as subject:
        bounds = theory(subject)["bounds"]["stability"]["y"]
        assert bounds == global_stability(subject, replacements=1)["bound"]
        sizes = [len(data.client(client)) for client in range(len(data))]
        # The first client is not the largest, and the bound is that of the largest.
        assert sizes[0] < max(sizes)
        steps = len(batches(subject.training, max(sizes), 0, 0))
        assert bounds == stability_bound(
            subject.algorithm, subject.training, steps, gradient_bound(subject), rounds=3
        )


def theorems(algorithm: ff.Algorithm, **settings) -> dict[str, dict]:
    options = {"rounds": 3, "local_steps": 2, "batch_size": 6, "lr": 0.01, **settings}
    with inspect(ff.Task(network(), federation()), algorithm, ff.Training(**options)) as subject:
        found = theory(subject, clients=3)
        moved, changed = drift(subject, clients=3), perturbation_difference(subject, clients=3)
    measured = {
        "drift": max(moved["drift_by_step"]),
        "distance": max(moved["distance_by_step"]),
        "flatness distance": moved["flatness_distance"],
        "perturbation difference": max(changed["from_first"]),
    }
    statements = {f"{entry['paper']}, {entry['name']}": entry for entry in found["statements"]}
    measured["squared gradient"] = found["constants"]["gradient"] ** 2
    for entry in statements.values():
        assert entry["measured"] in {None, *measured.values()}
        assert entry["holds"] == all(condition["holds"] for condition in entry["conditions"])
    return statements


def test_theorems_are_chosen_by_parts_and_stand_beside_what_was_measured():
    found = theorems(ff.fedsam(radius=0.05))
    assert {
        "fedsam, Lemma B.1",
        "fedsam, Lemma B.2",
        "fedsam, Theorem B.6",
        "fedsagd, Table 1: 2ηKΘT",
    } <= set(found)
    assert {name for name, entry in found.items() if entry["measured"] is not None} == {
        "fedsam, Lemma B.1",
        "fedsam, Lemma B.2",
        "fedsam, Theorem B.6",
        "fednsam, Theorem 2, with constants",
    }
    assert found["fedsam, Theorem B.6"]["label"] == "as printed" and found["fedsam, Theorem B.6"]["holds"]
    assert "fedsam, Theorem B.9" in theorems(ff.fedsam(radius=0.05), participants=2)
    assert {"fedsam, Lemma D.1", "fedsam, Theorem D.4"} <= set(theorems(ff.mofedsam()))
    assert {"fednsam, Drift", "fednsam, Theorem 1"} <= set(theorems(ff.fednsam()))
    assert {"fedswa, Theorem 5.1", "fedswa, Theorem 5.2", "fedswa, Lemma G.18"} <= set(
        theorems(ff.fedmoswa())
    )
    swa = theorems(ff.fedswa())
    # The corrected lemma is a bound at any step size.
    lemma = swa["fedswa, Lemma E.4"]
    assert 0 < lemma["measured"] < lemma["corrected"] < lemma["value"]
    assert {"fedswa, Theorem 5.1", "fedswa, Generalisation by sample stability"} <= set(swa)
    assert "fedswa, Theorem 5.2" not in swa
    sagd = theorems(ff.fedsagd())
    assert {"fedsagd, Theorem 4.1", "fedsagd, Theorem 4.1, with constants"} <= set(sagd)
    assert "exceeded" in next(entry["remark"] for name, entry in sagd.items() if "Table 1" in name)
    assert set(theorems(ff.fedexp())) == set()
    assert set(theorems(replace(ff.fedsam(), optimizer=ff.parts.AdamW()))) == set()


def test_a_value_below_the_measurement_is_called_exceeded():
    statement = {
        "paper": "fedsam",
        "name": "Lemma B.1",
        "value": 1.0,
        "corrected": None,
        "label": "as printed",
    }
    statement |= {"conditions": [], "remark": "", "measured": 1.5}
    others = [{"measured": 0.5}, {"measured": None}, {"value": None}, {"label": "order"}]
    result = {"constants": {}, "statements": [statement, *({**statement, **other} for other in others)]}
    (_, table) = DIAGNOSTICS["theory"].tables(result)
    assert [row[4].text for row in table.rows] == ["as printed, exceeded", *["as printed"] * 3, "order"]


def test_mixed_perturbations_have_the_compressor_s_variance():
    constants = Constants(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 10, 0.5)
    s = Setting(N=4, S=4, K=2, T=100, eta=1e-4)
    mixed = ff.fedsynsam(radius=0.1)
    plain, coarse = (
        applicable(made, s, constants) for made in (mixed, replace(mixed, compress=ff.parts.Quantize(2)))
    )
    values = [
        [entry.statement.value for entry in found if entry.paper == "fedsynsam"] for found in (plain, coarse)
    ]
    assert values[0][0] == values[1][0] == pytest.approx(2 + 4 * 0.01 * 0.5)
    assert values[0][2] < values[1][2]
    # Nothing is said of biased compression.
    biased = applicable(replace(mixed, compress=ff.parts.TopK(0.1)), s, constants)
    assert "fedsynsam" not in {entry.paper for entry in biased}


def test_a_diverged_model_has_no_theorems():
    constants = Constants(*[math.inf] * 12)
    assert applicable(ff.fedsam(), Setting(N=4, S=4, K=2, T=3, eta=0.1), constants) == []


def test_theory_is_printed_as_tables(tmp_path):
    folder = tmp_path / "run"
    run_config(Config.checked({**SMALL, "algorithm": {"name": "fedsam"}}), folder)
    done = CliRunner().invoke(app, ["diagnose", str(folder), "theory", "--set", "clients=2"])
    assert done.exit_code == 0, done.output
    for words in (
        "Constants",
        "largest eigenvalue of the Hessians",
        "Theorems",
        "fedsam, Lemma B.2",
        "as printed",
    ):
        assert words in done.output
