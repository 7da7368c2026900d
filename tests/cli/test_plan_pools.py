"""``wattshift plan pools``: what it prints, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import CliError
from services.cli.main import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "pools" / "freesh-first.json"


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return what the command prints as JSON."""
    app(["plan", "pools", *arguments, "--json"], standalone_mode=False)
    return json.loads(capsys.readouterr().out)


def test_the_example_is_solved_as_it_was_published(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, str(EXAMPLE), "--objective", "carbon", "--solver", "highs")
    assert found["status"] == "optimal"
    assert found["objective"] == pytest.approx(2968552523.0942135, rel=1e-6)
    assert found["partition"] == "a"
    assert sum(each["count"] for each in found["instances"]) == 6
    assert found["energy_kwh"] == pytest.approx(
        sum(each["count"] * each["power_w"] for each in found["instances"]) / 2e3
    )
    assert found["emissions_kg"] == pytest.approx(2968552523.0942135 / 3.6e9 * 0.45359237)
    assert found["gap"] <= 1e-6
    assert 0 < found["solve_s"] < 60


def test_any_partition_may_be_chosen_whatever_the_file_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, str(EXAMPLE), "--partition", "any")
    assert found["partition"] == "b"
    assert found["emissions_kg"] < 0


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    app(["plan", "pools", str(EXAMPLE), "--objective", "energy"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "optimal, partition a" in shown
    assert "kgCO2" in shown


def test_what_is_not_served_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = json.loads(EXAMPLE.read_text())
    document["locations"] = document["locations"][:1]
    file = tmp_path / "small.json"
    file.write_text(json.dumps(document))
    app(["plan", "pools", str(file)], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "not all demand can be served: the plan that leaves the least, partition a, found in" in shown
    assert "%" not in shown, "a gap to the bound of what can not be done says nothing"
    assert "requests/s are not served" in shown
    assert "no GPUs left: A100 in loc1, H100 in loc1" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.json",), "cannot be read"),
        ((str(EXAMPLE), "--partition", "c"), "no partition c"),
        ((str(EXAMPLE), "--objective", "cost"), "no price_per_kwh"),
        ((str(EXAMPLE), "--solver", "cplex"), "--solver: must be 'highs', 'cbc' or 'gurobi'"),
        ((str(EXAMPLE), "--gap", "2"), "--gap: must be at most 1.0, not 2"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(CliError, match=message):
        app(["plan", "pools", *arguments], standalone_mode=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"locations": []}, "locations: must have at least 1 entry"),
        ({"step_s": "five minutes"}, "step_s: must be a number, not 'five minutes'"),
        ({"modes": [{"name": "A100_TP2", "gpus": {}}]}, "mode A100_TP2 takes no GPU"),
        ({"colour": "red"}, "colour: is not a known field"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "pools.json"
    file.write_text(json.dumps(json.loads(EXAMPLE.read_text()) | change))
    with pytest.raises(CliError, match=message):
        app(["plan", "pools", str(file)], standalone_mode=False)
