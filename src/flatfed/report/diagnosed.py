"""Pictures of what `flatfed diagnose` measured: flatness, stability, drift, generalisation, theory.

Each function makes the figures and tables of one diagnostic for all methods that have it. Numbers are means
over the seeds that were measured; pictures of one landscape are those of the first of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatfed.report.content import (
    Cell,
    Figure,
    Section,
    Table,
    Trace,
    axes,
    cell,
    line,
    log_axis,
    rounded,
    significant,
)
from flatfed.report.group import Comparison, Method, spread
from flatfed.report.read import number
from flatfed.report.training import quantile_box
from flatfed.runs.compare import Spread

Result = Mapping[str, Any]
Content = list[Figure | Table]


def _measured(comparison: Comparison, name: str) -> list[tuple[int, Method, list[Result]]]:
    """The methods that a diagnostic was taken of: their numbers, and the results of their runs."""
    everything = (
        (place, method, [result for _, result in method.measured(name)])
        for place, method in enumerate(comparison.methods)
    )
    return [each for each in everything if each[2]]


def _spread(results: Sequence[Result], value: Callable[[Result], Any]) -> Spread | None:
    found = (number(value(result)) for result in results)
    return spread([[each] for each in found if each is not None])


def _mean_line(place: int, method: Method, results: Sequence[Result], x: str, y: str, **more: Any) -> Trace:
    """The mean over the runs that were measured at the same places as the first."""
    same = [result for result in results if result[x] == results[0][x]]
    columns = [
        [each for value in values if (each := number(value)) is not None]
        for values in zip(*(result[y] for result in same), strict=True)
    ]
    spreads = [Spread.of(values) if values else None for values in columns]
    deviation = [None if each is None else each.deviation for each in spreads] if len(same) > 1 else None
    mean = [None if each is None else each.mean for each in spreads]
    return line(place, method.label, results[0][x], mean, deviation, **more)


def _lines(
    comparison: Comparison, name: str, x: str, y: str, title: str, labels: tuple[str, str], note: str = ""
) -> Figure | None:
    traces = [_mean_line(*each, x, y) for each in _measured(comparison, name)]
    return Figure(name, title, traces, axes(*labels), note, ("method", *labels)) if traces else None


# -- flatness ---------------------------------------------------------------------------------------------


def hessian(comparison: Comparison) -> Content:
    found = _measured(comparison, "hessian")
    if not found:
        return []
    rows, tops, densities, boxes = [], [], [], []
    for place, method, results in found:
        first = results[0]["global"]
        largest = _spread(results, lambda each: each["global"]["eigenvalues"][0])
        trace = _spread(results, lambda each: each["global"]["trace"])
        error = _spread(results, lambda each: each["global"]["trace_error"])
        local = [
            value
            for each in results
            for client in each.get("clients") or []
            if (value := number(client["eigenvalues"][0])) is not None
        ]
        if local:
            boxes.append(quantile_box(place, method.label, local))
        mean = Spread.of(local).mean if local else None
        rows.append([cell(method.label), *map(significant, (largest, trace, error, mean))])
        values = first["eigenvalues"]
        tops.append(line(place, method.label, range(1, len(values) + 1), values, mode="lines+markers"))
        density = first.get("density")
        if density:
            densities.append(line(place, method.label, density["values"], map(number, density["density"])))
    content: Content = [
        Table(
            "hessian",
            "Curvature of the training loss",
            [
                "method",
                "largest eigenvalue",
                "trace",
                "standard error of the trace",
                "clients' largest, mean",
            ],
            rows,
            "Smaller is flatter.",
        ),
        Figure(
            "eigenvalues",
            "Largest eigenvalues of the Hessian",
            tops,
            axes("rank", "eigenvalue"),
            columns=("method", "rank", "eigenvalue"),
        ),
    ]
    if densities:
        content.append(
            Figure(
                "density",
                "Spectral density of the Hessian",
                densities,
                log_axis(axes("eigenvalue", "density"), densities, decades=6),
                columns=("method", "eigenvalue", "density"),
            )
        )
    if boxes:
        content.append(
            Figure(
                "client-eigenvalues",
                "Largest eigenvalue on each client's data",
                boxes,
                axes("eigenvalue", ""),
                columns=("method", "5 %", "25 %", "50 %", "75 %", "95 %", "mean"),
            )
        )
    return content


def sharpness(comparison: Comparison) -> Content:
    rows = []
    for _, method, results in _measured(comparison, "sharpness"):
        local = [
            value
            for each in results
            for client in each.get("clients") or []
            if (value := number(client["sharpness"])) is not None
        ]
        rows.append(
            [
                cell(method.label),
                significant(_spread(results, lambda each: each["radius"])),
                significant(_spread(results, lambda each: each["global"])),
                significant(statistics.fmean(local) if local else None),
                significant(max(local, default=None)),
            ]
        )
    columns = ["method", "radius", "global loss", "clients' losses, mean", "clients' losses, largest"]
    note = "By how much the loss rises after one step as long as the radius along its gradient."
    if len({row[1].text for row in rows}) > 1:
        note += " The radii differ, so compare with care; flatfed diagnose RUN sharpness --set radius=0.1."
    return [Table("sharpness", "Sharpness", columns, rows, note)] if rows else []


def surface(comparison: Comparison) -> Content:
    """For each method the training loss in 3-D and the test loss as a map, and cuts through all of them.

    All of a kind are on one scale. The test losses are no surfaces because a browser has only so many
    3-D pictures at a time.
    """
    found = [(place, method, results[0]) for place, method, results in _measured(comparison, "surface")]
    heights = {
        kind: [height for _, _, each in found for height in _finite(each.get(kind) or [])]
        for kind in ("train", "test")
    }
    figures: Content = []
    for place, method, each in found:
        for kind, draw in (("train", _surface), ("test", _map)):
            # A surface along one direction is only in the cut.
            if len(each["b"]) > 1 and _finite(each.get(kind) or []):
                figures.append(draw(place, method, each, *_lower(heights[kind])))
    for kind, name in (("train", "training loss"), ("test", "test loss")):
        cut = []
        for place, method, each in found:
            middle = min(range(len(each["b"])), key=lambda index: abs(each["b"][index]))
            values = [number(row[middle]) for row in each.get(kind) or []]
            if any(value is not None for value in values):
                cut.append(line(place, method.label, each["a"], values))
        if cut:
            figures.append(
                Figure(
                    f"surface-cut-{kind}",
                    f"{name.capitalize()} along the first direction",
                    cut,
                    log_axis(axes("a", ""), cut),
                    "The model moved by a times a random direction, the same for all methods under one seed.",
                    ("method", "a", name),
                )
            )
    return figures


def _finite(grid: Iterable[Iterable[Any]]) -> list[float]:
    return [value for row in grid for value in map(number, row) if value is not None]


def _lower(heights: Sequence[float]) -> tuple[float, float]:
    """A few corners may be far up; they are cut off so that the bottoms can be compared."""
    return min(heights), statistics.quantiles(heights, n=20)[-1] if len(heights) > 1 else max(heights)


def _surface(place: int, method: Method, result: Result, low: float, high: float) -> Figure:
    trace = {
        "type": "surface",
        "name": method.label,
        **_grid(result["b"], result["a"], result["train"]),
        "cmin": low,
        "cmax": high,
        "showscale": False,
        "hovertemplate": "a %{y:.3g}, b %{x:.3g}<br>loss %{z:.4g}<extra></extra>",
        "meta": {"ramp": True},
    }
    scene = {
        "xaxis": {"title": {"text": "b"}},
        "yaxis": {"title": {"text": "a"}},
        "zaxis": {"range": [low, high]},
    }
    title, columns = f"{method.label}: training loss", ("b", "a", "training loss")
    return Figure(f"surface-{place}", title, [trace], {"scene": scene}, "", columns, place)


def _map(place: int, method: Method, result: Result, low: float, high: float) -> Figure:
    trace = {
        "type": "contour",
        "name": method.label,
        **_grid(result["b"], result["a"], result["test"]),
        "contours": {"coloring": "fill", "start": low, "end": high, "size": (high - low) / 15 or 1.0},
        "autocontour": False,
        "colorbar": {"thickness": 8, "outlinewidth": 0},
        "hovertemplate": "a %{y:.3g}, b %{x:.3g}<br>loss %{z:.4g}<extra></extra>",
        "meta": {"ramp": True},
    }
    title, columns = f"{method.label}: test loss", ("b", "a", "test loss")
    return Figure(f"surface-test-{place}", title, [trace], axes("b", "a"), "", columns, place)


def _grid(x: Sequence[float], y: Sequence[float], z: Iterable[Iterable[Any]]) -> dict[str, Any]:
    return {"x": rounded(x), "y": rounded(y), "z": [rounded(map(number, row)) for row in z]}


def path(comparison: Comparison) -> Content:
    """Straight lines from one run's model to another's."""
    figures: Content = []
    for key, title in (
        ("train_loss", "Training loss on the way to another model"),
        ("test_accuracy", "Test accuracy on the way to another model"),
    ):
        traces = [
            line(
                place,
                f"{method.label} → {Path(each['other']).name}",
                each["position"],
                [_percent(key, v) for v in each[key]],
            )
            for place, method, results in _measured(comparison, "line")
            for each in results[:1]
            if each.get(key)
        ]
        if traces:
            unit = key.replace("_", " ") + (" (%)" if key == "test_accuracy" else "")
            layout = axes("position: 0 this model, 1 the other", "")
            figures.append(Figure(f"line-{key}", title, traces, layout, columns=("models", "position", unit)))
    return figures


def _percent(key: str, value: Any) -> float | None:
    found = number(value)
    return 100 * found if found is not None and key.endswith("accuracy") else found


def plane(comparison: Comparison) -> Content:
    """The loss in the plane through the global and two clients' models."""
    figures: Content = []
    for place, method, results in _measured(comparison, "plane"):
        each = results[0]
        if not _finite(each["loss"]):
            continue
        contour = {
            "type": "contour",
            "name": "loss",
            **_grid(each["x"], each["y"], each["loss"]),
            "contours": {"coloring": "fill"},
            "ncontours": 16,
            "colorbar": {"thickness": 8, "outlinewidth": 0},
            "hovertemplate": "%{x:.3g}, %{y:.3g}<br>loss %{z:.4g}<extra></extra>",
            "meta": {"ramp": True},
        }
        points = {
            "type": "scatter",
            "mode": "markers+text",
            "name": "models",
            "x": [point["x"] for point in each["points"]],
            "y": [point["y"] for point in each["points"]],
            # Clients may lie on top of each other, so only the global model is named in the picture.
            "text": [point["label"] if point["label"] == "global" else "" for point in each["points"]],
            "hovertext": [point["label"] for point in each["points"]],
            "hoverinfo": "text",
            "customdata": rounded(number(point.get("loss")) for point in each["points"]),
            "textposition": "top center",
            "cliponaxis": False,
            "meta": {"points": True},
        }
        layout = axes("", "")
        figures.append(
            Figure(
                f"plane-{place}",
                f"{method.label}: loss between models",
                [contour, points],
                layout,
                columns=("series", "x", "y", "loss"),
                method=place,
            )
        )
    return figures


# -- stability and drift ----------------------------------------------------------------------------------


def drift(comparison: Comparison) -> Content:
    found = _measured(comparison, "drift")
    rows = [
        [
            cell(method.label),
            significant(_spread(results, lambda each: each["flatness_distance"])),
            significant(_spread(results, lambda each: each["client_drift"])),
        ]
        for _, method, results in found
    ]
    if not rows:
        return []
    labels = ("local step", "drift")
    figure = _lines(comparison, "drift", "steps", "drift_by_step", "Client drift during a round", labels)
    columns = ["method", "flatness distance", "client drift"]
    return [Table("drift", "Drift", columns, rows), *([figure] if figure else [])]


def local_stability(comparison: Comparison) -> Content:
    labels = ("local step", "distance of the models")
    note = "The largest distance between two clients' models, all trained from the same global model."
    figure = _lines(comparison, "local_stability", "steps", "discrepancy", "Local stability", labels, note)
    return [figure] if figure else []


def global_stability(comparison: Comparison) -> Content:
    labels = ("rounds", "distance of the models")
    note = (
        "Two trainings that differ in one client, who has another's data in one of them; the largest "
        "distance over the replacements tried."
    )
    figure = _lines(comparison, "global_stability", "rounds", "discrepancy", "Global stability", labels, note)
    if figure is None:
        return []
    bounds = [
        line(
            place, f"{method.label}: bound", each["rounds"], map(number, each["bound"]), line={"dash": "dot"}
        )
        for place, method, results in _measured(comparison, "global_stability")
        for each in results[:1]
        if each.get("bound")
    ]
    traces = [*figure.traces, *bounds]
    # A bound may be far above what happens.
    layout = log_axis(figure.layout, traces) if bounds else figure.layout
    note += " Dotted: the bound." if bounds else ""
    return [Figure(figure.name, figure.title, traces, layout, note, figure.columns)]


def perturbation(comparison: Comparison) -> Content:
    """How well each rule's perturbation agrees with the one on all data."""
    figures: Content = []
    for place, method, results in _measured(comparison, "perturbation"):
        each = results[0]
        # Clients have no order that a line could follow.
        traces = [
            line(None, rule, each["clients"], map(number, values), mode="markers", meta={"series": index})
            for index, (rule, values) in enumerate(each["cosine"].items())
        ]
        if not traces:
            continue
        figures.append(
            Figure(
                f"perturbation-{place}",
                f"Perturbations under {method.label}",
                traces,
                axes("client", "", showlegend=True),
                "The cosine between a client's estimate and the gradient of the whole loss.",
                ("rule", "client", "cosine"),
                place,
            )
        )
    return figures


# -- generalisation and theory ----------------------------------------------------------------------------


def generalization(comparison: Comparison) -> Content:
    rows: list[list[Cell]] = []
    for _, method, results in _measured(comparison, "generalization"):
        row = [cell(method.label)]
        for part in ("train", "test", "unseen_clients", "gap"):
            known = [each[part] for each in results if each.get(part)]
            row.append(significant(_spread(known, lambda each: each["loss"])))
            row.append(cell(_spread(known, lambda each: each.get("accuracy")), 2, 100))
        gaps = [each["gap"] for each in results if each.get("gap")]
        row.append(significant(_spread(gaps, lambda each: each.get("unseen_loss"))))
        row.append(cell(_spread(gaps, lambda each: each.get("unseen_accuracy")), 2, 100))
        rows.append(row)
    columns = ["method"]
    for part in ("training", "test", "unseen clients", "gap to test", "gap to unseen clients"):
        columns += [f"{part}: loss", f"{part}: accuracy %"]
    return [Table("generalization", "Generalisation", columns, rows)] if rows else []


def fairness(comparison: Comparison) -> Content:
    rows = [
        [
            cell(method.label),
            cell(_spread(results, lambda each: each["mean"]), 2, 100),
            cell(_spread(results, lambda each: each["deviation"]), 2, 100),
            cell(_spread(results, lambda each: each["binomial_floor"]), 2, 100),
        ]
        for _, method, results in _measured(comparison, "clients")
    ]
    columns = ["method", "mean accuracy %", "deviation between clients %", "by chance alone %"]
    note = "By chance alone: the deviation that equally good clients of these sizes would show."
    return [Table("fairness", "Differences between clients", columns, rows, note)] if rows else []


def theory(comparison: Comparison) -> Content:
    """Bounds as dotted lines, what was measured as full ones, and the constants they come from.

    What there is to measure beside a bound is the discrepancy of global_stability.
    """
    content: Content = []
    found = _measured(comparison, "theory")
    names = list(dict.fromkeys(name for _, _, results in found for name in results[0]["constants"]))
    if names:
        rows = [
            [cell(method.label), *(significant(number(results[0]["constants"].get(name))) for name in names)]
            for _, method, results in found
        ]
        content.append(Table("constants", "Measured constants", ["method", *names], rows))
    bounds = list(dict.fromkeys(name for _, _, results in found for name in results[0]["bounds"]))
    for index, name in enumerate(bounds):
        traces = []
        for place, method, results in found:
            bound = results[0]["bounds"].get(name)
            if bound:
                y = map(number, bound["y"])
                traces.append(line(place, f"{method.label}: bound", bound["x"], y, line={"dash": "dot"}))
        note = "Dotted: the bound."
        measured = _measured(comparison, "global_stability") if name == "stability" else []
        if measured:
            traces += [_mean_line(*each, "rounds", "discrepancy") for each in measured]
            note += " Full: measured, with one client replaced."
        title = name.replace("_", " ").capitalize()
        layout = log_axis(axes("rounds", ""), traces)
        content.append(Figure(f"theory-{index}", title, traces, layout, note, ("method", "rounds", name)))
    return content


Builder = Callable[[Comparison], Content]
SECTIONS: dict[tuple[str, str, str], dict[str, Builder]] = {
    ("flatness", "Flatness", ""): {"hessian": hessian, "sharpness": sharpness},
    (
        "surfaces",
        "Loss surfaces",
        "The loss around each final model along two random directions. Turning one surface turns all.",
    ): {"surface": surface},
    ("planes", "Between models", ""): {"line": path, "plane": plane},
    ("stability", "Stability and drift", ""): {
        "drift": drift,
        "local_stability": local_stability,
        "global_stability": global_stability,
        "perturbation": perturbation,
    },
    ("generalisation", "Generalisation", ""): {
        "generalization": generalization,
        "clients": fairness,
        "theory": theory,
    },
}


def sections(comparison: Comparison) -> tuple[list[Section], list[str]]:
    """What was measured, and notes about results that could not be understood."""
    found, notes = [], []
    for (name, title, note), builders in SECTIONS.items():
        content: Content = []
        for diagnostic, builder in builders.items():
            try:
                content += builder(comparison)
            except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                # Files of another version or a damaged one must not cost the rest of the report.
                notes.append(f"diagnostics/{diagnostic}.json: not as expected ({error!r}), left out")
        found.append(Section(name, title, content, note))
    return found, notes
