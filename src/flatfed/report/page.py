"""The page itself: everything in one file that opens without a network.

plotly.js goes in compressed, and the browser unpacks it once the text is on the screen; figures are drawn
when they are scrolled to. All text passes through the template's escaping.
"""

from __future__ import annotations

import base64
import json
import shlex
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from flatfed.core.errors import FlatfedError
from flatfed.report import diagnosed, training
from flatfed.report.content import Figure, Section, Table
from flatfed.report.group import Comparison, Method, comparisons, last_value
from flatfed.report.read import Record, find_runs, read_run
from flatfed.report.toml import toml
from flatfed.runs.folder import write_atomically

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Part:
    """A comparison as the page shows it."""

    number: int
    headline: str
    comparison: Comparison
    sections: Sequence[Section]
    shared: Sequence[tuple[str, str]]
    differences: Table | None
    notes: Sequence[str]


def write_report(
    paths: Sequence[Path],
    output: Path,
    *,
    targets: Sequence[float] = (),
    labels: Mapping[Path, str] | None = None,
    title: str = "",
    tables: Sequence[Table] = (),
    watch: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Writes the report on run folders, or folders of them, and returns what it had to leave out.

    `targets` are accuracies to count rounds to, besides the usual ones; `labels` are names for runs;
    `tables` come before the runs' own; `watch` is told what is being done.
    """
    watch("reading runs")
    records = [read_run(folder) for folder in find_runs(paths)]
    if output.suffix.lower() not in {".html", ".htm"}:
        raise FlatfedError(f"output = {output}: a report is an .html file; give it such a name")
    if not any(record.history for record in records):
        first = records[0]
        advice = (
            "it diverged in the first one, lower lr"
            if first.state == "diverged"
            else "wait for the first one"
        )
        raise FlatfedError(f"{first.folder}: no round is finished yet; {advice}")
    parts = []
    for number, comparison in enumerate(comparisons(records, labels or {})):
        parts.append(_part(number, comparison, targets, watch))
    watch("writing the page")
    figures = {
        f"{part.number}-{figure.name}": _figure(figure, part)
        for part in parts
        for section in part.sections
        for figure in section.content
        if isinstance(figure, Figure)
    }
    page = (
        _environment()
        .get_template("page.html")
        .render(
            title=title or _title(parts),
            parts=parts,
            tables=tables,
            figures=json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
            plotly=_plotly(),
            style=(HERE / "page.css").read_text(encoding="utf-8"),
            script=(HERE / "page.js").read_text(encoding="utf-8"),
        )
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page.encode())
    return [note for part in parts for note in part.notes]


def _part(
    number: int, comparison: Comparison, targets: Sequence[float], watch: Callable[[str], None]
) -> Part:
    notes = [note for record in comparison.records for note in (*_state(record), *record.notes)]
    for method in comparison.methods:
        if method.seeds < len(method.runs):
            notes.append(f"{method.label}: several runs have the same seed, of which one is counted")
    first = comparison.methods[0].runs[0]
    split, test_samples = Section("split", "Split"), None
    watch("dividing the data")
    try:
        counts, test_samples = training.split_of(first)
        split = training.split(counts, first.seed)
    except FlatfedError as error:
        notes.append(f"the split is not shown: {error}")
    usual = training.usual_targets(comparison)
    measured, problems = diagnosed.sections(comparison)
    sections = [
        training.summary(comparison, (list(targets) or usual)[-1:], test_samples),
        training.curves(comparison),
        training.to_targets(comparison, sorted({*targets, *usual})),
        training.clients(comparison),
        *measured,
        training.other_curves(comparison),
        split,
    ]
    shared, differences = training.configs(comparison)
    return Part(
        number=number,
        headline=training.headline(comparison),
        comparison=comparison,
        sections=[section for section in sections if section.content],
        shared=shared,
        differences=differences,
        notes=notes + problems,
    )


def _state(record: Record) -> list[str]:
    notes = []
    if record.state != "complete":
        how = "still running" if record.state == "running" else record.state
        notes.append(f"{record.folder}: {how}, {len(record.history)} of {record.rounds} rounds")
    lost = [
        key
        for key in dict.fromkeys(key for line in record.history for key in line if key.startswith("test_"))
        if last_value(record, key) is None
    ]
    if lost:
        notes.append(f"{record.folder}: at the last round {', '.join(lost)} is not a finite number")
    return notes


def _title(parts: Sequence[Part]) -> str:
    names = [method.label for part in parts for method in part.comparison.methods]
    return names[0] if len(names) == 1 else f"{len(names)} methods compared"


def _figure(figure: Figure, part: Part) -> dict[str, Any]:
    return {
        "name": figure.name,
        "part": part.number,
        "data": figure.traces,
        "layout": figure.layout,
        "columns": figure.columns,
    }


@lru_cache(maxsize=1)
def _plotly() -> str:
    return base64.b64encode(zlib.compress(get_plotlyjs().encode(), 9)).decode()


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.tests["figure"] = lambda content: isinstance(content, Figure)
    environment.filters["command"] = command
    environment.filters["toml"] = toml
    environment.filters["details"] = _details
    return environment


def command(record: Record) -> str:
    """The command that made a run, as one would type it."""
    words = record.environment.get("command")
    if not isinstance(words, list) or len(words) < 2:
        return ""
    program = Path(str(words[0])).name
    # `python -m flatfed` has the path of a file here.
    name = "flatfed" if program in {"flatfed", "flatfed.exe", "__main__.py"} else f"python {program}"
    return f"{name} {shlex.join(map(str, words[1:]))}"


def _details(method: Method) -> list[tuple[str, str]]:
    """How and with what a method was run; where its runs differ, each way once."""
    found: dict[str, list[str]] = {}
    for run in method.runs:
        versions = run.environment.get("versions")
        engine = run.environment.get("engine")
        listed = versions if isinstance(versions, Mapping) else {}
        facts = {
            "command": command(run),
            "commit": str(run.environment.get("commit") or ""),
            "versions": ", ".join(f"{name} {version}" for name, version in listed.items()),
            "machine": str(run.environment.get("platform") or ""),
            "engine": f"{engine.get('path')} path: {engine.get('reason')}"
            if isinstance(engine, Mapping)
            else "",
        }
        for name, value in facts.items():
            if value and value not in found.setdefault(name, []):
                found[name].append(value)
    return [(name, value) for name, values in found.items() for value in values]
