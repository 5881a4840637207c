"""The papers' tables of bounds."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from flatfed.cli import app
from flatfed.core.errors import FlatfedError
from flatfed.core.files import read_toml
from flatfed.papers import bounds, schema
from flatfed.papers.schema import FOLDER, read
from flatfed.papers.theorems import bounds_tables


def rows_of(name: str) -> dict[str, dict[str, str]]:
    (table,) = bounds_tables(name)
    columns = [column.replace("\n", " ") for column in table.columns]
    return {row[0].text: dict(zip(columns, (cell.text for cell in row), strict=True)) for row in table.rows}


def test_table_1_of_stability_has_what_is_printed_beside_what_follows():
    rows = rows_of("fedsagd/table1")
    assert list(rows) == list(bounds()["fedsagd/table1"].rows)
    assert rows["FedAvg"]["value"] == rows["FedAvg"]["from its rule"] == "3.082e+04"
    # Twice what is printed: one for the dual, one for the server's h.
    assert (rows["FedDyn"]["value"], rows["FedDyn"]["label"]) == ("6.091e+04", "as printed")
    assert float(rows["FedDyn"]["from its rule"]) > 20 * float(rows["FedDyn"]["value"])
    sagd = rows["FedSAGD"]
    assert (sagd["value"], sagd["label"], sagd["vectors"]) == ("4.285e+05", "as printed", "2 down, 1 up")
    assert sagd["historical gradients"] == "client momentum" and sagd["proximal term"] == "yes"
    assert float(rows["SCAFFOLD"]["in a round as printed"]) == pytest.approx(46.23, abs=0.01)
    assert float(rows["SCAFFOLD"]["in a round from its rule"]) == pytest.approx(2 / 3 * 46.233, abs=0.01)
    (table,) = bounds_tables("fedsagd/table1")
    assert "Θ = 3.082 as printed, and 2.236 suffices" in table.note
    assert "Theorem C.12 gives 1.163e+04, Theorem 3.7 8.569e+05" in table.note
    assert re.search("FedDyn: exceeded", table.note)


def test_table_1_of_generalisation_says_what_it_rests_on():
    rows = rows_of("fedswa/table1")
    assert list(rows) == ["FedSAM", "MoFedSAM", "FedSWA", "FedMoSWA"]
    (table,) = bounds_tables("fedswa/table1")
    optimisation = [float(row[6].text) for row in table.rows]
    assert optimisation[2:] == pytest.approx([0.1439, 0.1118]) and optimisation[0] == pytest.approx(
        0.0502, abs=1e-4
    )
    generalisation = [float(row[2].text) for row in table.rows]
    assert generalisation[2:] == pytest.approx([7.663e6, 6.130e6], rel=1e-3)
    # Corrected, nothing is left of the difference but 0.02 %.
    corrected = [float(row[3].text) for row in table.rows]
    assert corrected[2:] == pytest.approx([1.362e-5, 1.362e-5], rel=1e-3)
    assert "FedSAM, MoFedSAM, FedSWA, FedMoSWA; generalisation: not met: N = 100 ≤ 10" in table.note
    assert "FedSWA; optimisation: the paper has no proof of it." in table.note


def test_a_table_of_bounds_is_printed_and_its_rows_are_chosen():
    done = CliRunner().invoke(app, ["reproduce", "fedsagd/table1", "--methods", "FedDyn"])
    assert done.exit_code == 0, done.output
    assert "4λ⁻¹Θ[1" in done.output and "SCAFFOLD" not in done.output and "ICLR 2026" in done.output
    assert "fedswa/table1" in CliRunner().invoke(app, ["reproduce"]).output
    with pytest.raises(FlatfedError, match="methods = 'FedDin': unknown; did you mean 'FedDyn'"):
        bounds_tables("fedsagd/table1", ["FedDin"])


def test_an_unknown_method_is_one_clear_line(monkeypatch):
    values = read_toml(FOLDER / "fedswa.toml")
    values["bounds"]["table1"]["rows"]["FedSWAG"] = ["", ""]
    monkeypatch.setattr(schema, "read_toml", lambda _: values)
    with pytest.raises(FlatfedError, match=r"table1: method 'FedSWAG' is unknown; did you mean 'FedSWA'\?"):
        read(FOLDER / "fedswa.toml")
