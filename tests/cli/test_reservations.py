"""Reservations and maintenance from the shell."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.main import app
from services.cli.site import grid
from services.cli.values import time_of
from tests.cli.conftest import NotingGateway

MADE = {
    "id": "res_1",
    "name": "",
    "tenant_id": "ml",
    "state": "ahead",
    "made_at": "2026-03-01T10:00:00+00:00",
    "start_at": "2026-03-03T09:00:00+00:00",
    "end_at": "2026-03-03T12:00:00+00:00",
    "cancelled_at": None,
    "gpu_model": "H100",
    "gpus": {"n1": 8},
    "slots": [
        {
            "start_at": "2026-03-03T09:00:00+00:00",
            "zone": "DE",
            "intensity_gco2_per_kwh": 250.0,
            "carbon_gco2": 3_150.4,
            "estimated": True,
        }
    ],
    "stays": ["job_9"],
}


class FakeGateway(NotingGateway):
    """Answers with a reservation."""

    def call(self, method: str, path: str, *, body: Any = None, key: str | None = None) -> Any:
        assert method == "DELETE" or key, "what is sent again is the same reservation"
        return super().call(method, path, body=body)

    def answer(self, body: Any) -> dict[str, Any]:
        return MADE if body is None or body.get("gpus") else {**MADE, "tenant_id": None, "slots": []}


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    fake = FakeGateway()
    monkeypatch.setattr(grid, "Gateway", fake)
    return fake


def run(*words: str) -> str:
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_reservation_says_its_grams(gateway: FakeGateway) -> None:
    said = run("reserve", "--gpus", "8", "--cleanest", "--before", "2026-03-06T00:00Z", "--for", "3h", "--tenant", "ml")
    ((method, path, body),) = gateway.calls
    assert (method, path) == ("POST", "/v1/reservations")
    assert {name: value for name, value in body.items() if value} == {
        "gpus": 8,
        "tenant_id": "ml",
        "before": "2026-03-06T00:00:00+00:00",
        "duration_s": 10_800.0,
    }
    assert "ml from" in said
    assert "3150" in said
    assert "beyond the forecast" in said


def test_a_few_of_many_slots_are_shown(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [{**MADE["slots"][0], "carbon_gco2": 7000 + at} for at in range(grid.SLOTS + 2)]
    monkeypatch.setattr(gateway, "answer", lambda body: {**MADE, "slots": slots})
    said = run("reserve", "--gpus", "8", "--cleanest", "--before", "2026-03-06T00:00Z", "--for", "3h")
    assert said.count(" 70") == grid.SLOTS
    assert "and 2 more slots; --json has all" in said


def test_maintenance_is_of_nodes_or_a_zone(gateway: FakeGateway) -> None:
    said = run("nodes", "maintain", "n1", "n2", "--from", "2026-03-03T09:00Z", "--for", "3h")
    run("reservations", "cancel", "res_1")
    (_, _, body), (method, path, _) = gateway.calls
    assert (body["maintenance"], body["nodes"], body["zone"]) == (True, ["n1", "n2"], None)
    assert (method, path) == ("DELETE", "/v1/reservations/res_1")
    assert "maintenance from" in said
    assert "may run on, as they may not be stopped: job_9" in said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("reserve", "--gpus", "8", "--cleanest", "--for", "3h"), "say when"),
        (("reserve", "--gpus", "8", "--from", "9:00"), "say how long"),
        (("reserve", "--gpus", "8", "--from", "Someday", "--for", "3h"), "'Someday' is not a time"),
        (("nodes", "maintain", "--for", "3h"), "name nodes, or a --zone"),
    ],
)
def test_a_wrong_wish_is_one_line_and_changes_nothing(gateway: FakeGateway, words: tuple[str, ...], line: str) -> None:
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code != 0
    assert line in str(done.exception) + done.output
    assert gateway.calls == []


def test_now_is_a_time() -> None:
    now = datetime.fromisoformat("2026-03-02T09:00Z")
    assert time_of("now", "--from", now) == now


@pytest.mark.parametrize(
    ("text", "weekday", "clock"), [("Tue 9:00", 1, "09:00"), ("friday", 4, "00:00"), ("7:30", None, "07:30")]
)
def test_a_day_or_an_hour_is_the_next_one(text: str, weekday: int | None, clock: str) -> None:
    for hour in range(0, 200, 7):
        now = datetime.fromisoformat("2026-03-02T09:00").astimezone() + timedelta(hours=hour)
        found = time_of(text, "--from", now)
        assert found.strftime("%H:%M") == clock
        assert weekday in (None, found.weekday())
        assert timedelta() < found - now <= timedelta(days=1 if weekday is None else 7)


@pytest.mark.parametrize(
    ("text", "now", "found"),
    [
        ("2026-03-29T02:30", "2026-03-01T00:00Z", "2026-03-29T01:30Z"),  # Skipped: as long after, not an hour early
        ("2:30", "2026-03-29T00:40Z", "2026-03-29T01:30Z"),
        ("2026-10-25T02:30", "2026-03-01T00:00Z", "2026-10-25T00:30Z"),
        ("2:30", "2026-10-25T00:10Z", "2026-10-25T00:30Z"),  # Twice: the next of them
        ("2:30", "2026-10-25T00:40Z", "2026-10-25T01:30Z"),
        ("sun 2:30", "2026-10-25T01:10Z", "2026-10-25T01:30Z"),
        ("2:30", "2026-10-25T01:40Z", "2026-10-26T01:30Z"),
    ],
)
def test_an_hour_that_clocks_skip_or_show_twice(
    text: str, now: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert time_of(text, "--from", datetime.fromisoformat(now)) == datetime.fromisoformat(found)
    finally:
        monkeypatch.undo()
        time.tzset()
