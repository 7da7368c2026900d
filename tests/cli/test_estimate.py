"""What ``wattshift submit --test-only`` says."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from services.cli import output
from services.cli.jobs.estimate import estimate_lines

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
EMISSION: dict[str, Any] = {"zone": "DE", "signal": "average_direct", "starts_at": "2026-03-01T12:00:00Z"}
ESTIMATE: dict[str, Any] = {
    **{"policy": "gaia", "starts_now": True, "gpus": 2, "reason": None, "detail": None, "expected_start_at": None},
    **{"placement": [{"node_id": "node-1", "devices": [0, 1]}], "free_gpus": 3, "suitable_gpus": 4, "waiting_jobs": 0},
    **{"duration_s": 7_200.0, "assumptions": ["Length: as long as its time limit allows."]},
    "now": EMISSION | {"intensity_gco2_per_kwh": 400, "carbon_gco2": 480.0, "carbon_gco2_per_hour": 240.0},
    "greenest": EMISSION
    | {"intensity_gco2_per_kwh": 50, "carbon_gco2": 60.0, "carbon_gco2_per_hour": 30.0}
    | {"starts_at": "2026-03-01T17:00:00Z"},
}


def test_a_start_is_told_with_its_place_and_its_emissions() -> None:
    assert estimate_lines("a", ESTIMATE, NOW) == [
        "[bold]a[/] is valid and would start now on 2 GPUs: node-1[0, 1]",
        "  cluster: 3 of 4 suitable GPUs are free, no job waits; policy gaia",
        "  length: 2 h",
        "  if it began now: 480.00 g CO2 at 400 gCO2/kWh in DE",
        "  in the next green window: 60.00 g CO2 at 50 gCO2/kWh in DE, starting in 5 h",
        "  [dim]Length: as long as its time limit allows.[/]",
    ]


def test_a_greenest_time_that_is_now_is_said_once() -> None:
    shown = estimate_lines("a", ESTIMATE | {"greenest": ESTIMATE["now"]}, NOW)

    assert shown[3:5] == [
        "  if it began now: 480.00 g CO2 at 400 gCO2/kWh in DE",
        "  in the next green window: now is the greenest time that it has",
    ]


def test_what_is_unknown_stays_unknown() -> None:
    waits = {"starts_now": False, "reason": "greener_hours", "detail": "It waits.", "placement": [], "gpus": 1}
    unknown = {"duration_s": None, "greenest": None, "waiting_jobs": 2, "now": ESTIMATE["now"] | {"carbon_gco2": None}}

    assert estimate_lines("a", ESTIMATE | waits | unknown, NOW)[:5] == [
        "[bold]a[/] is valid and would wait: It waits. (greener_hours)",
        "  cluster: 3 of 4 suitable GPUs are free, 2 jobs wait; policy gaia",
        "  start: unknown",
        "  if it began now: 240.00 g CO2 per hour at 400 gCO2/kWh in DE",
        "  in the next green window: unknown",
    ]


def test_an_expected_start_is_a_time_and_how_long_until_then() -> None:
    waits = {"starts_now": False, "reason": "greener_hours", "detail": "It waits.", "placement": []}
    expected = {"expected_start_at": "2026-03-01T17:00:00Z"}

    start = f"  start: in 5 h ({output.clock('2026-03-01T17:00:00Z')})"
    assert start in estimate_lines("a", ESTIMATE | waits | expected, NOW)
