"""The simulator, given the jobs and the grid of a live run, holds the same rounds and makes the same plans."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from services.simulator.workload import Workload
from tests.parity.live_run import CASES, RECORDING, recorded, simulated

pytestmark = pytest.mark.usefixtures("the_lab")

LIVE: dict[str, list[dict[str, Any]]] = json.loads(RECORDING.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_the_simulator_holds_the_rounds_of_the_live_run(name: str) -> None:
    assert simulated(CASES[name]) == LIVE[name]


@pytest.mark.parametrize("name", CASES)
async def test_the_live_run_is_as_recorded(postgres_url: str, redis_url: str, tmp_path: Path, name: str) -> None:
    assert await recorded(CASES[name], postgres_url, redis_url, tmp_path) == LIVE[name]


def said(name: str) -> str:
    """Return what the rounds of a live run did, a line each."""
    return "\n".join(each for held in LIVE[name] for each in held["actions"])


def test_the_recordings_have_growth_preemption_gangs_over_both_nodes_and_power_limits() -> None:
    green, limited = (said(name) for name in ("green", "zeus+las"))

    assert re.search("comes back with [34]", green)
    assert re.search("starts on n0:0,1 n1:0", green)
    assert re.search("comes back with 1", limited)
    assert re.search(r"gets \d+", limited)


def test_a_recording_has_pairs_that_are_made_undone_and_tried_with_others() -> None:
    pairs = re.findall(r"(\w+) starts beside another", said("gandiva"))

    assert len(pairs) > len(set(pairs)) >= 4
    apart = simulated(replace(CASES["gandiva"], parameters={"packing": False}))
    assert not any("beside" in each for held in apart for each in held["actions"])


def test_what_sharing_costs_shows_in_the_recording() -> None:
    with patch("services.core.profiles.sharing.SHARING_COST", 0.3):
        assert simulated(CASES["gandiva"]) != LIVE["gandiva"]


@pytest.mark.parametrize(("parameter", "value"), [("mu", 1.0), ("gamma_full", 0.99), ("theta", 1.0)])
def test_each_part_of_green_shows_in_the_recording(parameter: str, value: float) -> None:
    case = CASES["green"]

    assert simulated(replace(case, parameters={**case.parameters, parameter: value})) != LIVE["green"]


def test_a_job_that_is_a_little_shorter_shows() -> None:
    case = CASES["green"]
    shorter: Workload = replace(case.workload, work_s=case.workload.work_s * 0.99)

    assert simulated(replace(case, workload=shorter)) != LIVE["green"]
