"""FREESH's day: problems made of the authors' files are the published ones, and ties go where they are sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.reproductions.freesh_day import BETA, Inputs, half_hour, solved, totals
from services.contracts.pools import PoolsRequest
from services.core.domain.solving import SolveStatus
from services.solving.pools import pool_problem

EXAMPLE = json.loads((Path(__file__).parents[3] / "examples" / "pools" / "freesh-first.json").read_text())


@pytest.fixture
def inputs() -> Inputs:
    """The example as the authors' files have it: every row a step, demand before it is divided."""
    rates = [location["intensity"] for location in EXAMPLE["locations"]]
    classes = {part["name"]: part["classes"] for part in EXAMPLE["partitions"]}
    wide = {mode["name"]: mode["gpus"] for mode in EXAMPLE["modes"]}
    return Inputs(
        rates=[{str(at): str(series[step]) for at, series in enumerate(rates)} for step in range(6)],
        demand={
            part: [{each["name"].lower(): str(BETA * each["demand_qps"][step]) for each in found} for step in range(6)]
            for part, found in classes.items()
        },
        profiles=[
            {key: str(value) for key, value in profile.items()}
            | {"partition": part, "request_class": each["name"]}
            | {f"gpus_{kind.lower()}": str(wide[profile["mode"]].get(kind, 0)) for kind in ("A100", "H100")}
            for part, found in classes.items()
            for each in found
            for profile in each["profiles"]
        ],
        limits=[
            {"partition": part, "request_class": each["name"]}
            | {f"{key}_limit_ms": str(each[f"max_{key}_ms"]) for key in ("ttft", "tbt")}
            for part, found in classes.items()
            for each in found
        ],
        gpus=[
            {"location": location["name"]} | {f"gpus_{k.lower()}": str(n) for k, n in location["gpus"].items()}
            for location in EXAMPLE["locations"]
        ],
    )


def test_a_half_hour_of_the_files_is_the_published_problem(inputs: Inputs) -> None:
    ours = pool_problem(half_hour(inputs, 0, partition="a", negative_rates="paper", gap=None))
    theirs = pool_problem(PoolsRequest.model_validate(EXAMPLE))
    assert ours.rates.tolist() == theirs.rates.tolist()
    assert ours.gpus.tolist() == theirs.gpus.tolist()
    for name in ("demand_qps", "max_qps", "power_w", "eligible"):
        found, expected = getattr(ours.partitions[0], name), getattr(theirs.partitions[0], name)
        assert found == pytest.approx(expected), name


def test_equals_of_least_energy_go_where_they_are_sent(inputs: Inputs) -> None:
    clean, dirty = (solved(half_hour(inputs, 0, objective="cost", tie=tie, gap=1e-9)) for tie in (1e-8, -1e-8))
    assert clean.energy_kwh == pytest.approx(dirty.energy_kwh)
    assert clean.emissions_kg is not None
    assert dirty.emissions_kg is not None
    assert clean.emissions_kg < dirty.emissions_kg


def test_half_hours_that_are_not_served_are_counted_and_left_out(inputs: Inputs) -> None:
    served, lost = solved(half_hour(inputs, 0)), solved(half_hour(inputs, 0, load=9))
    assert lost.status is SolveStatus.INFEASIBLE
    assert totals([served, lost]) == (served.emissions_kg, served.energy_kwh, 1)
    assert totals([served, served], [served, lost]) == (served.emissions_kg, served.energy_kwh, 0)
