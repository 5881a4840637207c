"""The page itself: everything in one file that opens without a network.

plotly.js goes in compressed, and the browser unpacks it once the text is on the screen; figures are drawn
when they are scrolled to.
"""

import base64
import json
import shlex
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tomli_w
from plotly.offline import get_plotlyjs

from flatfed.core.errors import FlatfedError
from flatfed.diagnostics.figures import Figure, Table
from flatfed.report import sections
from flatfed.report.group import Comparison, Method, clipped, comparisons
from flatfed.report.read import RunRecord, find_runs, read_run
from flatfed.report.split import FOLDER, TEMPLATES
from flatfed.runs.files import check_replaceable, write_atomically
from flatfed.runs.statistics import last

FIRST = -1
"""What stands for a part where figures belong to none."""


@dataclass(frozen=True)
class PagePart:
    """A comparison as the page shows it."""

    number: int
    headline: str
    comparison: Comparison
    sections: Sequence[sections.Section]
    shared: Sequence[tuple[str, str]]
    differences: Table | None
    notes: list[str]


def write_report(
    paths: Sequence[Path],
    output: Path,
    *,
    targets: Sequence[float] = (),
    labels: Mapping[Path, str] | None = None,
    title: str = "",
    tables: Sequence[Table] = (),
    figures: Sequence[Figure] = (),
    watch: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """Writes the report on run folders, or folders of them, and returns notes on what is left out.

    `targets` are accuracies to count rounds to, besides the usual ones; `labels` are names for runs;
    `figures` and `tables` come before the runs' own; `watch` is called with what is being done.
    """
    if output.suffix.lower() not in {".html", ".htm"}:
        raise FlatfedError(f"output = {output}: a report is an .html file; give it such a name")
    check_replaceable(output)
    watch("reading runs")
    runs, damaged = [], []
    for folder in find_runs(paths):
        try:
            runs.append(read_run(folder))
        except FlatfedError as error:
            damaged.append(str(error))
    if not runs:
        raise FlatfedError(damaged[0])
    if not any(run.history for run in runs):
        diverged = runs[0].state == "diverged"
        advice = "it diverged in the first one, lower lr" if diverged else "wait for the first one"
        raise FlatfedError(f"{runs[0].folder}: no round is finished yet; {(*runs[0].notes, advice)[0]}")
    parts = [
        _part(number, comparison, targets, watch)
        for number, comparison in enumerate(comparisons(runs, labels or {}))
    ]
    parts[0].notes[:0] = [clipped(f"{error}; the run is left out") for error in damaged]
    watch("writing the page")
    own = [
        (part.number, item)
        for part in parts
        for section in part.sections
        for item in section.content
        if isinstance(item, Figure)
    ]
    drawn = {
        f"{number}-{item.name}": {
            "part": number,
            "data": item.traces,
            **{key: getattr(item, key) for key in ("name", "layout", "columns")},
        }
        for number, item in [*((FIRST, figure) for figure in figures), *own]
    }
    names = [method.label for part in parts for method in part.comparison.methods]
    page = TEMPLATES.get_template("page.html").render(
        title=title or (names[0] if len(names) == 1 else f"{len(names)} methods compared"),
        parts=parts,
        tables=tables,
        first=FIRST,
        first_figures=figures,
        details=_details,
        config_file=config_file,
        figures=json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        plotly=_plotly(),
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        script=(FOLDER / "page.js").read_text(encoding="utf-8"),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, page.encode(errors="replace"))
    return [note for part in parts for note in part.notes]


def _part(
    number: int, comparison: Comparison, targets: Sequence[float], watch: Callable[[str], None]
) -> PagePart:
    first = comparison.methods[0].runs[0]
    notes = [note for run in comparison.runs for note in (*_run_notes(run), *run.notes)]
    if len(comparison.history_keys) > sections.MOST_CURVES:
        many = f"{len(comparison.history_keys):,} quantities in the histories"
        notes.append(f"{first.folder}: {many}, of which the first {sections.MOST_CURVES} are shown")
    for method in comparison.methods:
        if method.seeds < len(method.runs):
            notes.append(f"{method.label}: several runs have the same seed, of which one is counted")
    split, test_samples = sections.Section("split", "Split"), None
    watch("dividing the data")
    try:
        counts, test_samples = sections.split_of(first)
        split = sections.split(counts, first.seed)
    except FlatfedError as error:
        notes.append(f"the split is not shown: {error}")
    usual = sections.usual_targets(comparison)
    diagnosed, problems = sections.diagnosed(comparison)
    content = [
        sections.summary(comparison, (list(targets) or usual)[-1:], test_samples),
        sections.curves(comparison),
        sections.to_targets(comparison, sorted({*targets, *usual})),
        sections.clients(comparison),
        *diagnosed,
        sections.other_curves(comparison),
        split,
    ]
    shown = [section for section in content if section.content]
    headline, settings = sections.headline(comparison), sections.configs(comparison)
    return PagePart(number, headline, comparison, shown, *settings, list(map(clipped, notes + problems)))


def _run_notes(run: RunRecord) -> list[str]:
    notes = []
    if run.state != "complete":
        state = "still running" if run.state == "running" else run.state
        notes.append(f"{run.folder}: {state}, {len(run.history)} of {run.rounds} rounds")
    tests = dict.fromkeys(key for line in run.history for key in line if key.startswith("test_"))
    lost = [key for key in list(tests)[: sections.MOST_CURVES] if last(run.history, key) is None]
    if lost:
        notes.append(f"{run.folder}: at the last round {', '.join(lost)} is not a finite number")
    return notes


@lru_cache(maxsize=1)
def _plotly() -> str:
    return base64.b64encode(zlib.compress(get_plotlyjs().encode(), 9)).decode()


def config_file(config: Mapping[str, Any]) -> str | None:
    """The config as a file for `flatfed run`; None for a run from Python, whose data and model it lacks."""
    if not {"data", "task"} & config.keys():
        return None
    training = dict(config["training"])
    if training.get("batch_size", 1) is None:
        training["batch_size"] = "full"
    return tomli_w.dumps(_without_none({**config, "training": training}))


def _without_none(value: Any) -> Any:
    """TOML has no null: a setting that is None is one that is not given."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value if item is not None] if isinstance(value, list) else value


def command(run: RunRecord) -> str:
    """The command that made a run, as one would type it."""
    words = run.environment.get("command")
    if not isinstance(words, list) or len(words) < 2:
        return ""
    program = Path(str(words[0])).name
    # `python -m flatfed` has the path of a file here.
    name = "flatfed" if program in {"flatfed", "flatfed.exe", "__main__.py"} else f"python {program}"
    return f"{name} {shlex.join(map(str, words[1:]))}"


def _details(method: Method) -> list[tuple[str, str]]:
    """How and with what a method was run; where its runs differ, each variant once."""
    details: dict[str, dict[str, None]] = {}
    for run in method.runs:
        versions, engine = (run.environment.get(key) for key in ("versions", "engine"))
        listed = versions if isinstance(versions, Mapping) else {}
        path = f"{engine.get('path')} path: {engine.get('reason')}" if isinstance(engine, Mapping) else ""
        facts = {
            "command": command(run),
            "commit": str(run.environment.get("commit") or ""),
            "versions": ", ".join(f"{name} {version}" for name, version in listed.items()),
            "machine": str(run.environment.get("platform") or ""),
            "engine": path,
        }
        for name, value in facts.items():
            details.setdefault(name, {})[clipped(value)] = None
    return [(name, value) for name, values in details.items() for value in values if value]
