"""What theory says about a run: constants, bounds on stability, and the papers' theorems with their
conditions.

The bounds and theorems are those of `flatfed.theory`. They are about the worst case, and the constants are
estimated (`constants`), lower than the true ones: what is drawn with them is a yardstick, no guarantee.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flatfed.core.types import Count
from flatfed.diagnostics import figures
from flatfed.diagnostics.constants import HOW, estimated_constants, examined_sizes, most_steps
from flatfed.diagnostics.drift import drift
from flatfed.diagnostics.perturbation import perturbation
from flatfed.diagnostics.perturbation_difference import perturbation_difference
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, part_of, silent
from flatfed.parts.synthetic import SyntheticMix
from flatfed.runs.statistics import finite
from flatfed.theory import Setting, Statement, fedsagd
from flatfed.theory.selection import Applied, Constants, applicable
from flatfed.theory.stability import stability_bound

CURVE_POINTS = 50


def summary(result: figures.Result) -> str:
    constants = result["constants"]
    shown = ("gradient_bound", "smoothness", "gradient_deviation", "heterogeneity")
    words = [f"{name} {figures.brief(constants.get(name))}" for name in shown]
    statements = result.get("statements", [])
    holding = sum(statement["holds"] for statement in statements)
    return ", ".join(words) + f"; {holding} of {len(statements)} theorems have all conditions met"


def tables(result: figures.Result) -> list[figures.Table]:
    """The constants and the statements of one run."""
    rows = [
        [figures.cell(name), figures.significant(finite(value)), figures.cell(HOW.get(name, ""))]
        for name, value in result["constants"].items()
    ]
    constants = figures.Table("theory-constants", "Constants", ["constant", "value", "how"], rows)
    statements = result.get("statements", [])
    return (
        [constants, _statements_table("theory-statements", "Theorems", statements)]
        if statements
        else [constants]
    )


def _statements_table(name: str, title: str, statements: Sequence[Mapping[str, Any]]) -> figures.Table:
    rows, remarks = [], []
    for statement in statements:
        failed = [condition["text"] for condition in statement["conditions"] if not condition["holds"]]
        verdict = f"not met: {'; '.join(failed)}" if failed else "met" if statement["conditions"] else "none"
        rows.append(
            [
                figures.cell(f"{statement['paper']}, {statement['name']}"),
                figures.significant(finite(statement["value"])),
                figures.significant(finite(statement["corrected"])),
                figures.significant(finite(statement["measured"])),
                figures.cell(statement["label"] + (", exceeded" if _exceeded(statement) else "")),
                figures.cell(verdict),
            ]
        )
        if statement["remark"]:
            remarks.append(f"{statement['paper']}, {statement['name']}: {statement['remark']}.")
    columns = ["theorem", "value", "corrected", "measured", "label", "conditions"]
    note = (
        "Bounds follow from their assumptions. As printed: a step of the proof fails. Orders hide constants."
    )
    return figures.Table(name, title, columns, rows, "\n".join([note, *dict.fromkeys(remarks)]))


def _exceeded(statement: Mapping[str, Any]) -> bool:
    """Whether the measurement is above what a theorem says, which may be because a condition is not met."""
    value, measured = finite(statement["value"]), finite(statement["measured"])
    if value is None or measured is None:
        return False
    return statement["label"] != "order" and measured > value


def show(measured: figures.Measurements) -> figures.Content:
    """The constants, the bounds beside the discrepancies that global_stability measured, and the theorems."""
    methods = measured["theory"]
    constants = dict.fromkeys(name for method in methods for name in method.first["constants"])
    columns = {
        name: lambda method, name=name: figures.significant(finite(method.first["constants"].get(name)))
        for name in constants
    }
    meanings = "\n".join(f"{name}: {HOW[name]}." for name in constants if name in HOW)
    content: list[figures.Figure | figures.Table] = [
        figures.method_table("constants", "Measured constants", methods, columns, meanings)
    ]
    names = dict.fromkeys(name for method in methods for name in method.first["bounds"])
    for index, name in enumerate(names):
        bounds = [(method, method.first["bounds"].get(name)) for method in methods]
        lines = [figures.bound_line(method, bound["x"], bound["y"]) for method, bound in bounds if bound]
        note = "Dotted: the bound."
        discrepancies = measured.get("global_stability", []) if name == "stability" else []
        if discrepancies:
            lines += [method.mean_line("rounds", "discrepancy") for method in discrepancies]
            note += " Full: measured, with one client replaced."
        labels = f"theory-{index}", name.replace("_", " ").capitalize()
        content.append(figures.chart(*labels, lines, "rounds", name, note, titled=False, decades=math.inf))
    for method in methods:
        if statements := method.first.get("statements"):
            name, title = f"theorems-{method.number}", f"Theorems about {method.label}"
            content.append(_statements_table(name, title, statements))
    return content


@diagnostic("generalisation", summary, show, tables=tables)
def theory(
    subject: Subject, *, clients: Count | None = 10, rounds: Count | None = None, tick: Tick = silent
) -> dict[str, Any]:
    """Estimated constants, the bounds that they give, and the papers' theorems about these parts.

    A theorem has a value, its conditions and whether they hold, and a label; beside some is what was
    measured. The discrepancy that belongs to the bound on stability is global_stability's.
    """
    constants = estimated_constants(subject, clients, tick=part_of(tick, 0, 0.7))
    settings, rounds = subject.training, rounds or subject.training.rounds
    steps = most_steps(subject)
    bounds: dict[str, Any] = {}
    longest = constants["gradient_bound"]
    stability = stability_bound(subject.algorithm, settings, steps, longest, rounds)
    if stability is not None:
        bounds["stability"] = {"x": list(range(1, rounds + 1)), "y": stability}
    x = sorted({max(1, rounds * part // CURVE_POINTS) for part in range(1, CURVE_POINTS + 1)})
    printed = [fedsagd.table_row(subject.algorithm, longest, settings.lr, steps, number) for number in x]
    values = [row.value for row in printed if row is not None]
    if values:
        bounds["stability as printed"] = {"x": x, "y": values}
    s = Setting(
        N=len(subject.federation),
        S=settings.cohort_size(len(subject.federation)),
        K=steps,
        T=rounds,
        eta=settings.lr,
    )
    applied = applicable(subject.algorithm, s, _known(subject, constants, clients))
    if printed[-1] is not None:
        row = printed[-1]
        statement = Statement(
            f"Table 1: {row.formula}", row.value, row.label, remark=row.remark, terms=row.terms
        )
        applied.append(Applied("fedsagd", statement))
    present = _measured(subject, {entry.measure for entry in applied}, clients, part_of(tick, 0.7, 1.0))
    # Theorems are about the mean or the least over the rounds; this is the present one.
    present["squared gradient"] = constants["gradient"] ** 2
    statements = [
        {"paper": entry.paper, **_plain(entry.statement), "measured": present.get(entry.measure)}
        for entry in applied
    ]
    tick(1.0)
    return {"constants": constants, "bounds": bounds, "statements": statements}


def _known(subject: Subject, constants: Mapping[str, float], clients: int | None) -> Constants:
    return Constants(
        smoothness=constants["smoothness"],
        batch_deviation=constants["gradient_deviation"],
        unit_deviation=constants["unit_deviation"],
        sample_deviation=constants["sample_deviation"],
        largest_sample_gradient=constants["sample_lipschitz"],
        largest_client_gradient=constants["lipschitz"],
        largest_spread=constants["largest_heterogeneity"],
        root_mean_square_spread=constants["heterogeneity"],
        mean_spread=constants["mean_heterogeneity"],
        gradient=constants["gradient"],
        first_loss=constants["first_loss"],
        samples=statistics.fmean(examined_sizes(subject)),
        misalignment=_misalignment(subject, clients),
    )


def _misalignment(subject: Subject, clients: int | None) -> float:
    """1 − cos θ of the worst examined client's ascent direction, where it is mixed with a synthetic one."""
    if not isinstance(subject.algorithm.gradient, SyntheticMix):
        return 2.0
    cosines = perturbation(subject, clients=clients)["cosine"].get("synthetic", [])
    return 1 - min((value for value in cosines if value is not None), default=-1.0)


def _measured(subject: Subject, wanted: set[str], clients: int | None, tick: Tick) -> dict[str, float]:
    """The measurements that belong to statements."""
    values: dict[str, float] = {}
    if wanted & {"drift", "distance", "flatness distance"}:
        moved = drift(subject, clients=clients, tick=tick)
        values |= {"drift": max(moved["drift_by_step"]), "distance": max(moved["distance_by_step"])}
        values["flatness distance"] = moved["flatness_distance"]
    if "perturbation difference" in wanted:
        differences = perturbation_difference(subject, clients=clients, tick=tick)
        values["perturbation difference"] = max(differences["from_first"])
    return values


def _plain(statement: Statement) -> dict[str, Any]:
    return {**asdict(statement), "holds": statement.holds}
