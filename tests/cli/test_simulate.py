"""``wattshift simulate training``: what it prints, and how it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import CliError
from services.cli.main import app
from services.cli.planning import simulate
from services.contracts.simulations import TrainingOptions
from services.simulator.training import Inputs, prepare

DAY = ["simulate", "training", "--jobs", "green-day", "--carbon", "GB", "--start", "2023-08-01", "--days", "0.2"]
NEEDED = {"policy", "jobs", "completed", "avg_jct_s", "p99_jct_s", "makespan_s", "energy_kwh", "carbon_kg"} | {
    "peak_power_w",
    "preemptions",
    "rounds",
    "wall_s",
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the command prints."""
    app([*DAY, *arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_one_policy_is_one_object_and_several_are_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    one = json.loads(run(capsys, "--policy", "green", "--param", "mu=1.5", "--json"))
    two = json.loads(run(capsys, "--policy", "fifo,las", "--param", "las.promote_knob=2", "--json"))

    assert all(one[name] is not None for name in NEEDED)
    assert one["completed"] == one["jobs"] > 50
    assert one["parameters"] == {"mu": 1.5}
    assert [each["policy"] for each in two] == ["fifo", "las"]
    assert [each["parameters"] for each in two] == [{}, {"promote_knob": 2}]


def test_a_trace_without_dates_begins_with_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DAY[:6], "--days", "0.2", "--policy", "fifo", "--json"]
    figures: list[dict[str, Any]] = []
    for start in ([], ["--start", "2022-12-31"]):
        app([*words, *start], standalone_mode=False)
        figures.append({**json.loads(capsys.readouterr().out), "wall_s": 0.0, "notes": []})
    assert figures[0] == figures[1]


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Mean JCT" in run(capsys, "--policy", "fifo,joint")


def test_people_are_shown_what_became_of_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = "2023-08-01T00:00:00Z,2023-08-01T00:00:00Z,2023-08-01T01:00:00Z"
    jobs = tmp_path / "jobs.csv"
    jobs.write_text(f"job_id,submitted_at,started_at,ended_at,gpus,slice\na,{at},1,2g\nb,{at},1,\n")

    shown = run(capsys, "--policy", "fifo", "--jobs", str(jobs), "--cluster", "1x2:A100[3g,2g,2g/whole]")

    assert "fifo, slices: 2g x 2: jobs ended 1, held 1.0 h; 3g x 1: jobs ended 0, held 0.0 h" in shown
    assert "speed on slices, jobs: 1 by the slice's share of the compute (assumed: 2g is 2/7 of a GPU)" in shown


@pytest.mark.parametrize(
    ("arguments", "complaint", "code"),
    [
        (["--policy", "gree"], "unknown policy 'gree'", 2),
        (["--policy", "green", "--param", "mu=0"], "at least 1", 2),
        (["--policy", "green", "--param", "nu=1"], "sets no parameter", 2),
        (["--policy", "fifo", "--jobs", "nowhere.csv"], "no job trace", 3),
        (["--policy", "fifo", "--carbon", "XX"], "no grid", 3),
        (["--policy", "fifo", "--carbon", "GB", "--start", "1999-01-01"], "known only from", 2),
        (["--policy", "fifo", "--cluster", "2by2"], "not a node group", 2),
        (["--policy", "fifo", "--recipe", "soup"], "unknown recipe", 2),
        (["--policy", "fifo", "--jobs", __file__], "not a known job trace", 2),
        (["--policy", "fifo", "--signal", "smoke"], "unknown signal", 2),
    ],
)
def test_a_mistake_is_one_line_and_an_exit_code(arguments: list[str], complaint: str, code: int) -> None:
    with pytest.raises(CliError, match=complaint) as caught:
        app([*DAY, *arguments], standalone_mode=False)
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)


def test_a_format_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text("a,b\n1,2\n")
    with pytest.raises(CliError) as caught:
        app([*DAY, "--policy", "fifo", "--jobs", str(tmp_path / "jobs.csv"), "--format", "swf"], standalone_mode=False)
    assert caught.value.exit_code == 2


def test_policies_may_see_four_days_ahead_by_the_forecasts_of_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    slack = ["--param", "fixed_gpus=1", "--param", f"slack_s={4 * 86_400}", "--param", "starvation_s=null"]
    arguments = ["--policy", "green", "--cluster", "64x8:RTX3090", *slack, "--forecast", "issued", "--json"]
    day, days = (json.loads(run(capsys, *arguments, "--horizon-hours", hours)) for hours in ("6", "96"))

    assert day["completed"] == days["completed"] == day["jobs"]
    assert day["avg_jct_s"] < days["avg_jct_s"]


def test_the_report_is_one_page_with_the_curves_the_front_and_the_bound(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "run.html"

    run(capsys, "--policy", "las,green", "--report", str(page))

    text = page.read_text(encoding="utf-8")
    assert re.findall(r"<h2>([^<]*)</h2>", text) == [
        *("Figures", "Carbon against completion time", "Power", "Intensity", "Queue", "Inputs")
    ]
    assert len(re.findall("<circle", text)) == 2
    assert re.search(r"bound: [\d.]+ kg", text)
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"<script|\ssrc=|https?://[^<]*\.(?:js|css)", text)


def test_a_report_without_the_lab_says_which_package_makes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(simulate, "load_plugins", lambda *_: iter(()))

    with pytest.raises(CliError, match=r"^--report: .* wattshift-lab, .*pip install \./lab$"):
        app([*DAY, "--policy", "las", "--report", str(tmp_path / "run.html")], standalone_mode=False)


@pytest.mark.parametrize("place", ["missing/run.html", "."])
def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, place: str) -> None:
    with pytest.raises(CliError, match="--report"):
        app([*DAY, "--policy", "green", "--report", str(tmp_path / place)], standalone_mode=False)


def test_progress_ends_full() -> None:
    options = TrainingOptions(policy="fifo,las", cluster="1x1:RTX3090", start="2023-08-01", days=0.1, round_minutes=7)
    told: dict[str, tuple[int, int]] = {}

    for _ in prepare(options, Inputs("green-day", "GB", "perfect")).results(
        lambda name, done, of: told.update({name: (done, of)})
    ):
        pass

    assert [done == of > 0 for done, of in told.values()] == [True, True]
