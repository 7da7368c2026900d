"""``wattshift lab inference``: what it prints, and how it refuses."""

from __future__ import annotations

import json

import pytest

from lab.commands import app
from services.cli.commands import CliError

NEEDED = (
    *("carbon_saving_pct", "accuracy_loss_pct", "p95_over_sla", "objective_mean", "evaluations", "sla_ok_share"),
    *("optimisation_time_share", "wall_s"),
)
SMALL = ("--carbon", "ciso-march", "--gpus", "1", "--hours", "2")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the command prints."""
    app(["inference", *arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_the_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, *SMALL, "--scheme", "clover", "--lambda", "0.5", "--seed", "1", "--json"))

    assert all(found[name] is not None for name in NEEDED)
    assert found["hours"] == 2


def test_people_get_a_table_and_the_mix(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, *SMALL, "--scheme", "base", "--bound")

    assert "Objective" in shown
    assert "1 b7 on 7g" in shown
    assert "no configuration has a mean objective above" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--carbon", "nowhere.csv"), "no file 'nowhere.csv'"),
        ((*SMALL, "--profile", "nowhere.csv"), "--profile: there is no file"),
        ((*SMALL, "--accuracy", "nowhere.json"), "--accuracy: there is no file"),
        ((*SMALL, "--lambda", "1.5"), "lambda is a weight from 0 to 1"),
        ((*SMALL, "--family", "yolo"), "no family 'yolo'"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(CliError, match=message):
        run(capsys, *arguments)
