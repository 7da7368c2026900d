"""Figures as people read them."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from services.cli import output
from services.cli.commands import CliError
from services.cli.plots import sparkline
from services.cli.site.cluster import meter_words, parameters_of, power_words
from tests.support.servers import ROOT


@pytest.mark.parametrize(("energy_j", "words"), [(0, "0 J"), (999, "999 J"), (3_600, "1.00 Wh"), (3.6e6, "1.000 kWh")])
def test_energy(energy_j: float, words: str) -> None:
    assert output.energy(energy_j) == words


@pytest.mark.parametrize(
    ("gco2", "words"), [(0, "0.0 mg"), (0.5, "500.0 mg"), (12, "12.00 g"), (1_500, "1.500 kg"), (-2, "-2.00 g")]
)
def test_carbon(gco2: float, words: str) -> None:
    assert output.carbon(gco2) == words


@pytest.mark.parametrize(
    ("amount", "words"),
    [(0.0, "0"), (0.00123, "0.00123"), (12.345, "12.3"), (99.97, "100"), (1234.56, "1234.6"), (-1234.56, "-1234.6")],
)
def test_a_small_amount_is_not_rounded_to_nothing(amount: float, words: str) -> None:
    assert output.rounded(amount) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1 min"), (3_725, "1 h 2 min"), (90_061, "1 d 1 h"), (-1, "0 s")],
)
def test_duration(seconds: float, words: str) -> None:
    assert output.duration(seconds) == words


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([1, 2, 3])[0::2] == "▁█"
    assert sparkline([5, 5]) == "▁▁"
    assert sparkline([]) == ""


@pytest.mark.parametrize(
    ("draining", "state", "pinned", "words"),
    [
        (False, "on", False, []),
        (True, "on", True, ["[yellow]draining[/]", "[cyan]pinned[/]"]),
        (False, "going_down", False, ["[blue]going down -[/]"]),
        (False, "failed", False, ["[red]failed -[/]"]),
    ],
)
def test_what_a_node_s_line_says_of_its_power(draining: bool, state: str, pinned: bool, words: list[str]) -> None:
    power = {"state": state, "since": None, "pinned_awake": pinned}
    assert power_words({"draining": draining, "power": power}) == words


def test_a_node_that_only_measures_is_shown_so() -> None:
    node = {"draining": False, "power": {"state": "on", "pinned_awake": False}}
    shown = power_words(node | {"measures_only": True, "engine_node": "slurm.gpu-1"})
    assert shown == ["[cyan]only measures[/] slurm.gpu-1"]


def test_parameters_are_json_where_they_can_be() -> None:
    assert parameters_of(["mu=1.5", "gang=max", "fixed_gpus=null", "x=a=b"]) == {
        "mu": 1.5,
        "gang": "max",
        "fixed_gpus": None,
        "x": "a=b",
    }
    with pytest.raises(CliError, match="key=value"):
        parameters_of(["mu"])


def test_the_check_of_a_nodes_meters_is_shown_in_a_word() -> None:
    def node(*ratios: float | None, marked: int = 0) -> dict[str, Any]:
        readings = [{"index": n, "energy_j": 1.0, "counter_ratio": ratio} for n, ratio in enumerate(ratios)]
        return {"readings": [*readings, {"index": 1024}], "marked_intervals": marked}

    assert meter_words({"readings": []}) == "[dim]unchecked[/]"
    assert meter_words(node(None)) == "[dim]unchecked[/]"
    assert meter_words(node(0.9, 1.1)) == "[green]agree[/]"
    assert meter_words(node(0.9, None)) == "[dim]some unchecked[/]"
    assert meter_words(node(1.0, 0.1, marked=7)) == (
        "[yellow]GPU 1: 0.1 x its power[/]\n[yellow]7 intervals not as measured[/]"
    )


def test_a_column_keeps_the_unit_of_its_largest_value() -> None:
    assert output.energies([432, 1_728, 651_600, None, 0, -9_000]) == [
        *("0.0001 kWh", "0.0005 kWh", "0.181 kWh", "unknown", "0.000 kWh", "-0.003 kWh")
    ]
    assert output.emissions([0.01, 1_500, -3e-7]) == ["0.00001 kg", "1.500 kg", "-0.0000000003 kg"]
    assert output.times([323, 2_369]) == ["5.38 min", "39.48 min"]
    assert (output.energy(432), output.carbon(0.0115), output.emissions([])) == ("432 J", "11.5 mg", [])


def test_a_moment_is_on_this_machines_clock_and_says_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "CET-1")
    time.tzset()
    try:
        assert output.clock("2026-03-01T23:30:00Z") == "Mon 2026-03-02 00:30 CET"
    finally:
        monkeypatch.undo()
        time.tzset()
    assert output.clock(None) == "-"


def test_every_time_of_day_that_is_printed_says_its_zone() -> None:
    """It is printed by `clock`, or its zone is written with it."""
    texts = [path.read_text() for path in Path(output.__file__).parent.rglob("*.py") if path.name != "forms.py"]
    lines = [line for text in texts for line in text.splitlines() if "%H:%M" in line]
    said = re.compile(r"clock\(|^SECONDS|UTC|tzname|^ +(first|last)=f")  # the last two stand before `UTC`

    assert len(lines) > 10
    assert [line for line in lines if not said.search(line)] == []
    assert not any(re.search(r"_at\"\].*\[:1[69]\]", text) for text in texts)


def test_a_command_ends_well_whatever_its_output_is() -> None:
    program = f"{sys.executable} -c 'from services.cli.output import console; console.print(chr(9679))'"
    closed = subprocess.run(["sh", "-c", f"{program} >&-"], capture_output=True, check=False, cwd=ROOT)
    assert (closed.returncode, closed.stderr) == (0, b"")
    narrow = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ascii_only = subprocess.run(["sh", "-c", program], capture_output=True, check=False, cwd=ROOT, env=narrow)
    assert (ascii_only.returncode, ascii_only.stdout) == (0, b"\\u25cf\n")
