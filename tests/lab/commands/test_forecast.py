"""``wattshift lab forecast``: a list from a file, of any zone, or one line that says what is wrong with the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.commands import app
from services.cli.commands import EXIT_NOT_FOUND, EXIT_USAGE, CliError

HEADER = (
    "Datetime (UTC),Country,Zone name,Zone id,Carbon intensity gCO₂eq/kWh (direct),"
    "Carbon intensity gCO₂eq/kWh (Life cycle),Carbon-free energy percentage (CFE%),Renewable energy percentage (RE%),"
    "Data source,Data estimated,Data estimation method"
)
FIRST = np.datetime64("2022-01-01T00:00")


def rows_of(hours: int) -> list[str]:
    """Return rows of a zone that no recording has, in Electricity Maps' columns."""
    rng = np.random.default_rng(5)
    hour = np.arange(hours)
    value = (
        200
        + 50 * np.sin(2 * np.pi * hour / 24)
        + np.convolve(rng.normal(0, 9, hours + 30), 0.9 ** np.arange(31), "valid")
    )
    return [
        f"{str(FIRST + np.timedelta64(int(at), 'h')).replace('T', ' ')}:00,Nowhere,Nowhere,XX,{v:.2f},{v + 50:.2f},"
        f"{90 - v / 5:.2f},{60 - v / 9:.2f},someone,False,"
        for at, v in zip(hour, value, strict=True)
    ]


def file_of(folder: Path, rows: list[str], header: str = HEADER) -> Path:
    """Return a file of rows."""
    file = folder / "history.csv"
    file.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return file


def predicted(capsys: pytest.CaptureFixture[str], file: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Return what the command prints, and what it says beside it."""
    app(["forecast", "--zone", "XX", "--history", str(file), "--json", *arguments], standalone_mode=False)
    told = capsys.readouterr()
    return json.loads(told.out), told.err


def test_a_zone_never_seen_is_predicted_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(24 * 60)
    holed = [row.replace(row.split(",")[4], "", 1) if at % 50 == 7 else row for at, row in enumerate(rows) if at % 61]
    found, said = predicted(capsys, file_of(tmp_path, holed), "--at", "2022-03-02T00:00Z", "--hours", "96")
    assert said.splitlines() == [
        "wattshift: history.csv: read as electricity-maps; 1387 of 1416 rows kept",
        "wattshift: dropped 29: no value (line 8, 58, 107, 156, 205, ...)",
    ]
    assert len(found) == 96
    assert list(found[0]) == ["time", "gco2_per_kwh", "p10", "p90"]
    assert (found[0]["time"], found[-1]["time"]) == ("2022-03-02T00:00:00Z", "2022-03-05T23:00:00Z")
    assert all(0 <= each["p10"] <= each["gco2_per_kwh"] <= each["p90"] for each in found)


def test_rows_from_the_moment_on_are_not_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(24 * 50)
    at = ("--at", str(FIRST + np.timedelta64(24 * 45, "h")) + "Z", "--hours", "24")
    whole, _ = predicted(capsys, file_of(tmp_path, rows), *at)
    ended, _ = predicted(capsys, file_of(tmp_path, rows[: 24 * 45]), *at)
    assert whole == ended


def test_the_signal_is_the_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = file_of(tmp_path, rows_of(24 * 3))
    direct, said = predicted(capsys, file, "--hours", "5")
    lifecycle, _ = predicted(capsys, file, "--hours", "5", "--signal", "lifecycle")
    assert "pretrained: about" in said
    assert "3 are given" in said
    for one, other in zip(direct, lifecycle, strict=True):
        assert other["gco2_per_kwh"] == pytest.approx(one["gco2_per_kwh"] + 50, abs=5)


@pytest.mark.parametrize(
    ("rows", "header", "arguments", "message"),
    [
        ([], HEADER, (), "no value can be used"),
        (rows_of(30), "a,b,c", (), "is not a known carbon file"),
        (rows_of(30), HEADER, ("--zone", "YY"), "another zone"),
        (rows_of(30), HEADER, ("--at", "yesterday"), "--at is not a date and time"),
        (rows_of(30), HEADER, ("--at", "2021-06-01T00:00Z"), "nothing before 2021-06-01T00:00:00Z"),
        (rows_of(30), HEADER, ("--at", "2022-06-01T00:00Z"), "more than a week before"),
        (rows_of(30), HEADER, ("--hours", "0"), "1 to 168 h ahead"),
        (rows_of(30), HEADER, ("--signal", "marginal"), "no marginal intensity"),
        (rows_of(30), HEADER, ("--signal", "best"), "unknown signal"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path, rows: list[str], header: str, arguments: tuple[str, ...], message: str
) -> None:
    file = file_of(tmp_path, rows, header)
    with pytest.raises(CliError, match=message) as refused:
        app(["forecast", "--zone", "XX", "--history", str(file), *arguments], standalone_mode=False)
    assert refused.value.exit_code == EXIT_USAGE
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"there is no file .*lacking.csv") as refused:
        app(["forecast", "--zone", "XX", "--history", str(tmp_path / "lacking.csv")], standalone_mode=False)
    assert refused.value.exit_code == EXIT_NOT_FOUND


def test_forecasts_of_wind_in_the_file_are_learned_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(9)
    wind = np.repeat(rng.uniform(0, 100, 81), 24)
    rows = [
        f"{at},{FIRST + np.timedelta64(at, 'h')}:00,{500 - 4 * w if at < 80 * 24 else ''},{w:.1f}"
        for at, w in enumerate(wind)
    ]
    file = file_of(tmp_path, rows, ",UTC time,carbon_intensity,avg_wind_production_forecast")
    found, _ = predicted(capsys, file, "--at", "2022-03-22T00:00Z", "--hours", "24")
    assert np.mean([point["gco2_per_kwh"] for point in found]) == pytest.approx(500 - 4 * wind[-1], abs=30)
