"""The sections of a report: what every run has, and what diagnostics measured."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from flatfed.core.errors import FlatfedError, shown
from flatfed.core.tree import first_leaf
from flatfed.data.federation import PooledFederation
from flatfed.data.partition import class_counts
from flatfed.data.partition.base import Indices
from flatfed.diagnostics import DIAGNOSTICS, figures
from flatfed.diagnostics.registry import MISUNDERSTANDINGS
from flatfed.report.group import (
    CLIENT_NUMBERS,
    Comparison,
    Method,
    algorithm_name,
    differing_keys,
    flattened,
)
from flatfed.report.read import RunRecord
from flatfed.report.split import binned
from flatfed.runs.statistics import ACCURACY, MEGABYTE, VALIDATION, Spread, mean
from flatfed.training.config import Config

# Numbers of a history line that have their own place in the report, or say nothing over the rounds.
PLACED = {"round", "participants", "bytes_down", "bytes_up", "gradient_evaluations", "seconds", "lr"}
MOST_CURVES = 200
TITLES = {
    "train_loss": "Training loss",
    "update_norm": "Length of the mean update",
}
COSTS: dict[str, tuple[str, Sequence[str], float]] = {
    "megabytes": ("megabytes sent, both ways", ("bytes_up", "bytes_down"), MEGABYTE),
    "gradients": ("minibatch gradients", ("gradient_evaluations",), 1.0),
}
"""What curves are drawn against besides rounds: the axis, the numbers of a history line, their unit."""
DIAGNOSED = {
    "flatness": ("Flatness", ""),
    "surfaces": (
        "Loss surfaces",
        "The loss around each final model along two random directions. Turning one surface turns all.",
    ),
    "planes": ("Between models", ""),
    "stability": ("Stability and drift", ""),
    "generalisation": ("Generalisation", ""),
}
"""The sections of the diagnostics, their titles and introductions; other sections follow these."""
Column = Callable[[Method], figures.TableCell]


@dataclass
class Section:
    """A part of a comparison under one heading, without figures and tables that have nothing to show."""

    name: str
    title: str
    content: figures.Content = ()
    note: str = ""

    def __post_init__(self) -> None:
        self.content = [
            item for item in self.content if (item.traces if isinstance(item, figures.Figure) else item.rows)
        ]


# -- summary ----------------------------------------------------------------------------------------------


def summary(comparison: Comparison, targets: Sequence[float], test_samples: int | None) -> Section:
    """One line for each method: what it reached and what it cost."""
    keys = comparison.history_keys[:MOST_CURVES]
    columns: dict[str, Column] = {}
    if ACCURACY in keys:
        columns["accuracy %"] = lambda method: figures.percent(method.last())
        columns["best %"] = lambda method: figures.percent(method.best())
        if VALIDATION in keys:
            columns["validation %"] = lambda method: figures.percent(method.last(VALIDATION))
            columns["at best validation %"] = lambda method: figures.percent(method.at_best_validation())
        if chosen := _chosen(comparison):
            columns["chosen by"] = lambda method: figures.cell(chosen.get(method.number))
        for target in targets:
            columns[f"rounds to {100 * target:.4g} %"] = partial(_rounds_to, target)
    else:
        for key in _metrics(keys):
            columns[_title(key).lower()] = partial(lambda key, method: figures.cell(method.last(key), 4), key)
    columns |= {
        "clients' deviation %": _client_column("training", 1),
        "by chance %": _client_column("training", 2),
        "MB down": lambda method: figures.amount(method.running_total("bytes_down").end, 1 / MEGABYTE),
        "MB up": lambda method: figures.amount(method.running_total("bytes_up").end, 1 / MEGABYTE),
        "gradients": lambda method: figures.cell(method.running_total("gradient_evaluations").end, 0),
        "seconds": lambda method: figures.cell(method.running_total("seconds").end, 1),
        "rounds": lambda method: figures.cell(
            min((len(run.history) for run in method.counted), default=0), 0
        ),
        "seeds": _seeds,
    }
    several = max(len(method.counted) for method in comparison.methods) > 1
    notes = ["Mean ± standard deviation over seeds, at the last round." if several else "At the last round."]
    if "best %" in columns:
        notes.append("Best: in the round that the test samples themselves choose, so it is too high.")
    if "chosen by" in columns:
        notes.append(
            "Chosen by: of an algorithm's settings the best one, by the validation samples if all have some; "
            "an accuracy that the test samples have chosen is too high."
        )
    highest = _highest_accuracy(comparison)
    if test_samples and highest is not None and 0 <= highest <= 1:
        error = 100 * math.sqrt(highest * (1 - highest) / test_samples)
        notes.append(
            f"With {test_samples:,} test samples the highest accuracy is uncertain by ±{error:.2g} points "
            "(one standard error) whatever the seeds say."
        )
    notes.append(
        "MB and gradients: of the whole run, all participants. Clients' deviation: of the final model's "
        "accuracy on each client's own data; by chance: what equally good clients of their sizes would show."
    )
    table = figures.method_table("summary", "Results", comparison.methods, columns, " ".join(notes))
    return Section("summary", "Summary", [table])


def _chosen(comparison: Comparison) -> dict[int, str]:
    """By number the best method of every algorithm that has several settings, and which samples say so."""
    algorithms: dict[str, list[Method]] = {}
    for method in comparison.methods:
        algorithms.setdefault(algorithm_name(method.config), []).append(method)
    chosen = {}
    for methods in algorithms.values():
        key = VALIDATION if all(method.last(VALIDATION) for method in methods) else ACCURACY
        finals = {method.number: final.mean for method in methods if (final := method.last(key))}
        if len(finals) > 1:
            best = max(finals, key=lambda number: finals[number])
            chosen[best] = f"{key.partition('_')[0]} samples, of {len(finals)}"
    return chosen


def _highest_accuracy(comparison: Comparison) -> float | None:
    finals = (method.last() for method in comparison.methods)
    return max((final.mean for final in finals if final is not None), default=None)


def _seeds(method: Method) -> figures.TableCell:
    counted, everything = len(method.counted), method.seeds
    return figures.TableCell(str(counted) if counted == everything else f"{counted} of {everything}", counted)


def _rounds_to(target: float, method: Method) -> figures.TableCell:
    """The rounds to an accuracy, and how many seeds reach it if not all do."""
    rounds = method.rounds_to(target)
    some = f" ({len(rounds)} of {len(method.counted)})" if len(rounds) < len(method.counted) else ""
    return figures.cell(Spread.of(rounds), 0, more=some) if rounds else figures.TableCell("not reached")


# -- curves -----------------------------------------------------------------------------------------------


def _title(key: str) -> str:
    return TITLES.get(key, key.replace("_", " ").capitalize())


def _metrics(keys: Iterable[str]) -> list[str]:
    """Accuracy, then other test metrics, then the test loss; the training loss where nothing is tested."""
    tests = [key for key in keys if key.startswith("test_")]
    return sorted(tests, key=lambda key: (key != ACCURACY, key == "test_loss")) or ["train_loss"]


def curves(comparison: Comparison) -> Section:
    """Every metric against rounds, and the first one and its loss against traffic and computation."""
    keys = comparison.history_keys[:MOST_CURVES]
    metrics = _metrics(keys)
    content = [_curves(comparison, key) for key in metrics]
    main = [key for key in metrics if key in {metrics[0], "test_loss"}]
    for cost, (_, costs, _) in COSTS.items():
        if any(name in keys for name in costs):
            content += [_curves(comparison, key, cost) for key in main]
    note = (
        "Lines are means over seeds, bands one standard deviation between them. Accuracy axes leave out the "
        "first steep rise; drag to zoom, double-click to see everything."
    )
    return Section("training", "Training", content, note)


def other_curves(comparison: Comparison) -> Section:
    """Whatever else the histories have, from callbacks for instance."""
    keys = comparison.history_keys[:MOST_CURVES]
    others = [key for key in keys if key not in PLACED and key not in _metrics(keys)]
    note = (
        "The training loss is taken where the algorithm evaluates it, for some at a perturbed point: compare "
        "it between algorithms with care."
    )
    content = [_curves(comparison, key) for key in others]
    return Section("rounds", "Round by round", content, note if "train_loss" in others else "")


def _curves(comparison: Comparison, key: str, cost: str = "") -> figures.Figure:
    """One quantity of all methods against rounds or a cost, accuracies in percent."""
    unit, costs, size = COSTS[cost] if cost else ("rounds", (), 1.0)
    is_accuracy, title = key.endswith("accuracy"), _title(key)
    scale, label = (100.0, f"{title.lower()} (%)") if is_accuracy else (1.0, title.lower())
    traces = []
    for method in comparison.methods:
        curve = method.curve(key)
        x: list[float] = list(curve.rounds)
        if cost:
            spent = method.running_total(*costs).means
            x = [spent[number] / size for number in curve.rounds]
        deviation = [scale * value for value in curve.deviation] if curve.deviation else None
        if curve.rounds:
            traces.append(figures.line(method, x, [scale * value for value in curve.mean], deviation))
    layout = figures.axes(unit, "")
    if key.endswith("loss"):
        layout = figures.log_axis(layout, traces)
    if is_accuracy and traces:
        layout["yaxis"] |= {"ticksuffix": " %", "range": _upper_range(traces)}
    name, title = f"{key}-{cost or 'rounds'}", f"{title} against {cost}" if cost else title
    return figures.Figure(name, title, traces, layout, columns=("method", unit, label))


def _upper_range(traces: Sequence[figures.Trace]) -> list[float]:
    """Around the upper nine tenths of the values: what matters is where the methods end."""
    values = [value for trace in traces for value in trace["y"] if value is not None]
    low, high = float(np.quantile(values, 0.1)), max(values)
    margin = 0.06 * max(high - low, 1.0)
    return [low - margin, high + margin]


# -- targets ----------------------------------------------------------------------------------------------


def usual_targets(comparison: Comparison) -> list[float]:
    """Whole percentages at 50, 75, 90 and 97 % of the best method's final accuracy."""
    highest = _highest_accuracy(comparison) or 0.0
    whole = (math.floor(100 * highest * share) for share in (0.5, 0.75, 0.9, 0.97))
    return [percentage / 100 for percentage in dict.fromkeys(whole) if percentage > 0]


def to_targets(comparison: Comparison, targets: Sequence[float]) -> Section:
    """When each method first reaches some accuracies, in rounds and in megabytes."""
    if not targets or ACCURACY not in comparison.history_keys:
        return Section("targets", "Rounds to an accuracy")
    methods = comparison.methods
    headers = {f"{100 * target:.4g} %": target for target in targets}
    rounds = {header: partial(_rounds_to, target) for header, target in headers.items()}
    megabytes = {header: partial(_megabytes_to, target) for header, target in headers.items()}
    traces = [
        figures.line(method, [100 * target for target in targets], means, mode="lines+markers")
        for method in methods
        if any(means := [mean(method.rounds_to(target)) for target in targets])
    ]
    title, x = "Rounds to an accuracy", "test accuracy (%)"
    figure = figures.chart("rounds-to-target", title, traces, x, "rounds", titled=False)
    note = "Means over the seeds that reach it; in brackets how many do, if not all."
    tables = [
        figures.method_table("rounds-to-target", "Rounds", methods, rounds, note),
        figures.method_table("megabytes-to-target", "Megabytes, both ways", methods, megabytes),
    ]
    return Section("targets", "Rounds to an accuracy", [*tables, figure])


def _megabytes_to(target: float, method: Method) -> figures.TableCell:
    spent = method.running_total("bytes_up", "bytes_down").means
    costs = [spent[number] / MEGABYTE for number in method.rounds_to(target) if number in spent]
    return figures.amount(Spread.of(costs)) if costs else figures.TableCell("not reached")


# -- clients ----------------------------------------------------------------------------------------------


def clients(comparison: Comparison) -> Section:
    """How the final model's accuracy differs between the clients, on their training and their test data."""
    train, test = (_client_figures(comparison, kind) for kind in ("training", "test"))
    measured = [
        kind
        for kind in CLIENT_NUMBERS
        if kind in {"training", "test"}
        or any(any(method.client_accuracies[kind]) for method in comparison.methods)
    ]
    columns = {
        f"{kind}: {quantity} %": _client_column(kind, index)
        for kind in measured
        for index, quantity in enumerate(("mean", "deviation", "by chance"))
    }
    note = "Deviation: between clients. By chance: what equally good clients of these sizes would show."
    title = "Accuracy over the clients"
    table = figures.method_table("client-spread", title, comparison.methods, columns, note)
    tested = any(figure.traces for figure in test)
    intro = "The final model on every client's own data, all seeds together."
    return Section("clients", "Clients", [*([table] if tested else []), *train, *test], intro)


def _client_column(kind: str, index: int) -> Column:
    """The mean over clients, the deviation between them, or the deviation that chance would give."""
    return lambda method: figures.cell(method.client_spreads[kind][index], 1, 100)


def _client_figures(comparison: Comparison, kind: str) -> list[figures.Figure]:
    boxes, shares = [], []
    for method in comparison.methods:
        accuracies = [100 * accuracy for run in method.client_accuracies[kind] for accuracy, _ in run]
        if accuracies:
            boxes.append(figures.box(method, accuracies))
            levels = np.linspace(0, 1, min(len(accuracies), 200) + 1)
            curve = np.quantile(accuracies, levels, method="inverted_cdf")
            shares.append(figures.line(method, curve.tolist(), (100 * levels).tolist(), line={"shape": "hv"}))
    name, x = "clients-test" if kind == "test" else "clients", "accuracy (%)"
    note = "Box: the middle half of the clients, the median. Whiskers: 5 and 95 %. Dashed: the mean."
    share_title = f"Clients at or below an accuracy on their {kind} data"
    layout, columns = figures.axes(x, "share of clients (%)"), ("method", x, "clients at or below (%)")
    return [
        figures.box_chart(f"{name}-box", f"Accuracy on each client's own {kind} data", boxes, x, note),
        figures.Figure(f"{name}-share", share_title, shares, layout, columns=columns),
    ]


# -- diagnostics ------------------------------------------------------------------------------------------


def diagnosed(comparison: Comparison) -> tuple[list[Section], list[str]]:
    """What was measured, and notes about results that could not be understood."""
    measured: dict[str, list[figures.MethodResults]] = {}
    for name, method in itertools.product(sorted(DIAGNOSTICS), comparison.methods):
        if results := method.measured(name):
            measured.setdefault(name, []).append(figures.MethodResults(method.number, method.label, results))
    contents: dict[str, list[figures.Figure | figures.Table]] = {name: [] for name in DIAGNOSED}
    notes = []
    for name in measured:
        try:
            contents.setdefault(DIAGNOSTICS[name].section, []).extend(DIAGNOSTICS[name].show(measured))
        except MISUNDERSTANDINGS as error:
            # Results that can be shown alone may still not fit together.
            notes.append(f"diagnostics/{name}.json: not comparable ({shown(error)}), left out")
    headings = {name: DIAGNOSED.get(name, (name.capitalize(), "")) for name in contents}
    return [Section(name, title, contents[name], intro) for name, (title, intro) in headings.items()], notes


# -- split ------------------------------------------------------------------------------------------------


def split_of(run: RunRecord) -> tuple[Indices, int]:
    """Samples of each class at each client, and how many test samples there are; from config and data."""
    if not {"data", "task"} & run.config.keys():
        raise FlatfedError("the run was made from Python, its data are not in its config")
    federation = Config.checked(run.config).make_task().federation
    if not isinstance(federation, PooledFederation):
        raise FlatfedError("the clients' data are not all in memory")
    rows = [federation.rows(client).numpy() for client in range(len(federation))]
    targets = federation.targets.numpy() if isinstance(federation.targets, Tensor) else np.empty(0)
    if targets.ndim != 1 or not np.issubdtype(targets.dtype, np.integer):
        raise FlatfedError("the targets are not classes")
    counts = class_counts(rows, targets, federation.classes or int(targets.max()) + 1)
    return counts, len(first_leaf(federation.test[0])) if federation.test else 0


def split(counts: Indices, seed: Any) -> Section:
    """Which client holds how many samples of which class."""
    values, clients, classes = binned(counts, 250, 100)
    heatmap = figures.heights(
        "heatmap",
        clients.tolist(),
        classes.tolist(),
        np.sqrt(values).T.tolist(),
        name="samples",
        text=[figures.rounded(row) for row in values.T.tolist()],
        hovertemplate="client %{x}, class %{y}: %{text}<extra></extra>",
        xgap=1 if len(clients) <= 120 else 0,
        ygap=1,
        showscale=False,
    )
    sizes = counts.sum(axis=1)
    held = np.count_nonzero(counts, axis=1)
    binning = "" if len(clients) == len(counts) else " Columns are means over neighbouring clients."
    note = (
        f"{len(counts):,} clients hold {int(sizes.min()):,} to {int(sizes.max()):,} samples (median "
        f"{np.median(sizes):g}) of {int(held.min())} to {int(held.max())} classes. Shades follow the square "
        f"root of the count.{binning} The split under seed {seed}; other seeds divide the data anew."
    )
    title, columns = "Samples by class and client", ("client", "class", "samples")
    figure = figures.Figure("split", title, [heatmap], figures.axes("client", "class"), note, columns)
    return Section("split", "Split", [figure])


# -- configs ----------------------------------------------------------------------------------------------


def configs(comparison: Comparison) -> tuple[list[tuple[str, str]], figures.Table | None]:
    """The settings that all methods share, and a table of those in which they differ."""
    flat = [flattened(method.config) for method in comparison.methods]
    differing = [key for key in differing_keys(flat) if key != "training.seed"]
    shared = [(key, text) for key, text in flat[0].items() if key not in {*differing, "training.seed"}]
    if all(algorithm_name(method.config) == method.label for method in comparison.methods):
        differing = [key for key in differing if key != "algorithm.name"]
    if not differing:
        return shared, None
    columns = {key: lambda method, key=key: figures.cell(flat[method.number].get(key)) for key in differing}
    return shared, figures.method_table("differences", "What differs", comparison.methods, columns)


def headline(comparison: Comparison) -> str:
    """The setting in one line."""
    config = comparison.methods[0].config
    data, partition, model = (config.get(key) for key in ("data", "partition", "model"))
    task = config.get("task")
    if isinstance(task, Mapping):
        return f"{Path(str(task.get('file'))).name}:{task.get('make')}"
    if not isinstance(data, Mapping):
        return "a model and data given in Python"
    parts = [f"{data.get('dataset')} over {data.get('clients')} clients"]
    for described in (partition, model):
        if isinstance(described, Mapping):
            options = flattened({key: value for key, value in described.items() if key != "name"})
            listed = ", ".join(f"{key} {value}" for key, value in options.items())
            parts.append(f"{described.get('name')} ({listed})" if listed else str(described.get("name")))
    return " · ".join(parts)
