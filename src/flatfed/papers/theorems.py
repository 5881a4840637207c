"""The papers' tables of bounds: what they print, at constants of the table's own, and what the rules give."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flatfed.algorithms import build
from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import check_choice
from flatfed.core.settings import Training
from flatfed.diagnostics import figures
from flatfed.papers.schema import BoundsTable, bounds, papers
from flatfed.theory import Setting, Statement, fedsagd, fedswa
from flatfed.theory.selection import averaging_row
from flatfed.theory.stability import local_bound, stability_bound

SIZES = ("N", "S", "K", "T")


def bounds_tables(name: str, methods: Sequence[str] = ()) -> list[figures.Table]:
    """A table of bounds, such as fedsagd/table1, or some of its rows."""
    table, paper = bounds()[name], papers()[name.partition("/")[0]]
    for method in methods:
        check_choice("methods", method, table.rows)
    chosen = [row for row in table.rows if not methods or row in methods]
    algorithms = {row: build(paper.methods[row]["algorithm"]) for row in chosen}
    return [_KINDS[table.kind](table, algorithms)]


def _stability(table: BoundsTable, algorithms: Mapping[str, Algorithm]) -> figures.Table:
    """Distances of two trainings, as printed and by the rules, over all rounds and within one."""
    at = table.constants
    steps, rounds = int(at["K"]), int(at["T"])
    theta, sufficient = fedsagd.gradient_bound(at["noise"], at["spread"], at["Z"])
    rows, remarks = [], []
    for name, algorithm in algorithms.items():
        printed = fedsagd.table_row(algorithm, theta, at["eta"], steps, rounds)
        training = Training(rounds=rounds, local_steps=steps, lr=at["eta"])
        worst = stability_bound(algorithm, training, steps, theta, rounds)
        local = local_bound(algorithm, training, steps, theta)
        down, up = len(algorithm.broadcast), len(algorithm.uploads)
        rows.append(
            [
                figures.cell(name),
                figures.cell(None if printed is None else printed.formula),
                figures.significant(None if printed is None else printed.value),
                figures.cell(None if printed is None else printed.label),
                figures.significant(None if worst is None else worst[-1]),
                figures.significant(None if printed is None else printed.local),
                figures.significant(None if local is None else local[-1]),
                *(figures.cell(text) for text in table.rows[name]),
                figures.cell(f"{down} down, {up} up"),
            ]
        )
        if printed is not None and printed.remark:
            remarks.append(f"{name}: {printed.remark}.")
        if printed is not None and (theorem := printed.terms.get("Theorem C.12")) is not None:
            remarks.append(
                f"{name}: Theorem C.12 gives {theorem:.4g}, Theorem 3.7 {at['Z'] * printed.value:.4g}."
            )
    note = f"At {_constants(table)}: Θ = {theta:.4g} as printed, and {sufficient:.4g} suffices."
    columns = [
        "method",
        "as printed",
        "value",
        "label",
        "from its rule",
        "in a round\nas printed",
        "in a round\nfrom its rule",
    ]
    columns += [*table.columns, "vectors"]
    return figures.Table("bounds", table.title, columns, rows, "\n".join([note, *table.notes, *remarks]))


def _generalisation(table: BoundsTable, algorithms: Mapping[str, Algorithm]) -> figures.Table:
    """Generalisation and optimisation orders, as printed and corrected."""
    at: dict[str, Any] = {
        name: int(value) if name in SIZES else value for name, value in table.constants.items()
    }
    losses = fedswa.Losses(Z=at.pop("Z"), n=at.pop("n"))
    s = Setting(**at)
    rows, remarks = [], dict[str, list[str]]()
    for name, algorithm in algorithms.items():
        row = averaging_row(algorithm, s, losses)
        assert row is not None, name
        cells = [figures.cell(name)]
        for statement, formula in zip(row, table.rows[name], strict=True):
            cells += [figures.cell(formula), figures.significant(statement.value)]
            cells += [figures.significant(statement.corrected), figures.cell(statement.label)]
            for text in _remarks(statement):
                remarks.setdefault(f"{statement.name.partition(', ')[2]}: {text}", []).append(name)
        rows.append(cells)
    columns = ["method"]
    for kind in ("generalisation", "optimisation"):
        columns += [kind, "as printed", "corrected", "label"]
    notes = [f"At {_constants(table)}.", *table.notes]
    notes += [f"{', '.join(names)}; {remark}." for remark, names in remarks.items()]
    return figures.Table("bounds", table.title, columns, rows, "\n".join(notes))


def _constants(table: BoundsTable) -> str:
    return ", ".join(f"{symbol} = {value:g}" for symbol, value in table.constants.items())


def _remarks(statement: Statement) -> list[str]:
    failed = [f"not met: {condition.text}" for condition in statement.conditions if not condition.holds]
    return [*([statement.remark] if statement.remark else []), *failed]


_KINDS: Mapping[str, Callable[[BoundsTable, Mapping[str, Algorithm]], figures.Table]] = {
    "stability": _stability,
    "generalisation": _generalisation,
}
