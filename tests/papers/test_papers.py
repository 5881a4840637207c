"""The papers' tables: every cell is a good config, says what the paper says, and runs."""

from __future__ import annotations

import functools
import json
import re
import shlex
import statistics
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flatfed import cli
from flatfed.core.errors import FlatfedError
from flatfed.core.files import read_toml
from flatfed.core.part import ServerTask
from flatfed.papers import papers, presets, tables
from flatfed.papers.reproduce import chosen_cells, measured, seeded
from flatfed.papers.results import results_tables, sources_tables
from flatfed.papers.scaling import scaled
from flatfed.papers.schema import FOLDER, KINDS, Tuning, merged
from flatfed.papers.sources import resolved, settings
from flatfed.runs.compare import is_complete, run_folder
from flatfed.training.config import Config
from flatfed.training.evaluation import ClientSpread

cells = functools.cache(presets.cells)
TABLES = [name for name, table in tables().items() if not table.panels]
FIGURES = [name for name, table in tables().items() if table.panels]


def cell_at(table, block, method, swept=None):
    place = (block, method, swept)
    (only,) = (cell for cell in cells(table) if (cell.block, cell.method, cell.swept) == place)
    return only


@pytest.mark.parametrize("table", [*TABLES, *FIGURES])
def test_every_cell_is_a_good_config_at_all_scales(table):
    for cell in cells(table):
        config = Config.checked(cell.config)
        assert config.training.rounds == cell.config["training"]["rounds"]
        for scale in ("laptop", "small"):
            Config.checked(scaled(cell, scale, tables()[table]).config)


@pytest.mark.parametrize("table", TABLES)
def test_cells_are_the_tables_own_numbers(table):
    left = list(cells(table))
    paper, _, name = table.partition("/")
    written = read_toml(FOLDER / f"{paper}.toml")["tables"][name]
    blocks = [merged(written.get("common", {}), block) for block in written["blocks"]]
    for index, block in enumerate(blocks):
        # What was published under DynaFed's name has a row of its own.
        rows = block["results"] | {method: {} for method in written.get("unprinted", [])}
        assert ("DynaFed (as published)" in rows) == ("DynaFed" in rows)
        for method, printed in rows.items():
            for position, swept in enumerate(block.get("values", [None])):
                cell = left.pop(0)
                assert (cell.block, cell.method, cell.swept) == (index, method, swept)
                assert [100 * target for target in cell.targets] == pytest.approx(block.get("targets", []))
                assert cell.printed.keys() == printed.keys()
                for key, value in printed.items():
                    per_value = "values" in block and isinstance(value, list)
                    assert cell.printed[key] == without_marks(value[position] if per_value else value)
                rounds = cell.printed.get("rounds_to_targets")
                assert rounds is None or len(rounds) == len(cell.targets)
    assert not left


def without_marks(value):
    """A printed value with None for "-"; 1000+ stays."""
    if isinstance(value, list):
        return [without_marks(item) for item in value]
    return None if value == "-" else value


def test_values_of_a_sweep_match_its_rows():
    for table in TABLES:
        for block in tables()[table].blocks:
            for printed in block.results.values():
                if block.values:
                    assert len(printed["acc"]) == len(block.values)


# Each line was read off the paper's table: what is printed, and what has to be run for it.
SPOT_CHECKS = [
    (
        ("fedswa/table2", 5, "FedMoSWA", None),
        {"acc": 67.9, "std": 0.4, "rounds_to_target": 330},
        {"name": "fedmoswa"},
        ("dirichlet_client_refill", 0.6),
        {"participation": 0.1, "rounds": 1000, "lr": 0.2, "batch_size": 50, "local_epochs": 5},
    ),
    (
        ("fedswa/table3", 3, "FedSAM", None),
        {"acc": 71.4, "std": 0.2, "rounds_to_target": 212},
        {"name": "fedsam", "radius": 0.05},
        ("dirichlet_client_refill", 0.1),
        {"participation": 0.1, "rounds": 400},
    ),
    (
        ("fedswa/table4", 0, "FedSWA", 0.3),
        {"acc": 57.9},
        {"name": "fedswa", "final_rate": 0.3},
        ("dirichlet_client_refill", 0.6),
        {"participation": 0.1, "rounds": 1000},
    ),
    (
        ("fedswa/table5", 0, "FedMo (ii)", None),
        {"acc": 62.5, "gain": 4.3},
        {"name": "fedmo"},
        ("dirichlet_client_refill", 0.6),
        {"participation": 1.0, "rounds": 300},
    ),
    (
        ("fedsagd/table2", 2, "FedLNAG", None),
        {"top_acc": 81.92, "rounds_to_targets": [41, 196]},
        {"name": "fedlnag"},
        ("dirichlet_client", 0.3),
        {"participation": 0.01, "rounds": 2000, "batch_size": 48, "local_epochs": 20},
    ),
    (
        ("fedsagd/table3", 0, "FedCM", "iid"),
        {"acc": 82.07},
        {"name": "fedcm"},
        ("iid", None),
        {"participation": 0.01, "rounds": 2000},
    ),
    (
        ("fedsagd/table4", 0, "SCAFFOLD", 5.0),
        {"acc": 81.97},
        {"name": "scaffold"},
        ("dirichlet_client", 0.3),
        {"participation": 0.05, "rounds": 2000},
    ),
    (
        ("fedsagd/table12", 0, "FedSAGD", 0.0005),
        None,
        {"name": "fedsagd", "decay_weight": 0.0005},
        ("dirichlet_client", 0.1),
        {"participation": 0.1, "rounds": 500},
    ),
    (
        ("fedsagd/table15", 0, "Alg12", None),
        {"acc_250": 77.31, "acc_500": 79.7, "rounds_to_targets": [172, 487]},
        {"name": "feddyn", "regularisation": 0.01},
        ("natural", None),
        {"participants": 5, "rounds": 500},
    ),
    (
        ("fedsam/table1", 0, "MoFedSAM", None),
        {"val_acc": 85.07, "val_dev": 2.95, "rounds_to_target": 24},
        {"name": "mofedsam", "radius": 0.2},
        ("dirichlet_client", 0.6),
        {"participation": 0.2, "rounds": 1000, "sampling": "bernoulli", "local_epochs": 10},
    ),
    (
        ("fednsam/table3", 0, "FedNSAM", None),
        {"acc": 70.12, "rounds_to_target": 67},
        {"name": "fednsam"},
        ("dirichlet_client_refill", 0.1),
        {"participation": 0.05, "rounds": 100, "lr": 0.01, "batch_size": 16},
    ),
    (
        ("fednsam/table4", 0, "FedAvgM", None),
        {"acc": 15.72, "std": 0.23, "rounds_to_target": "1000+"},
        {"name": "fedavgm"},
        ("dirichlet_client_refill", 0.6),
        {"participation": 0.02, "rounds": 1000},
    ),
]


@pytest.mark.parametrize(("place", "printed", "algorithm", "partition", "training"), SPOT_CHECKS)
def test_hand_picked_cells(place, printed, algorithm, partition, training):
    cell = cell_at(*place)
    if printed is not None:
        assert {key: cell.printed[key] for key in printed} == printed
    config = cell.config
    assert config["algorithm"] == algorithm
    assert (config["partition"]["name"], config["partition"].get("concentration")) == partition
    assert {key: config["training"][key] for key in training} == training


def test_the_fixed_settings_of_the_sensitivity_tables_are_the_methods_defaults():
    options = {"mu": "decay_weight", "lambda": "proximal_weight", "beta": "momentum_decay"}
    for number in range(8, 14):
        (block,) = tables()[f"fedsagd/table{number}"].blocks
        for cell in cells(f"fedsagd/table{number}"):
            built = Config.checked(cell.config).make_algorithm().options
            for symbol, value in block.stated["fixed"].items():
                assert built[options[symbol]] == value
            assert built[options[block.sweep]] == cell.swept


def disagreements(cell):
    """(strictly impossible, at odds) for every target: a last round may be below an earlier one."""
    printed = cell.printed
    rounds = cell.printed_rounds
    best = printed.get("top_acc")
    last = next((printed[key] for key in ("acc", "val_acc", "acc_500") if key in printed), None)
    value = best if best is not None else last
    if value is None or not ("rounds_to_targets" in printed or "rounds_to_target" in printed):
        return []
    contradictions = []
    for target, reached in zip(cell.targets, rounds, strict=True):
        above = value >= 100 * target - 1e-9
        never = above and reached is None
        too_low = not above and reached is not None
        contradictions.append((never or (too_low and best is not None), never or too_low))
    return contradictions


def test_every_impossible_cell_is_marked_and_only_those():
    marked = 0
    for table in TABLES:
        for cell in cells(table):
            contradictions = disagreements(cell)
            mark = cell.printed.get("impossible")
            if any(strict for strict, _ in contradictions):
                assert mark, (table, cell.label)
            if mark:
                marked += 1
                assert any(odd for _, odd in contradictions), (table, cell.label, mark)
                figure = next(
                    cell.printed[key] for key in ("top_acc", "acc", "val_acc") if key in cell.printed
                )
                assert f"{figure:.2f}" in mark
                assert any(f"reach {100 * target:.0f}" in mark for target in cell.targets)
    assert marked == 12


def test_a_round_to_a_target_lies_within_the_run():
    for table in TABLES:
        for cell in cells(table):
            # The caption of fedsagd/table2 gives Shakespeare 2000 rounds.
            stated = tables()[table].blocks[cell.block].stated.get("rounds")
            rounds = stated if isinstance(stated, int) else cell.config["training"]["rounds"]
            for number in cell.printed_rounds:
                assert number is None or number <= rounds


def test_compressors_are_those_of_the_table():
    algorithm = cell_at("fedsynsam/table2", 0, "FedSAM").config["algorithm"]
    assert algorithm["compress"] == {"part": "quantize", "bits": 4}
    algorithm = cell_at("fedsynsam/table2", 3, "FedSMOO").config["algorithm"]
    assert algorithm["compress"] == {"part": "top_k", "ratio": 0.25}
    eigenvalues = {cell.method: cell.config["algorithm"] for cell in cells("fedsynsam/table1")[:4]}
    assert {name: algorithm.get("compress", {}).get("part") for name, algorithm in eigenvalues.items()} == {
        "w/o Compression": None,
        "8-bit Quantization": "quantize",
        "Top-k (0.25 sparsity)": "top_k",
        "4-bit Quantization": "quantize",
    }
    assert all(algorithm["name"] == "fedavg" for algorithm in eigenvalues.values())


def test_methods_of_equal_computation_take_their_own_steps():
    steps = {cell.method: cell.config["training"]["local_steps"] for cell in cells("fedsynsam/table4")[:3]}
    assert steps == {"FedAvg": 20, "FedLESAM": 20, "FedSynSAM": 10}


def test_dynafed_is_there_twice():
    named = {cell.method: cell.config["algorithm"]["name"] for cell in cells("fedsynsam/table2")}
    assert named["DynaFed"] == "dynafed_syn_only"
    assert named["DynaFed (as published)"] == "dynafed"


@pytest.mark.parametrize(
    ("figure", "repeated"), [("fedswa/figure1", "fedswa/table3"), ("fednsam/figure2", "fednsam/table4")]
)
def test_captions_repeat_cells_of_a_table(figure, repeated):
    for cell in cells(figure):
        same = [other for other in cells(repeated) if other.config == cell.config]
        assert same and {other.method for other in same} == {cell.method}
        assert {other.printed["acc"] for other in same} == {cell.printed["acc"]}


def test_the_captions_of_fedsam_contradict_its_table():
    for cell in (cell for cell in cells("fedsam/figure4") if cell.printed):
        (other,) = (
            other
            for other in cells("fedsam/table1")
            if other.config == cell.config and other.method == cell.method
        )
        assert other.printed["val_acc"] != cell.printed["val_acc"]
        assert f"{other.printed['val_acc']:.2f}" in " ".join(tables()["fedsam/figure4"].notes)


# -- what is compared -------------------------------------------------------------------------------------

STATISTICS = {
    "best accuracy": [
        "fedsagd/table2",
        "fedsagd/table3",
        "fedsagd/table4",
        "fedsagd/table14",
        "fedsagd/table17",
    ],
    "last accuracy": ["fedswa/table2", "fednsam/table2", "fedsynsam/table2", "fedsagd/table8"],
    "accuracy at round 500": ["fedsagd/table15"],
    "mean over clients, test": ["fedsam/table1", "fedsam/table2", "fedsam/table4", "fedsam/table5"],
    "top eigenvalue": ["fedsynsam/table1"],
}


@pytest.mark.parametrize(("table", "statistic"), [(t, s) for s, names in STATISTICS.items() for t in names])
def test_the_statistic_of_a_table_is_the_papers(table, statistic):
    assert {cell.statistic for cell in cells(table)} == {statistic}


class FinishedRun:
    """What is read of a run's folder."""

    def __init__(self, accuracies, train=0.0, test=0.0):
        self.history = [{"round": 1 + t, "test_accuracy": value} for t, value in enumerate(accuracies)]
        spread = {"train": train, "test": test}
        self.clients = {name: ClientSpread(mean, 0.1, 0.05) for name, mean in spread.items()}

    def read_history(self):
        return self.history

    def read_clients(self):
        return self.clients


@pytest.mark.parametrize(
    ("statistic", "ours"),
    [
        ("last accuracy", 0.4),
        ("best accuracy", 0.9),
        ("accuracy at round 2", 0.9),
        ("accuracy at round 9", None),
        ("mean over clients, train", 0.8),
        ("mean over clients, test", 0.6),
    ],
)
def test_ours_is_measured_as_the_paper_does(statistic, ours):
    cell = replace(cell_at("fedswa/table2", 0, "FedAvg"), statistics={"acc": statistic})
    value = measured(cell, [FinishedRun([0.2, 0.9, 0.4], train=0.8, test=0.6)])
    assert (value and value.mean) == ours


def test_further_columns_improvements_and_unreached_targets_are_shown():
    chosen = [cell_at("fedsagd/table15", 0, method) for method in ("FedSAGD", "Alg12", "FedAvg")]
    runs = [[FinishedRun([0.5] * 249 + [0.7] + [0.5] * 250)]] * 3
    (table,) = results_tables(list(zip(chosen, runs, strict=True)))
    rows = [[entry.text for entry in row] for row in table.rows]
    assert table.columns[5] == "at round 250 %\npaper | ours"
    assert [row[2:4] + row[5:6] for row in rows[:1]] == [["81.14", "50.00", "79.82 | 70.00"]]
    assert rows[2][7] == "500+ | –"

    chosen = cells("fedswa/table5")[:2]
    runs = [[FinishedRun([0.5])], [FinishedRun([0.625])]]
    (table,) = results_tables(list(zip(chosen, runs, strict=True)))
    place = table.columns.index("improvement\npaper | ours")
    assert [row[place].text for row in table.rows] == ["– | 0.00", "1.70 | 12.50"]


# -- choosing and changing cells --------------------------------------------------------------------------


def test_a_data_set_is_not_another_with_a_longer_name():
    assert {cell.dataset for cell in chosen_cells("fedswa/table2", [], "CIFAR-10")} == {"CIFAR-10"}
    assert {cell.dataset for cell in chosen_cells("fedswa/table2", [], "cifar-100")} == {"CIFAR-100"}
    assert len(chosen_cells("fedswa/table2", ["FedAvg"], "")) == 6


@pytest.mark.parametrize(
    ("table", "method", "printed"),
    [("fedsagd/table15", "FedDyn", "Alg12"), ("fedswa/table5", "fedmoswa", "FedMoSWA (i+ii)")],
)
def test_methods_go_by_their_name_where_the_paper_prints_another(table, method, printed):
    assert [cell.method for cell in chosen_cells(table, [method])] == [printed]
    assert [cell.method for cell in chosen_cells(table, [printed])] == [printed]


def test_a_setting_is_changed_where_it_fits():
    changed = chosen_cells("fedswa/table2", [], "CIFAR-10, LeNet-5", assignments=["algorithm.radius=0.3"])
    radii = {cell.method: cell.config["algorithm"].get("radius") for cell in changed}
    assert radii["FedSAM"] == radii["FedASAM"] == 0.3 and radii["FedAvg"] is None
    sources = {cell.method: cell.sources.get("algorithm.radius") for cell in changed}
    assert sources["FedSAM"] == "--set" and sources["FedAvg"] is None
    with pytest.raises(FlatfedError, match=r"fedavg\.radius: unknown"):
        chosen_cells("fedswa/table2", ["FedAvg"], assignments=["algorithm.radius=0.3"])
    everywhere = chosen_cells("fedswa/table2", [], "LeNet-5", assignments=["algorithm.compress=top_k"])
    assert all(cell.config["algorithm"]["compress"] == "top_k" for cell in everywhere)


def test_steps_take_the_place_of_epochs():
    assignments = ["training.local_steps=50", "training.clip=none", "training.participants=3"]
    (cell,) = chosen_cells("fedswa/table4", ["FedSWA"], assignments=assignments)[:1]
    training = Config.checked(cell.config).training
    assert (training.local_steps, training.local_epochs) == (50, None)
    assert (training.participants, training.participation, training.clip) == (3, None, None)
    both = ["training.local_steps=50", "training.local_epochs=5"]
    with pytest.raises(FlatfedError, match="give only one"):
        chosen_cells("fedswa/table4", ["FedSWA"], assignments=both)


@pytest.mark.parametrize("table", ["fedswa/table3", "fednsam/table3"])
def test_published_weights_are_not_replaced_without_a_word(table, tmp_path):
    for command in (["reproduce"], ["tune", "--grid", "training.lr=0.1"]):
        done = CliRunner().invoke(cli.app, [*command, table, "--methods", "FedAvg", "--only", "ViT"])
        assert done.exit_code == 2 and "--from-scratch" in done.stderr
    (cell, *_) = chosen_cells(table, ["FedAvg"], "ViT", from_scratch=True)
    assert cell.sources["model.pretrained"] == "--from-scratch"
    (tmp_path / "vit_base").mkdir()
    for folder, used in ((tmp_path, tmp_path / "vit_base"), (tmp_path / "other", tmp_path / "other")):
        given = [f"model.pretrained={folder}"]
        (cell, *_) = chosen_cells(table, ["FedAvg"], "ViT", assignments=given)
        assert cell.config["model"]["pretrained"] == str(used)
        assert cell.sources["model.pretrained"] == "--set"
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "vit_base.pth").touch()
    (cell, *_) = chosen_cells(
        table, ["FedAvg"], "ViT", assignments=[f"model.pretrained={tmp_path / 'files'}"]
    )
    assert cell.config["model"]["pretrained"] == str(tmp_path / "files" / "vit_base.pth")
    if table == "fedswa/table3":
        assert len(chosen_cells(table, ["FedAvg"], "ResNet-18")) == 3


def test_settings_that_tables_compare_are_the_same():
    both = {cell.method: cell.config["algorithm"] for cell in cells("fednsam/table5")}
    assert both["FedDyn"]["regularisation"] == both["FedNSAM-D"]["regularisation"]
    assert cell_at("fedsagd/table2", 0, "FedACG").config["algorithm"]["proximal_weight"] == 0


# -- the small scale --------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [table for table in TABLES if tables()[table].blocks[0].sweep])
def test_the_small_scale_leaves_what_is_swept(table):
    chosen = [scaled(cell, "small", tables()[table]) for cell in cells(table)]
    assert len({json.dumps(cell.config, sort_keys=True) for cell in chosen}) == len(chosen)
    for cell, full in zip(chosen, cells(table), strict=True):
        shrunk, whole = settings(cell.config), settings(full.config)
        for name in cell.swept_settings:
            assert shrunk[name] == whole[name]
        value = f"{cell.swept:g}" if isinstance(cell.swept, float) else cell.swept
        assert cell.label == f"{cell.method}, {tables()[table].blocks[0].sweep} = {value}"


def test_the_small_scale_distils():
    for table in ("fedsynsam/table2", "fedsynsam/table5", "fedsynsam/table6"):
        for cell in cells(table)[:20]:
            config = Config.checked(scaled(cell, "small", tables()[table]).config)
            tasks = [part for part in config.make_algorithm().parts if isinstance(part, ServerTask)]
            assert all(config.training.rounds >= task.first_round for task in tasks)
            assert bool(tasks) == ("Syn" in cell.method or "Dyna" in cell.method)


def test_the_matching_loss_stands_in_the_table(folder):
    which = ["--only", "Fashion-MNIST, 2-layer MLP, path(1), 10 clients at 100%, qsgd(4)", "--seeds", "1"]
    which += ["--methods", "FedSynSAM", "--methods", "FedSAM"]
    root = folder / "matching"
    done = CliRunner().invoke(
        cli.app, ["reproduce", "fedsynsam/table2", "--scale", "small", *which, "--json", "--runs", str(root)]
    )
    assert done.exit_code == 0, done.output
    (table,) = json.loads(done.stdout)
    rows = {row["method"]: row["matching loss"] for row in table["rows"]}
    assert rows["FedSAM"] == "–" and float(rows["FedSynSAM"]) > 0


def test_titles_say_what_ran():
    chosen = chosen_cells("fedsagd/table2", ["FedAvg"], "EMNIST-L", scale="small")
    (table,) = results_tables([(cell, [FinishedRun([0.5])]) for cell in chosen])
    own = "clients = 4, participants = 2, rounds = 2, local_steps = 1, batch_size = 2"
    assert table.title == f"{chosen[0].title} [run with {own}]"
    assert {source for name, source in chosen[0].sources.items() if name == "training.rounds"} == {
        "--scale small"
    }
    chosen = chosen_cells("fedsagd/table2", ["FedAvg"], "EMNIST-L", rounds=7)
    assert chosen[0].sizes_of_its_own == ["rounds = 7"]
    assert cells("fedsagd/table2")[0].sizes_of_its_own == []


# -- step sizes -------------------------------------------------------------------------------------------


def test_every_setting_says_where_it_comes_from():
    for table in (*TABLES, *FIGURES):
        for cell in cells(table):
            assert set(settings(cell.config)) == set(cell.sources)
            assert {"algorithm.name", "algorithm.gradient.part"} & set(cell.sources)
            for name, source in cell.sources.items():
                kind, _, detail = source.partition(": ")
                assert kind in KINDS, (table, cell.label, name)
                if kind == "released code":
                    assert re.search(r"\([0-9a-f]{7}\)", detail), (table, cell.label, name, source)
                elif kind != "paper":
                    assert detail, (table, cell.label, name)
    assert cell_at("fedsagd/table2", 2, "FedAvg").origin == "paper"
    assert cell_at("fednsam/table3", 0, "FedNSAM").origin == "paper"
    assert cell_at("fednsam/table2", 0, "FedNSAM").origin.startswith("released code: ")
    assert cell_at("fedsagd/table15", 0, "FedSAGD").origin.startswith("our choice: ")


# What an audit found to be claimed without a source.
CHOICES = [
    (("fedsagd/table2", 0, "FedAvg"), "training.lr_decay", "tuned in the paper"),
    (("fedsagd/table2", 0, "FedAvg"), "training.clip", "our choice"),
    (("fedsagd/table2", 0, "FedAvg"), "training.weight_decay", "our choice"),
    (("fedsagd/table2", 0, "FedAvg"), "data.options.augmentation", "our choice"),
    (("fedsagd/table2", 0, "FedAdam"), "algorithm.stability", "our choice"),
    (("fedsagd/table2", 0, "FedProx"), "algorithm.proximal_weight", "tuned in the paper"),
    (("fedsagd/table2", 2, "FedProx"), "algorithm.proximal_weight", "paper"),
    (("fedsagd/table2", 3, "FedAvg"), "training.local_epochs", "tuned in the paper"),
    (("fedsagd/table2", 3, "FedAvg"), "training.rounds", "paper"),
    (("fedsam/table1", 0, "FedSAM"), "training.lr", "tuned in the paper"),
    (("fedsam/table1", 0, "FedSAM"), "algorithm.radius", "our choice"),
    (("fedsam/table1", 0, "FedSAM"), "training.rounds", "our choice"),
    (("fedsam/table1", 1, "FedRobust"), "algorithm.shift", "our choice"),
    (("fedsam/table1", 1, "FedAvg"), "model.stem", "our choice"),
    (("fedsam/table1", 1, "FedAvg"), "data.options.augmentation", "our choice"),
    (("fedswa/table2", 0, "FedSWA"), "training.lr", "released code"),
    (("fedswa/table2", 0, "FedMoSWA"), "training.lr", "our choice"),
    (("fedswa/table2", 0, "FedSAM"), "training.weight_decay", "our choice"),
    (("fedswa/table2", 0, "FedAvg"), "training.weight_decay", "released code"),
    (("fedswa/table5", 0, "FedAvg"), "partition.concentration", "our choice"),
    (("fedswa/table6", 0, "FedAvg"), "partition.concentration", "paper"),
    (("fednsam/table3", 0, "FedAvg"), "data.clients", "our choice"),
    (("fednsam/table3", 0, "FedAvg"), "data.options.normalisation", "released code"),
    (("fedsynsam/table2", 0, "FedSynSAM"), "algorithm.inner_rate", "our choice"),
    (("fedsynsam/table2", 0, "FedSynSAM"), "algorithm.initial", "paper"),
    (("fedsynsam/table5", 0, "FedSynSAM", 10.0), "algorithm.initial", "our choice"),
    (("fedsynsam/table5", 0, "FedSynSAM", 10.0), "algorithm.samples_per_class", "paper"),
    (("fedsynsam/table2", 0, "FedAvg"), "algorithm.compress.bucket", "our choice"),
]


@pytest.mark.parametrize(("place", "name", "kind"), CHOICES)
def test_choices_are_marked_as_such(place, name, kind):
    assert cell_at(*place).sources[name].partition(":")[0] == kind


def test_sources_stated_in_a_file_are_of_settings_that_there_are():
    for name, paper in papers().items():
        named = (table for table in (*TABLES, *FIGURES) if table.startswith(f"{name}/"))
        own = [cell for table in named for cell in cells(table)]
        known = {f"{setting}." for cell in own for setting in cell.sources}
        for stated, _ in paper._all_sources():
            assert any(setting.startswith(f"{stated}.") for setting in known), (name, stated)


def test_what_sets_a_value_anew_does_not_inherit_its_source():
    layers = [{"training": {"lr": 1}, "sources": {"training.lr": "paper: this one"}}, {"training": {"lr": 2}}]
    assert resolved(["training.lr"], layers, {"training": "our choice"}) == {"training.lr": "our choice"}
    assert resolved(["training.lr"], layers[:1], {})["training.lr"] == "paper: this one"
    with pytest.raises(FlatfedError, match=r"training\.clip: no source"):
        resolved(["training.clip"], layers, {})


def test_the_sources_of_all_settings_are_printed_without_running_anything(tmp_path):
    arguments = [
        "reproduce",
        "fedsagd/table2",
        "--only",
        "EMNIST-L",
        "--explain",
        "--set",
        "training.clip=none",
    ]
    done = CliRunner().invoke(cli.app, [*arguments, "--runs", str(tmp_path / "runs")])
    assert done.exit_code == 0, done.output
    chosen = chosen_cells("fedsagd/table2", [], "EMNIST-L", assignments=["training.clip=none"])
    for name in {name for cell in chosen for name in cell.sources}:
        assert f" {name} " in done.stdout
    shown = " ".join(done.stdout.replace("│", " ").split())
    assert "training.clip None --set all" in shown.replace("none", "None")
    assert "training.lr 0.1 paper FedAvg" in shown and "training.lr 0.001 paper FedProx, FedDyn" in shown
    assert not (tmp_path / "runs").exists()


def test_explanations_have_every_setting_of_every_cell_once():
    chosen = cells("fedsynsam/table4")
    explained = [[cell.text for cell in row] for table in sources_tables(chosen) for row in table.rows]
    assert len({tuple(row) for row in explained}) <= len(explained)
    common = {row[0]: row[1:3] for row in explained if row[3] == "all" and row[0] == "data.dataset"}
    assert common == {"data.dataset": ["cifar10", "paper"]}
    steps = {(row[1], row[3]) for row in explained if row[0] == "training.local_steps"}
    assert ("20", "FedAvg, FedLESAM") in steps and ("5", "FedSynSAM") in steps


def test_tuned_settings_are_used_only_on_request(monkeypatch):
    monkeypatch.setattr("flatfed.papers.reproduce.cells", cells)  # each table is made once
    tunings = [
        (f"{name}/{table}", tuning)
        for name, paper in papers().items()
        for tuning in paper.tuned
        for table in tuning.tables
    ]
    assert len(tunings) == 5
    for table, tuning in tunings:
        chosen = [
            cell for cell in cells(table) if cell.dataset == tuning.dataset and tuning.part in cell.title
        ]
        assert set(tuning.best) <= {cell.method for cell in chosen}
        for cell in chosen:
            if cell.method not in tuning.best:
                continue
            (tuned,) = chosen_cells(table, [cell.method], cell.title, tuned=True)
            assert tuned.origin == f"flatfed tune: {tuning.origin}"
            assert tuned.config == merged(cell.config, tuning.best[cell.method])
            assert Config.checked(tuned.config).training.lr == tuned.config["training"]["lr"]
            (plain,) = chosen_cells(table, [cell.method], cell.title)
            assert plain == cell


def test_tuning_of_a_part_is_for_that_part(monkeypatch):
    tuning = Tuning(
        tables=["table2"],
        dataset="Fashion-MNIST",
        part="path(1)",
        origin="somewhere",
        best={"FedSAM": {"training": {"lr": 0.5}}},
    )
    paper = papers()["fedsynsam"].model_copy(update={"tuned": [tuning]})
    monkeypatch.setattr("flatfed.papers.presets.papers", lambda: {"fedsynsam": paper})
    rates = {
        cell.title: cell.config["training"]["lr"]
        for cell in chosen_cells("fedsynsam/table2", ["FedSAM"], "Fashion-MNIST", tuned=True)
    }
    assert {rate for title, rate in rates.items() if "path(1)" in title} == {0.5}
    assert {rate for title, rate in rates.items() if "path(1)" not in title} == {0.05}


def test_a_step_size_of_ones_own_is_nobody_elses():
    (changed,) = chosen_cells(
        "fedsagd/table2", ["FedAvg"], "EMNIST-L", assignments=["training.lr=0.5"], tuned=True
    )
    assert (changed.origin, changed.config["training"]["lr"]) == ("--set", 0.5)


# -- running them -----------------------------------------------------------------------------------------


def key(table, cell):
    """What there is to try about a cell: its block, its model on its data, its method's settings."""
    paper = table.partition("/")[0]
    config = cell.config  # shrinking goes by the names of data and model, so it tells apart no more
    data = config["data"]["dataset"], json.dumps(config["model"], sort_keys=True)
    return {("block", table, cell.block), ("data", *data), ("method", paper, unaliased(paper, cell.method))}


def unaliased(paper, method):
    return papers()[paper].aliases.get(method, method)


def plan():
    """The fewest cells, greedily, that leave out no block, no model, no data and no method."""
    tried: set = set()
    chosen: dict[str, list] = {}
    for table in TABLES:
        waiting = [(cell, key(table, cell)) for cell in cells(table)]
        while waiting:
            best = max(waiting, key=lambda entry: len(entry[1] - tried))
            if best[1] <= tried:
                break
            tried |= best[1]
            chosen.setdefault(table, []).append(best[0])
            waiting.remove(best)
    return chosen


PLAN = plan()


def test_the_plan_leaves_nothing_out():
    assert list(PLAN) == TABLES

    def methods(chosen):
        papers_of = ((table.partition("/")[0], cell) for table in TABLES for cell in chosen[table])
        return {(paper, unaliased(paper, cell.method)) for paper, cell in papers_of}

    assert methods(PLAN) == methods({table: cells(table) for table in TABLES})
    assert methods(PLAN) == {(name, method) for name, paper in papers().items() for method in paper.methods}
    for table in TABLES:
        assert {cell.block for cell in PLAN[table]} == set(range(len(tables()[table].blocks)))


@pytest.mark.parametrize("table", TABLES)
def test_the_command_runs_a_table_at_small_scale(table, folder, monkeypatch):
    planned = {(cell.block, cell.label) for cell in PLAN[table]}

    def picked(*arguments):
        return [cell for cell in chosen_cells(*arguments) if (cell.block, cell.label) in planned]

    monkeypatch.setattr("flatfed.papers.reproduce.chosen_cells", picked)
    # Cells that several tables have in common are run once.
    arguments = ["reproduce", table, "--scale", "small", "--seeds", "1", "--runs", str(folder / "runs")]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert f"{len(planned)} cells × 1 seeds" in done.stdout
    assert "left out" not in done.stderr
    shown = " ".join(done.stdout.split())
    for cell in PLAN[table]:
        assert cell.label.split(",")[0] in shown
    for cell in picked(table, [], None, None, "small"):
        config = seeded(cell, 0)
        assert is_complete(config, run_folder(config, folder / "runs"))
    for note in tables()[table].notes:
        assert " ".join(note.split())[:40] in shown


def test_only_and_methods_choose_cells(folder):
    which = ["--only", "EMNIST-L", "--methods", "FedSAGD", "--methods", "fedavg", "--seeds", "2"]
    arguments = ["reproduce", "fedsagd/table2", "--scale", "small", *which, "--runs", str(folder / "own")]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert "2 cells × 2 seeds; 4 runs to do, 8 rounds" in done.stdout
    assert "82.24" in done.stdout and "81.01" in done.stdout
    assert sum(path.is_dir() for path in (folder / "own").iterdir()) == 4


def test_tuned_step_sizes_are_shown_with_their_origin(folder):
    which = ["--only", "EMNIST-L", "--methods", "FedAvg", "--seeds", "1", "--tuned"]
    arguments = ["reproduce", "fedsagd/table2", "--scale", "small", *which, "--runs", str(folder / "tuned")]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    (tuned,) = chosen_cells("fedsagd/table2", ["FedAvg"], "EMNIST-L", tuned=True)
    shown = " ".join(done.stdout.split())
    assert f"{tuned.config['training']['lr']:g} (flatfed tune)" in shown
    assert f"lr (flatfed tune): {tuned.origin.partition(': ')[2]}" in shown


def test_deviations_between_clients_stand_beside_the_papers(folder):
    which = ["--only", "CIFAR-10,", "--methods", "FedSAM", "--seeds", "2"]
    root = folder / "deviations"
    arguments = ["reproduce", "fedsam/table1", "--scale", "small", *which, "--runs", str(root)]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    written = [json.loads((run / "clients.json").read_text()) for run in root.iterdir() if run.is_dir()]
    for name, key, printed in (("train", "accuracy", 1.08), ("test", "test_accuracy", 3.87)):
        deviations = [statistics.pstdev(client[key] for client in run["clients"]) for run in written]
        chance = statistics.fmean(run["spread"][name]["chance"] for run in written)
        mean, between = 100 * statistics.fmean(deviations), 100 * statistics.stdev(deviations)
        assert f"{printed} | {mean:.1f} ± {between:.1f} ({100 * chance:.1f})" in done.stdout


SHRUNK = ("data.clients=4", "data.options.verify=false", "training.participation=0.5", "training.rounds=2")


def test_the_cells_of_a_table_can_be_swept(folder):
    changes = [part for assignment in SHRUNK for part in ("--set", assignment)]
    which = ["--only", "EMNIST-L", "--methods", "FedAvg", "--methods", "FedSAGD", "--seed", "7"]
    runs = ["--runs", str(folder / "swept")]
    grid = ["--choose-by", "test", "--grid", "training.lr=0.01,0.1"]
    arguments = ["tune", "fedsagd/table2", *grid, *which, *changes, *runs]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    folders = [path for path in (folder / "swept").iterdir() if path.is_dir()]
    assert {path.name.split("-")[0] for path in folders} == {"emnist_l"}
    assert sorted(path.name.split("-")[2:4] for path in folders) == [
        *[["fedavg", "seed7"]] * 2,
        *[["fedsagd", "seed7"]] * 2,
    ]
    best = [line for line in done.stdout.splitlines() if line.startswith("flatfed reproduce fedsagd/table2")]
    assert len(best) == 2
    for line, method in zip(best, ("FedAvg", "FedSAGD"), strict=True):
        parsed = shlex.split(line)[1:]
        trials = [
            (config["training"]["lr"], max(json.loads(line)["test_accuracy"] for line in history))
            for path in folders
            if f"-{method.lower()}-" in path.name
            for config in [json.loads((path / "config.json").read_text())]
            for history in [(path / "history.jsonl").read_text().splitlines()[-1:]]
        ]
        assert parsed[parsed.index("--methods") + 1] == method
        assert float(parsed[-1].partition("=")[2]) in {
            rate for rate, value in trials if value == max(value for _, value in trials)
        }
        again = CliRunner().invoke(cli.app, [*parsed, "--seeds", "1", *runs])
        assert again.exit_code == 0 and "1 cells × 1 seeds" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fedsagd/table2", "--methods", "FedSAG"], "did you mean 'FedSAGD'?"),
        (["examples/digits.toml", "--only", "EMNIST-L"], "--methods and --only choose cells of a paper's"),
    ],
)
def test_bad_tuning_is_one_clear_line(arguments, complaint):
    done = CliRunner().invoke(cli.app, ["tune", *arguments, "--grid", "training.lr=0.1"])
    assert done.exit_code == 2
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_settings_of_a_table_can_be_changed():
    changed = chosen_cells(
        "fednsam/table3", ["FedAvg"], "ViT", 7, "full", ["model.pretrained=weights", "training.lr=0.5"]
    )
    assert [cell.config["model"]["pretrained"] for cell in changed] == ["weights"]
    assert [cell.config["training"]["lr"] for cell in changed] == [0.5]
    assert [cell.config["training"]["rounds"] for cell in changed] == [7]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fedsagd/table2", "--only", "EMNIST-L", "--set", "training.lrr=1"], "training.lrr: unknown"),
        (["fedsagd/table99"], "table = 'fedsagd/table99': unknown"),
        (["fedsagd/table2", "--methods", "FedSAG"], "did you mean 'FedSAGD'?"),
        (["fedsagd/table2", "--only", "MNIST-X"], "only = 'MNIST-X': matches no part"),
        (["fedsagd/table2", "--scale", "tiny"], "scale = 'tiny': must be one of: full, laptop, small"),
        (["fedswa/table2", "--tuned"], "tuned: no tuning is on record for these cells of fedswa/table2"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, complaint):
    done = CliRunner().invoke(cli.app, ["reproduce", *arguments])
    assert done.exit_code == 2
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
