"""``wattshift lab fit``: what it prints, and how it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lab.commands import app
from lab.commands.fit import TIME, read_points
from services.cli.commands import CliError
from tests.support.performance import CLOCKS_MHZ, SPEED, grid, measured
from tests.unit.core.profiles.test_capped import points

HEADER = ["gpus", "local_batch", "clock_mhz", "nodes", "seconds_per_iteration", "energy_j_per_iteration"]


@pytest.fixture(autouse=True)
def _few_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the points is held out at a time: ``tests/lab/fits`` judges by tenths."""
    monkeypatch.setattr("lab.fits.FOLDS", 3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of a planted job with 2 % noise."""
    planted = measured(grid(gpus=(1, 2, 8, 16), batches=(16, 32, 64), clocks=CLOCKS_MHZ[::2]), noise=0.02)
    names = ("gpus", "local_batch", "control", "nodes", "seconds_per_iteration", "energy_j_per_iteration")
    rows = zip(*(getattr(planted, name).tolist() for name in names), strict=True)
    path = tmp_path / "points.csv"
    write(path, HEADER, [[f"{value:.8g}" for value in row] for row in rows])
    return path


def write(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a CSV."""
    path.write_text("".join(",".join(row) + "\n" for row in [header, *rows]), encoding="utf-8")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the command prints."""
    app(["fit", *arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_both_models_come_as_one_object_with_their_held_out_error(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speed = json.loads(run(capsys, "throughput", str(file), "--json"))
    energy = json.loads(run(capsys, "energy", str(file), "--json"))

    assert speed["parameters"]["kappa_grad"] == pytest.approx(SPEED.kappa_grad, rel=0.2)
    assert 0 < speed["mape"] < 0.04
    assert 0 < energy["mape"] < 0.05
    assert speed["points"] == 72
    assert speed["form"] == energy["form"] == "paper"
    assert "residuals" not in speed
    assert speed["spread"]["gpus"] == {"distinct": 4, "least": 1.0, "greatest": 16.0}
    assert set(energy["standard_errors"]) == set(energy["parameters"])


def test_people_get_a_table_and_the_reasons(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split(",") for line in file.read_text().splitlines()[1:]]
    few = tmp_path / "few.csv"
    write(few, ["note", HEADER[1], HEADER[4]], [["x", row[1], row[4]] for row in rows if row[0] == "1"])

    shown = run(capsys, "throughput", str(few))

    assert "MAPE on points left out" in shown
    assert "clock_mhz is absent" in shown
    assert "gpus is absent" in shown


@pytest.fixture
def limits(tmp_path: Path) -> Path:
    """Return a file of a planted job under power limits, with energies and 1 % noise."""
    seen = points(noise=0.01)
    names = ("local_batch", "control", "seconds_per_iteration", "energy_j_per_iteration")
    rows = zip(*(getattr(seen, name).tolist() for name in names), strict=True)
    path = tmp_path / "limits.csv"
    write(path, ["local_batch", "power_limit_w", *HEADER[4:]], [[f"{value:.8g}" for value in row] for row in rows])
    return path


def test_limits_with_energies_are_fitted_in_the_form_in_which_they_bind(
    limits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = json.loads(run(capsys, "energy", str(limits), "--json"))

    assert (ours["model"], ours["form"], ours["axis"]) == ("energy", "capped", "power_limit_w")
    assert 0 < ours["mape"] < 0.015
    assert ours["parameters"]["static_w"] == pytest.approx(36.0, rel=0.3)
    assert set(ours["fixed"]) < set(ours["parameters"]) == set(ours["standard_errors"])
    shown = run(capsys, "throughput", str(limits))
    assert "exponent" in shown
    assert "form: capped (ours)" in shown


def test_without_all_energies_or_without_limits_the_form_is_the_papers(
    limits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [line.split(",") for line in limits.read_text().splitlines()][:9]
    write(limits, rows[0], [[*rows[1][:3], ""], *rows[2:]])
    assert json.loads(run(capsys, "throughput", str(limits), "--json"))["form"] == "paper"
    with pytest.raises(CliError, match="line 2: energy_j_per_iteration is '', not a number"):
        app(["fit", "energy", str(limits)], standalone_mode=False)

    write(limits, ["local_batch", "clock_mhz", *HEADER[4:]], rows[1:])
    with pytest.raises(CliError, match="this form needs power limits") as caught:
        app(["fit", "energy", str(limits), "--form", "capped"], standalone_mode=False)
    assert caught.value.exit_code == 2


def test_an_optional_column_without_any_value_counts_as_absent(
    limits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [line.split(",") for line in limits.read_text().splitlines()][:9]
    write(limits, rows[0], rows[1:])
    as_it_is, lines = read_points(limits, (TIME,), energies=True)
    write(limits, ["gpus", "clock_mhz", *rows[0]], [["", " ", *row] for row in rows[1:]])
    again, same_lines = read_points(limits, (TIME,), energies=True)

    assert lines == same_lines
    for name, values in vars(as_it_is).items():
        np.testing.assert_equal(getattr(again, name), values)

    write(limits, rows[0], [[*row[:3], ""] for row in rows[1:]])
    assert json.loads(run(capsys, "throughput", str(limits), "--json"))["form"] == "paper"
    with pytest.raises(CliError, match="column energy_j_per_iteration is empty on every line"):
        app(["fit", "energy", str(limits)], standalone_mode=False)


@pytest.mark.parametrize(
    ("command", "n_points", "known"), [("throughput", 3, False), ("throughput", 4, True), ("energy", 4, True)]
)
def test_the_held_out_error_is_known_from_four_points_on(
    command: str, n_points: int, known: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "few.csv"
    rows = [["8", "0.1", "20"], ["16", "0.18", "40"], ["32", "0.33", "80"], ["32", "0.34", "81"], ["8", "0.1", "21"]]
    write(path, ["local_batch", *HEADER[4:]], rows[:n_points])

    found = json.loads(run(capsys, command, str(path), "--json"))

    assert (found["points"], found["configurations"]) == (n_points, 3)
    assert (found["mape"] is not None) == known
    assert not known or 0 < found["mape"] < 1


def test_stairs_are_met_by_the_correction_and_it_says_whose_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stairs.csv"
    cells = [(gpus, batch) for gpus in (1, 2, 4) for batch in (8, 12, 16, 24, 32, 48, 64, 96)]
    steps = [
        [str(gpus), str(batch), f"{(0.3 if 16 <= batch < 48 else 0.1) + 0.01 * gpus:.3f}"] for gpus, batch in cells
    ]
    write(path, ["gpus", "local_batch", HEADER[4]], steps)

    found = json.loads(run(capsys, "throughput", str(path), "--residuals", "--json"))
    shown = run(capsys, "throughput", str(path), "--residuals")

    assert found["mape"] < 0.5 * found["mape_of_the_form"]
    assert len(found["residuals"]["at"]) == len(found["residuals"]["weight"]) == len(cells)
    assert set(found["residuals"]["scales"]) == {"gpus", "local_batch", "control", "nodes"}
    assert "residual correction (ours): 24 points; without the correction" in shown


@pytest.mark.parametrize(
    ("line", "column", "cell", "complaint"),
    [
        (3, 4, "-0.2", "line 3: seconds_per_iteration is -0.2, not positive"),
        (5, 0, "two", "line 5: gpus is 'two', not a number"),
        (7, 2, "nan", "line 7: clock_mhz is 'nan', not a number"),
        (9, 2, "1200000", "line 9: clock_mhz is 1.2e.06, outside .* wrong units"),
        (11, 4, "97.3", "line 11: seconds_per_iteration is 97.3, .* times off"),
        (4, 3, "1,1", "line 4: 7 cells under 6 columns"),
        (1, 4, "time", "line 1: no column seconds_per_iteration"),
        (1, 3, "gpus", "line 1: a column is there twice"),
    ],
)
def test_a_mistake_is_one_line_that_names_its_own(
    file: Path, line: int, column: int, cell: str, complaint: str
) -> None:
    rows = [row.split(",") for row in file.read_text().splitlines()]
    rows[line - 1][column] = cell
    write(file, rows[0], rows[1:])

    with pytest.raises(CliError, match=complaint) as caught:
        app(["fit", "throughput", str(file)], standalone_mode=False)

    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_energy_needs_times_and_a_file_needs_to_be_there(file: Path, tmp_path: Path) -> None:
    rows = [row.split(",") for row in file.read_text().splitlines()]
    write(file, rows[0][:4] + rows[0][5:], [row[:4] + row[5:] for row in rows[1:]])

    with pytest.raises(CliError, match="no column seconds_per_iteration"):
        app(["fit", "energy", str(file)], standalone_mode=False)
    with pytest.raises(CliError, match="there is no file"):
        app(["fit", "energy", str(tmp_path / "nowhere.csv")], standalone_mode=False)
