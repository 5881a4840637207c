"""What every run has: the summary, curves, rounds to a target, clients, the split, the configs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flatfed.core.errors import FlatfedError
from flatfed.data.partition import class_counts
from flatfed.data.partition.base import Indices
from flatfed.report.content import (
    Cell,
    Figure,
    Section,
    Table,
    Trace,
    amount,
    axes,
    cell,
    line,
    log_axis,
    rounded,
)
from flatfed.report.group import Comparison, Curve, Method, algorithm_name, flattened, spread
from flatfed.report.read import Record, number
from flatfed.report.split import binned
from flatfed.runs.compare import Spread
from flatfed.training.config import Config
from flatfed.training.evaluation import ClientSpread

ACCURACY = "test_accuracy"
# Numbers of a history line that have their own place in the report, or say nothing over the rounds.
PLACED = {"round", "participants", "bytes_down", "bytes_up", "gradient_evaluations", "seconds", "lr"}
TITLES = {
    ACCURACY: "Test accuracy",
    "test_loss": "Test loss",
    "train_loss": "Training loss",
    "update_norm": "Length of the mean update",
    "flatness_distance": "Flatness distance",
    "client_drift": "Client drift",
}
MEGABYTE = 1e6


def summary(comparison: Comparison, targets: Sequence[float], test_samples: int | None) -> Section:
    """One line for each method: what it reached and what it cost."""
    keys = comparison.history_keys()
    several = max(len(method.counted) for method in comparison.methods) > 1
    columns = ["method"]
    if ACCURACY in keys:
        columns += ["accuracy %", "best %"]
        columns += [f"rounds to {target:.4g} %" for target in (100 * each for each in targets)]
    else:
        columns += [_title(key).lower() for key in _metrics(keys)]
    columns += [
        "clients' deviation %",
        "by chance %",
        "MB down",
        "MB up",
        "gradients",
        "seconds",
        "rounds",
        "seeds",
    ]
    rows = []
    for method in comparison.methods:
        row = [cell(method.label)]
        if ACCURACY in keys:
            row += [cell(method.final(ACCURACY), 2, 100), cell(method.best(ACCURACY), 2, 100)]
            row += [_reached(method, target) for target in targets]
        else:
            row += [cell(method.final(key), 4) for key in _metrics(keys)]
        row += _client_cells(method)[1:]
        row += [amount(_last(method.total(key)), 1 / MEGABYTE) for key in ("bytes_down", "bytes_up")]
        row += [cell(_last(method.total("gradient_evaluations")), 0), cell(_last(method.total("seconds")), 1)]
        row += [cell(float(_rounds(method)), 0), _seeds(method)]
        rows.append(row)
    notes = ["Mean ± standard deviation over seeds, at the last round." if several else "At the last round."]
    best = max((found.mean for m in comparison.methods if (found := m.final(ACCURACY))), default=None)
    if test_samples and best is not None:
        error = 100 * math.sqrt(best * (1 - best) / test_samples)
        notes.append(
            f"With {test_samples:,} test samples the highest accuracy is uncertain by ±{error:.2g} points "
            "(one standard error) whatever the seeds say."
        )
    notes.append(
        "MB and gradients: of the whole run, all participants. Clients' deviation: of the final model's "
        "accuracy on each client's own data; by chance: what equally good clients of their sizes would show."
    )
    table = Table("summary", "Results", columns, rows, " ".join(notes))
    return Section("summary", "Summary", [table])


def _seeds(method: Method) -> Cell:
    counted, everything = len(method.counted), method.seeds
    text = str(counted) if counted == everything else f"{counted} of {everything}"
    return Cell(text, counted)


def _rounds(method: Method) -> int:
    return min((len(run.history) for run in method.counted), default=0)


def _last(curve: Curve) -> Spread | None:
    if not curve.rounds:
        return None
    return Spread(curve.mean[-1], curve.deviation[-1] if curve.deviation else math.nan)


def _reached(method: Method, target: float) -> Cell:
    found = method.rounds_to(ACCURACY, target)
    some = f" ({len(found)} of {len(method.counted)})" if len(found) < len(method.counted) else ""
    return cell(Spread.of(found), 0, more=some) if found else Cell("not reached")


def client_accuracies(run: Record, prefix: str = "") -> list[tuple[float, float | None]]:
    """The final model's accuracy on each client's data and their number, as the run or a diagnostic has it.

    With the prefix "test_", on the client's own test data.
    """
    listed = [(client.get(f"{prefix}accuracy"), client.get(f"{prefix}samples")) for client in run.clients]
    if not listed and not prefix and "clients" in run.diagnostics:
        result = run.diagnostics["clients"]["result"]
        accuracies, sizes = (result.get(key) for key in ("accuracy", "samples"))
        if isinstance(accuracies, list) and isinstance(sizes, list):
            listed = list(zip(accuracies, sizes, strict=False))
    return [(value, number(size)) for found, size in listed if (value := number(found)) is not None]


def _client_cells(method: Method, prefix: str = "") -> list[Cell]:
    """The mean over clients, the deviation between them, and the one of chance."""
    means, deviations, floors = [], [], []
    for run in method.counted:
        pairs = client_accuracies(run, prefix)
        values, sizes = [value for value, _ in pairs], [int(size) for _, size in pairs if size]
        if values:
            means.append([statistics.fmean(values)])
            deviations.append([statistics.pstdev(values)])
        if values and len(sizes) == len(values) and all(0 <= value <= 1 for value in values):
            floors.append([ClientSpread.of(values, sizes).chance])
    return [cell(spread(found), 1, 100) for found in (means, deviations, floors)]


# -- curves -----------------------------------------------------------------------------------------------


def _title(key: str) -> str:
    return TITLES.get(key, key.replace("_", " ").capitalize())


def _metrics(keys: Iterable[str]) -> list[str]:
    """Accuracy, then other test metrics, then the test loss; the training loss where nothing is tested."""
    tests = [key for key in keys if key.startswith("test_")]
    return sorted(tests, key=lambda key: (key != ACCURACY, key == "test_loss")) or ["train_loss"]


def curves(comparison: Comparison) -> Section:
    """Every metric against rounds, and the first one and its loss against traffic and computation."""
    keys = comparison.history_keys()
    metrics = _metrics(keys)
    figures = [_over_rounds(comparison, key) for key in metrics]
    main = [key for key in metrics if key in {metrics[0], "test_loss"}] or metrics[:1]
    for name, unit, costs, scale in (
        ("megabytes", "megabytes sent, both ways", ("bytes_up", "bytes_down"), MEGABYTE),
        ("gradients", "minibatch gradients", ("gradient_evaluations",), 1.0),
    ):
        if any(cost in keys for cost in costs):
            figures += [_over_cost(comparison, key, name, unit, costs, scale) for key in main]
    note = (
        "Lines are means over seeds, bands one standard deviation between them. Accuracy axes leave out the "
        "first steep rise; drag to zoom, double-click to see everything."
    )
    return Section("training", "Training", figures, note)


def _scale(key: str) -> tuple[float, str]:
    return (100.0, f"{_title(key).lower()} (%)") if key.endswith("accuracy") else (1.0, _title(key).lower())


def _over_rounds(comparison: Comparison, key: str) -> Figure:
    traces = []
    for place, method in enumerate(comparison.methods):
        curve = method.curve(key)
        if curve.rounds:
            traces.append(_line(place, method, curve.rounds, curve, key))
    return _curve_figure(key, f"{key}-rounds", _title(key), "rounds", traces)


def _over_cost(
    comparison: Comparison, key: str, name: str, unit: str, costs: Sequence[str], scale: float
) -> Figure:
    traces = []
    for place, method in enumerate(comparison.methods):
        curve, cost = method.curve(key), method.total(*costs)
        spent = dict(zip(cost.rounds, cost.mean, strict=True))
        if curve.rounds:
            traces.append(_line(place, method, [spent[each] / scale for each in curve.rounds], curve, key))
    return _curve_figure(key, f"{key}-{name}", f"{_title(key)} against {name}", unit, traces)


def _line(place: int, method: Method, x: Sequence[float], curve: Curve, key: str) -> Trace:
    factor = _scale(key)[0]
    deviation = [factor * value for value in curve.deviation] if curve.deviation else None
    return line(place, method.label, x, [factor * value for value in curve.mean], deviation)


def _curve_figure(key: str, name: str, title: str, unit: str, traces: list[Trace]) -> Figure:
    layout = axes(unit, "")
    if key.endswith("loss"):
        layout = log_axis(layout, traces)
    if key.endswith("accuracy"):
        layout["yaxis"] |= {"ticksuffix": " %", "range": _upper_range(traces)}
    return Figure(name, title, traces, layout, columns=("method", unit, _scale(key)[1]))


def _upper_range(traces: Sequence[Trace]) -> list[float]:
    """Around the upper nine tenths of the values: what matters is where the methods end."""
    values = [value for trace in traces for value in trace["y"] if value is not None]
    low, high = float(np.quantile(values, 0.1)), max(values)
    margin = 0.06 * max(high - low, 1.0)
    return [low - margin, high + margin]


def other_curves(comparison: Comparison) -> Section:
    """Whatever else the histories have, from callbacks for instance."""
    keys = comparison.history_keys()
    others = [key for key in keys if key not in PLACED and key not in _metrics(keys)]
    note = (
        "The training loss is taken where the algorithm evaluates it, for some at a perturbed point: compare "
        "it between algorithms with care."
    )
    figures = [_over_rounds(comparison, key) for key in others]
    return Section("rounds", "Round by round", figures, note if "train_loss" in others else "")


# -- targets ----------------------------------------------------------------------------------------------


def usual_targets(comparison: Comparison) -> list[float]:
    """Whole percentages at 50, 75, 90 and 97 % of the best method's final accuracy."""
    finals = [found.mean for method in comparison.methods if (found := method.final(ACCURACY)) is not None]
    whole = (math.floor(100 * max(finals, default=0.0) * share) for share in (0.5, 0.75, 0.9, 0.97))
    return [percent / 100 for percent in dict.fromkeys(whole) if percent > 0]


def to_targets(comparison: Comparison, targets: Sequence[float]) -> Section:
    """When each method first reaches some accuracies, in rounds and in megabytes."""
    if not targets or ACCURACY not in comparison.history_keys():
        return Section("targets", "Rounds to an accuracy")
    columns = ["method", *(f"{100 * target:.4g} %" for target in targets)]
    rounds = [
        [cell(method.label), *(_reached(method, target) for target in targets)]
        for method in comparison.methods
    ]
    megabytes = [
        [cell(method.label), *(_megabytes_to(method, target) for target in targets)]
        for method in comparison.methods
    ]
    traces = [
        line(place, method.label, [100 * target for target in targets], found, mode="lines+markers")
        for place, method in enumerate(comparison.methods)
        if any(found := [_mean(method.rounds_to(ACCURACY, target)) for target in targets])
    ]
    note = "Means over the seeds that reach it; in brackets how many do, if not all."
    figure = Figure(
        "rounds-to-target",
        "Rounds to an accuracy",
        traces,
        axes("test accuracy (%)", ""),
        columns=("method", "test accuracy (%)", "rounds"),
    )
    tables = [
        Table("rounds-to-target", "Rounds", columns, rounds, note),
        Table("megabytes-to-target", "Megabytes, both ways", columns, megabytes),
    ]
    return Section("targets", "Rounds to an accuracy", [*tables, *([figure] if traces else [])])


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _megabytes_to(method: Method, target: float) -> Cell:
    cost = method.total("bytes_up", "bytes_down")
    spent = dict(zip(cost.rounds, cost.mean, strict=True))
    found = [spent[place] / MEGABYTE for place in method.rounds_to(ACCURACY, target) if place in spent]
    return amount(Spread.of(found)) if found else Cell("not reached")


# -- clients ----------------------------------------------------------------------------------------------


def clients(comparison: Comparison) -> Section:
    """How the final model's accuracy differs between the clients, on their training and their test data."""
    figures = [*_client_figures(comparison, "", "training"), *_client_figures(comparison, "test_", "test")]
    if not figures:
        return Section("clients", "Clients")
    columns = ["method"]
    for kind in ("training", "test"):
        columns += [f"{kind}: {what} %" for what in ("mean", "deviation", "by chance")]
    rows = [
        [cell(method.label), *_client_cells(method), *_client_cells(method, "test_")]
        for method in comparison.methods
    ]
    note = "Deviation: between clients. By chance: what equally good clients of these sizes would show."
    table = Table("client-spread", "Accuracy over the clients", columns, rows, note)
    tested = any(figure.name.startswith("clients-test") for figure in figures)
    return Section(
        "clients",
        "Clients",
        [*([table] if tested else []), *figures],
        "The final model on every client's own data, all seeds together.",
    )


def _client_figures(comparison: Comparison, prefix: str, kind: str) -> list[Figure]:
    boxes, shares = [], []
    for place, method in enumerate(comparison.methods):
        found = [100 * value for run in method.counted for value, _ in client_accuracies(run, prefix)]
        if found:
            boxes.append(quantile_box(place, method.label, found))
            levels = np.linspace(0, 1, min(len(found), 200) + 1)
            curve = np.quantile(found, levels, method="inverted_cdf").tolist()
            shares.append(line(place, method.label, curve, (100 * levels).tolist(), line={"shape": "hv"}))
    if not boxes:
        return []
    name = "clients-test" if prefix else "clients"
    return [
        Figure(
            f"{name}-box",
            f"Accuracy on each client's own {kind} data",
            boxes,
            axes("accuracy (%)", ""),
            "Box: the middle half of the clients, the median. Whiskers: 5 and 95 %. Dashed: the mean.",
            ("method", *QUANTILES, "mean"),
        ),
        Figure(
            f"{name}-share",
            f"Clients at or below an accuracy on their {kind} data",
            shares,
            axes("accuracy (%)", "share of clients (%)"),
            columns=("method", "accuracy (%)", "clients at or below (%)"),
        ),
    ]


QUANTILES = {"5 %": 0.05, "25 %": 0.25, "50 %": 0.5, "75 %": 0.75, "95 %": 0.95}


def quantile_box(place: int, label: str, values: Sequence[float]) -> Trace:
    """A box of quantiles, whose size does not grow with the number of values."""
    found = rounded(float(np.quantile(values, share)) for share in QUANTILES.values())
    fences = zip(("lowerfence", "q1", "median", "q3", "upperfence"), found, strict=True)
    box = {name: [value] for name, value in fences}
    return {
        "type": "box",
        "orientation": "h",
        "name": label,
        "y": [label],
        **box,
        "mean": rounded([statistics.fmean(values)]),
        "meta": {"method": place},
    }


# -- split ------------------------------------------------------------------------------------------------


def split_of(record: Record) -> tuple[Indices, int]:
    """Samples of each class at each client, and how many test samples there are; from config and data."""
    if "data" not in record.config:
        raise FlatfedError("the run was made from Python, its data are not in its config")
    federation = Config.checked(record.config).make_federation()
    rows = [federation.rows(client).numpy() for client in range(len(federation))]
    targets = federation.targets.numpy()
    if targets.ndim != 1 or not np.issubdtype(targets.dtype, np.integer):
        raise FlatfedError("the targets are not classes")
    counts = class_counts(rows, targets, federation.classes or int(targets.max()) + 1)
    return counts, len(federation.test[0]) if federation.test else 0


def split(counts: Indices, seed: Any) -> Section:
    """Which client holds how many samples of which class."""
    values, clients, classes = binned(counts, 250, 100)
    heatmap = {
        "type": "heatmap",
        "name": "samples",
        "x": clients.tolist(),
        "y": classes.tolist(),
        "z": [rounded(row) for row in np.sqrt(values).T.tolist()],
        "text": [rounded(row) for row in values.T.tolist()],
        "hovertemplate": "client %{x}, class %{y}: %{text}<extra></extra>",
        "xgap": 1 if len(clients) <= 120 else 0,
        "ygap": 1,
        "showscale": False,
        "meta": {"ramp": True},
    }
    sizes = counts.sum(axis=1)
    held = np.count_nonzero(counts, axis=1)
    each = "" if len(clients) == len(counts) else " Columns are means over neighbouring clients."
    note = (
        f"{len(counts):,} clients hold {int(sizes.min()):,} to {int(sizes.max()):,} samples (median "
        f"{np.median(sizes):g}) of {int(held.min())} to {int(held.max())} classes. Shades follow the square "
        f"root of the count.{each} The split under seed {seed}; other seeds divide the data anew."
    )
    figure = Figure(
        "split",
        "Samples by class and client",
        [heatmap],
        axes("client", "class"),
        note,
        ("client", "class", "samples"),
    )
    return Section("split", "Split", [figure])


# -- configs ----------------------------------------------------------------------------------------------


def configs(comparison: Comparison) -> tuple[list[tuple[str, str]], Table | None]:
    """The settings that all methods share, and a table of those in which they differ."""
    flat = [flattened(method.config) for method in comparison.methods]
    keys = [key for key in dict.fromkeys(key for each in flat for key in each) if key != "training.seed"]
    shared = [(key, flat[0][key]) for key in keys if len({each.get(key) for each in flat}) == 1]
    differing = [key for key in keys if len({each.get(key) for each in flat}) > 1]
    if all(algorithm_name(method.config) == method.label for method in comparison.methods):
        differing = [key for key in differing if key != "algorithm.name"]
    if not differing:
        return shared, None
    rows = [
        [cell(method.label), *(cell(each.get(key)) for key in differing)]
        for method, each in zip(comparison.methods, flat, strict=True)
    ]
    return shared, Table("differences", "What differs", ["method", *differing], rows)


def headline(comparison: Comparison) -> str:
    """The setting in one line."""
    data, partition, model = (comparison.setting.get(key) for key in ("data", "partition", "model"))
    if not isinstance(data, Mapping):
        return "a model and data given in Python"
    parts = [f"{data.get('dataset')} over {data.get('clients')} clients"]
    for described in (partition, model):
        if isinstance(described, Mapping):
            options = flattened({key: value for key, value in described.items() if key != "name"})
            listed = ", ".join(f"{key} {value}" for key, value in options.items())
            parts.append(f"{described.get('name')} ({listed})" if listed else str(described.get("name")))
    return " · ".join(parts)
