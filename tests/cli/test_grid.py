"""Orders of the grid from the shell."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.client import Gateway
from services.cli.commands import CliError
from services.cli.main import app
from services.cli.site import grid
from services.contracts.grid import NO_LIMIT_W
from tests.cli.conftest import NotingGateway

ORDER = {
    "id": "grid_1",
    "state": "in_force",
    "zone": None,
    "start_at": "2026-03-01T18:00:00Z",
    "end_at": "2026-03-01T21:00:00Z",
    "baseline_w": 700.0,
    "limit_w": 455.0,
}


class FakeGateway(NotingGateway):
    """Answers with the order that was given."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []

    def call(self, method: str, path: str, *, body: Any = None, key: str | None = None) -> Any:
        self.keys += filter(None, [key])
        return super().call(method, path, body=body)

    def answer(self, body: Any) -> dict[str, Any]:
        return {**ORDER, "steps": [{"cut": None, "to_w": None, **step} for step in (body or {}).get("steps", [])]}


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    fake = FakeGateway()
    monkeypatch.setattr(grid, "Gateway", fake)
    return fake


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["grid", *words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("words", "step", "shown"),
    [
        (("--cut", "35%"), {"cut": 0.35}, "-35 %"),
        (("--cut", "35"), {"cut": 0.35}, "-35 %"),
        (("--to", "120kW"), {"to_w": 120_000.0}, "120.0 kW"),
        (("--to", "800 W"), {"to_w": 800.0}, "800 W"),
        (("--to", "1.2MW"), {"to_w": 1_200_000.0}, "1200.0 kW"),
    ],
)
def test_a_limit_is_a_share_or_a_power(
    gateway: FakeGateway, words: tuple[str, ...], step: dict[str, float], shown: str
) -> None:
    said = run("order", *words, "--from", "2026-03-01T18:00Z", "--for", "3h", "--notice", "10m")

    ((method, path, body),) = gateway.calls
    assert (method, path, body["steps"]) == ("POST", "/v1/grid/orders", [step])
    assert (body["start_at"], body["duration_s"], body["notice_s"]) == ("2026-03-01T18:00:00+00:00", 10_800, 600)
    assert len(gateway.keys) == 1, "what is sent again is the same order"
    assert shown in said
    assert "baseline 700 W, limit now 455 W" in said


def test_a_profile_is_a_file_and_only_what_is_given_is_amended(gateway: FakeGateway, tmp_path: Path) -> None:
    profile = tmp_path / "peak.csv"
    profile.write_text("minutes,limit\n0,35%\n45,1kW\n")
    steps = [{"offset_s": 0.0, "cut": 0.35}, {"offset_s": 2_700.0, "to_w": 1_000.0}]

    run("order", "--profile", str(profile), "--for", "90m")
    run("amend", "grid_1", "--for", "4h")
    run("withdraw", "grid_1")

    (_, _, given), *others = gateway.calls
    assert given["steps"] == steps
    assert others == [
        ("PATCH", "/v1/grid/orders/grid_1", {"duration_s": 14_400}),
        ("DELETE", "/v1/grid/orders/grid_1", None),
    ]


def test_no_command_sends_a_number_that_json_lacks() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(CliError, match=r"steps\.0\.to_w: must be a finite number"):
            Gateway("http://127.0.0.1:9", "key").call("POST", "/v1/grid/orders", body={"steps": [{"to_w": value}]})


def test_a_report_adds_up_and_says_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {"job_1": (600.0, 300.0), None: (100.0, 160.0)}
    report = {
        "order": {**ORDER, "steps": [{"cut": 0.35, "to_w": None}, {"cut": None, "to_w": NO_LIMIT_W}]},
        "since": "2026-03-01T18:10:00Z",
        "until": "2026-03-01T21:00:00Z",
        **{"baseline_w": 700.0, "limit_w": 455.0, "mean_w": 460.0, "ordered_w": 245.0, "delivered_w": 240.0},
        "amended": [{"until": "2026-03-01T19:30:00Z", "steps": [{"cut": 0.2, "to_w": None}]}],
        **{"above_most": 0.012, "rebound": None, "unheard": 0.25},
        "jobs": [{"job_id": job, "before_w": each[0], "during_w": each[1]} for job, each in jobs.items()],
    }
    monkeypatch.setattr(grid, "Gateway", lambda: SimpleNamespace(get=lambda _: report))
    said = run("report", "grid_1")
    assert "-35 %, no limit" in said
    assert ":30:00" in next(line for line in said.splitlines() if line.startswith("until it was amended at"))
    assert "460 W drawn on average, a cut of 240 W; ordered: 455 W, a cut of 245 W" in " ".join(said.split())
    assert "worst five minutes: 1.2 % above the limit; after the order: less than a minute to judge" in said
    assert "no meter readings for 25.0 % of its nodes' time" in said
    assert [line.split()[-4:] for line in said.splitlines() if line.startswith("all")] == [["700", "W", "460", "W"]]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("order", "--for", "3h"), "say how much: --cut 35%"),
        (("order", "--cut", "35%"), "say how long: --for 3h"),
        (("order", "--cut", "35%", "--to", "1kW", "--for", "3h"), "--cut and --to: give one of them"),
        (("order", "--cut", "135%", "--for", "3h"), "'135%' is not a share of the baseline"),
        (("order", "--cut", "3_5%", "--for", "3h"), "'3_5%' is not a share of the baseline"),
        (("order", "--to", "12", "--for", "3h"), "'12' is not a power"),
        (("amend", "grid_1"), "say what to change"),
    ],
)
def test_a_wrong_order_is_one_line_and_changes_nothing(gateway: FakeGateway, words: tuple[str, ...], line: str) -> None:
    done = CliRunner().invoke(app, ["grid", *words])
    assert done.exit_code != 0
    assert line in str(done.exception) + done.output
    assert gateway.calls == []
