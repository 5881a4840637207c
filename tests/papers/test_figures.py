"""The papers' figures: what is drawn of which runs, and the command that draws them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flatfed import cli
from flatfed.core.errors import FlatfedError
from flatfed.core.sampling import local_steps
from flatfed.diagnostics.folder import check
from flatfed.papers import tables
from flatfed.papers.drawing import drawn, how_run
from flatfed.papers.presets import cells
from flatfed.papers.reproduce import chosen_cells
from flatfed.papers.scaling import FULL, scaled_measure, scaled_options, scales
from flatfed.papers.schema import Panel, read
from flatfed.report import svg
from flatfed.training.config import Config

FIGURES = {name: table for name, table in tables().items() if table.panels}


class FinishedRun:
    """What is read of a run's folder."""

    def __init__(self, **quantities):
        length = max(map(len, quantities.values()))
        self.history = [
            {"round": 1 + at, **{name: values[at] for name, values in quantities.items() if at < len(values)}}
            for at in range(length)
        ]

    def read_history(self):
        return self.history

    def read_clients(self):
        return {}


def with_panel(name, **panel):
    return tables()[name].model_copy(update={"panels": [Panel(**panel)]})


# -- the data files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", FIGURES)
def test_panels_name_what_there_is(figure):
    table = FIGURES[figure]
    recorded = {"test_accuracy", "test_loss", "train_loss", "flatness_distance"}
    recorded |= {name for measure in table.measures for name in measure.numbers}
    for scale in scales():
        for panel in table.panels:
            assert all(0 <= number < len(table.blocks) for number in panel.blocks)
            assert (panel.draw in {"result", "surfaces"}) == bool(panel.of_diagnostic)
            if panel.of_diagnostic:
                check([panel.of_diagnostic], scaled_options(panel, scale))
            if panel.draw == "curves":
                assert set(panel.quantities.values() or [panel.y]) <= recorded
            if panel.draw == "final":
                blocks = [table.blocks[number] for number in panel.blocks] or table.blocks
                assert all(block.sweep for block in blocks)
        for measure in (scaled_measure(measure, scale) for measure in table.measures):
            check([measure.diagnostic], measure.options)


def test_a_figure_shows_the_runs_of_the_table_that_it_repeats():
    shown = [cell for cell in cells("fednsam/figure6") if cell.block == 2]
    repeated = [cell for cell in cells("fednsam/table4") if cell.block == 0]
    assert [(cell.method, cell.config, cell.printed) for cell in shown] == [
        (cell.method, cell.config, cell.printed) for cell in repeated
    ]
    assert {cell.method for cell in cells("fedswa/figure9")} == {"FedSAM"}
    # On other data nothing is printed.
    other = cells("fedsam/figure5")
    assert {cell.dataset for cell in other} == {"EMNIST"} and not any(cell.printed for cell in other)
    assert all(cell.config["training"]["batch_size"] == 32 for cell in other)


@pytest.mark.parametrize(
    ("repeats", "complaint"),
    [
        ({"table": "tabel2", "blocks": [0]}, "did you mean 'table2'?"),
        ({"table": "table2", "blocks": [6]}, "blocks 0 to 5"),
    ],
)
def test_repeating_what_there_is_not_is_one_clear_line(repeats, complaint, monkeypatch):
    from flatfed.core.files import read_toml
    from flatfed.papers import schema

    values = read_toml(schema.FOLDER / "fedswa.toml")
    values["tables"]["figure3"]["repeats"] = repeats
    monkeypatch.setattr(schema, "read_toml", lambda _: values)
    with pytest.raises(FlatfedError) as caught:
        read(schema.FOLDER / "fedswa.toml")
    assert "fedswa.toml: figure3: " in str(caught.value) and complaint in str(caught.value)


def test_both_betas_are_the_weight_of_the_fresh_gradient():
    chosen = [cell for cell in cells("fedsam/figure3") if cell.block in {3, 4}]
    for cell in chosen:
        algorithm = cell.config["algorithm"]
        fresh = algorithm.get("fresh_weight", 1 - algorithm.get("momentum_decay", math.nan))
        assert fresh == pytest.approx(cell.swept)
    assert {cell.method for cell in chosen} == {"FedCM", "MoFedSAM", "MimeLite"}


def milliseconds(config, costs):
    """About what a run takes on one core, without what is measured."""
    training, clients = config.training, config.data.clients
    gradient, sample = costs[config.model["name"]]
    options = config.data.options
    whole = SIZES[config.data.dataset if options.get("split") != "letters" else "letters"]
    size = whole * options.get("subset", 1.0) / clients
    steps = local_steps(training, int(size))
    evaluations = config.make_algorithm().gradient_evaluations
    trained = training.rounds * training.cohort_size(clients) * steps * evaluations * gradient
    tested = training.rounds / training.evaluate_every * TESTS[config.data.dataset] + size * clients
    return trained + tested * sample


SIZES = {
    "emnist": 697_932,
    "letters": 124_800,
    "emnist_l": 48_000,
    "shakespeare": 200_000,
    "fashion_mnist": 60_000,
}
SIZES |= {"cifar10": 50_000, "cifar100": 50_000}
TESTS = {"emnist": 11_600, "emnist_l": 8_000, "shakespeare": 40_000} | dict.fromkeys(
    ("fashion_mnist", "cifar10", "cifar100"), 10_000
)


@pytest.mark.parametrize("figure", FIGURES)
def test_the_laptop_scale_takes_about_an_hour_on_two_cores(figure):
    costs = scales()["laptop"].cost
    configs = {}
    for cell in chosen_cells(figure, scale="laptop"):
        configs[json.dumps(cell.config, sort_keys=True)] = Config.checked(cell.config)
    hours = sum(milliseconds(config, costs) for config in configs.values()) / 3.6e6
    assert hours <= 2.2


# -- drawing ----------------------------------------------------------------------------------------------


def test_curves_are_means_over_seeds_in_percent():
    chosen = cells("fedswa/figure5")[:2]
    seeds = [FinishedRun(test_accuracy=[0.2, 0.4]), FinishedRun(test_accuracy=[0.4, 0.4])]
    (figure,) = drawn(
        with_panel("fedswa/figure5", draw="curves"), [(chosen[0], seeds), (chosen[1], seeds[:1])], {}
    )
    assert [trace["name"] for trace in figure.traces] == ["FedMoSWA, alpha = 1", "FedMoSWA, alpha = 1.25"]
    first, second = figure.traces
    assert first["x"] == [1, 2] and first["y"] == pytest.approx([30, 40])
    assert first["meta"]["deviation"] == pytest.approx([100 * 0.02**0.5, 0], abs=1e-3)
    assert second["y"] == pytest.approx([20, 40]) and "deviation" not in second["meta"]
    assert figure.layout["yaxis"]["title"]["text"] == "test accuracy (%)"


def test_gaps_have_no_sign():
    finished = [(cells("fedsagd/figure3")[0], [FinishedRun(loss_gap=[-0.5, 0.25])])]
    figures = drawn(tables()["fedsagd/figure3"], finished, {})
    assert [figure.traces[0]["y"] for figure in figures] == [[0.5, 0.25]]


def test_blocks_in_one_picture_are_told_apart_by_what_differs():
    runs = [FinishedRun(flatness_distance=[1.0, 0.5])]
    finished = [(cell, runs) for cell in cells("fednsam/figure2")]
    (figure,) = drawn(
        with_panel("fednsam/figure2", draw="curves", y="flatness_distance", blocks=[0, 1, 2]), finished, {}
    )
    assert [trace["name"] for trace in figure.traces] == [
        "FedSAM, dirichlet(0.1)",
        "FedNSAM, dirichlet(0.1)",
        "FedSAM, dirichlet(0.3)",
        "FedSAM, dirichlet(0.6)",
    ]
    assert figure.title == "CIFAR-100, ResNet-18, 100 clients at 10%"


def test_several_quantities_of_one_trajectory():
    finished = [
        (cells("fedsynsam/figure2")[0], [FinishedRun(cosine_local=[0.1, 0.2], cosine_synthetic=[0.3])])
    ]
    (figure,) = drawn(tables()["fedsynsam/figure2"], finished, {})
    assert [(trace["name"], trace["y"]) for trace in figure.traces] == [
        ("FedSAM: own batch", [0.1, 0.2]),
        ("FedSynSAM: mix", [0.3]),
    ]


def test_the_statistic_is_drawn_over_what_is_swept():
    chosen = [cell for cell in cells("fednsam/figure5") if cell.sweep == "rho"]
    finished = [(cell, [FinishedRun(test_accuracy=[cell.swept])]) for cell in chosen]
    table = with_panel("fednsam/figure5", draw="final")
    (figure,) = drawn(table, finished, {})
    (trace,) = figure.traces
    assert trace["x"] == [0.01, 0.05, 0.1, 0.2, 0.5] and trace["y"] == pytest.approx([1, 5, 10, 20, 50])
    assert figure.layout["xaxis"]["type"] == "log" and trace["name"] == "FedNSAM"
    assert figure.layout["yaxis"]["title"]["text"] == "last accuracy (%)"
    assert figure.layout["yaxis"]["range"] == pytest.approx([-3.9, 54.9])
    (alike,) = drawn(table, [(cell, [FinishedRun(test_accuracy=[0.5])]) for cell in chosen], {})
    assert alike.layout["yaxis"]["range"] == [48, 52]
    # A run that diverged leaves a gap.
    (figure,) = drawn(table, [(finished[0][0], []), *finished[1:]], {})
    assert figure.traces[0]["x"] == [0.05, 0.1, 0.2, 0.5]


def grid(height):
    return {
        "a": [-1.0, 0.0, 1.0],
        "b": [-1.0, 0.0, 1.0],
        "train": [[height + 1.0] * 3, [height] * 3, [9.0] * 3],
    }


def test_surfaces_have_one_scale_and_lie_over_each_other_on_request():
    chosen = cells("fedsynsam/figure1")[:2]
    finished = [(cell, [FinishedRun(test_accuracy=[0.5])]) for cell in chosen]
    results = {(0, 0): [grid(0.0)], (0, 1): [grid(1.0)]}
    (figure,) = drawn(tables()["fedsynsam/figure1"], finished, results)
    assert [trace["name"] for trace in figure.traces] == ["w/o Compression", "8-bit Quantization"]
    assert [trace["opacity"] for trace in figure.traces] == [0.5, 1.0]
    beside = drawn(with_panel("fedsynsam/figure1", draw="surfaces", y="train"), finished, results)
    assert [figure.title for figure in beside] == [
        "w/o Compression: train loss",
        "8-bit Quantization: train loss",
    ]
    scale = figure.layout["scene"]["zaxis"]["range"]
    assert all(one.layout["scene"]["zaxis"]["range"] == scale for one in beside) and scale[0] == 0.0
    assert svg.picture("both", [figure]).count(b"<path") > 10


def test_a_diagnostics_own_picture_is_drawn_for_each_block():
    table = tables()["fedsagd/figure2"]
    chosen = [cell for cell in cells("fedsagd/figure2") if cell.method in {"FedAvg", "FedSAGD"}]
    result = {"rounds": [1, 2], "discrepancy": [0.1, 0.2], "bound": [10.0, 20.0]}
    finished = [(cell, [FinishedRun(test_accuracy=[0.5])]) for cell in chosen]
    figures = drawn(table, finished, {(0, place): [result] for place in range(len(chosen))})
    assert [figure.title.split(", ")[0] for figure in figures] == ["EMNIST-L", "CIFAR-10", "CIFAR-100"]
    assert [trace["name"] for trace in figures[0].traces] == [
        "FedAvg",
        "FedSAGD",
        "FedAvg: bound",
        "FedSAGD: bound",
    ]
    assert drawn(table, finished, {}) == []


def test_a_picture_says_what_was_scaled():
    chosen = chosen_cells("fedsagd/figure4", ["FedAvg"], "EMNIST-L", scale="small")
    runs = [FinishedRun(test_accuracy=[0.5])] * 2
    said = how_run([(cell, runs) for cell in chosen])
    assert said.startswith("2 seeds; not the paper's: clients = 4, participants = 2, rounds = 2")
    assert how_run([(cells("fedsagd/figure4")[0], runs[:1])]) == "1 seed"


def test_the_svg_is_the_same_for_the_same_figures_and_has_the_names():
    chosen = cells("fedswa/figure5")[:2]
    finished = [(cell, [FinishedRun(test_accuracy=[0.1, 0.2, 0.4])] * 2) for cell in chosen]
    figures = drawn(with_panel("fedswa/figure5", draw="curves"), finished, {})
    logarithmic = [
        replace(one, layout={**one.layout, "yaxis": {**one.layout["yaxis"], "type": "log"}})
        for one in figures
    ]
    first, second = (svg.picture("Title", [*figures, *logarithmic], "2 seeds") for _ in range(2))
    assert first == second and first.startswith(b"<?xml")
    for text in ("Title", "2 seeds", "FedMoSWA, alpha = 1.25", "test accuracy (%)"):
        assert text in first.decode()
    # Long titles are broken.
    long = svg.picture("", [replace(figures[0], title=" ".join(["a title of some length"] * 4))]).decode()
    assert "length a title" in long and "length a title of some length a title" not in long
    words = " ".join(["some words of it"] * 8)
    around = svg.picture(words, figures[:1], words).decode()
    assert "some words of it" in around and words not in around


def test_zero_has_no_place_on_a_logarithmic_axis_and_a_lone_point_is_marked():
    runs = [FinishedRun(test_accuracy=[0.0, 0.4])]
    (curve,) = drawn(with_panel("fedswa/figure5", draw="curves"), [(cells("fedswa/figure5")[0], runs)], {})
    curve = replace(curve, layout={**curve.layout, "yaxis": {**curve.layout["yaxis"], "type": "log"}})
    axes = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    svg._draw_lines(axes, curve)
    (line,) = axes.lines
    first, second = line.get_ydata()
    assert axes.get_yscale() == "log" and math.isnan(first) and second == 40 and line.get_marker() == "o"


# -- the command ------------------------------------------------------------------------------------------

# A figure of each kind, with as few methods as show it.
COMMANDS = {
    "fednsam/figure2": [],
    "fedsagd/figure2": ["--methods", "FedAvg", "--only", "EMNIST-L"],
    "fedsynsam/figure1": ["--only", "8 bits"],
    "fedsynsam/figure5": ["--methods", "FedSMOO"],
}


@pytest.mark.parametrize(("figure", "chosen"), COMMANDS.items())
def test_the_command_draws_a_figure(figure, chosen, folder):
    root = folder / "figures"
    arguments = ["reproduce", figure, "--scale", "small", "--seeds", "1", *chosen, "--runs", str(root)]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert "left out" not in done.stderr
    own = root / figure.replace("/", "-") if FIGURES[figure].measures else root
    page = (own / f"report-{figure.replace('/', '-')}.html").read_text()
    picture = (own / f"{figure.replace('/', '-')}.svg").read_text()
    assert "not the paper&#x27;s: " in picture or "not the paper's: " in picture
    names = {
        cell.method
        for cell in chosen_cells(figure, chosen[1:2] if "--methods" in chosen else [], scale="small")
    }
    assert any(name in picture for name in names)
    assert 'data-figure="-1-panel-0-0' in page
    # What is there is drawn again without running anything.
    done = CliRunner().invoke(cli.app, arguments)
    assert "0 runs to do" in done.stdout
    assert (own / f"{figure.replace('/', '-')}.svg").read_text() == picture


def test_without_matplotlib_nothing_is_run(folder, monkeypatch):
    monkeypatch.setattr(svg, "find_spec", lambda _: None)
    done = CliRunner().invoke(cli.app, ["reproduce", "fedswa/figure5", "--runs", str(folder / "none")])
    assert done.exit_code == 2 and "pip install 'flatfed[figures]'" in done.stderr
    assert not (folder / "none").exists()


def test_only_the_papers_own_scale_changes_nothing():
    for figure in FIGURES:
        assert all(not cell.sizes_of_its_own for cell in chosen_cells(figure, scale=FULL, from_scratch=True))
