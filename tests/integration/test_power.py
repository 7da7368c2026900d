"""Power, live: a kind of job is measured on running agents, and the cluster's limit is held by its measured draw."""

from __future__ import annotations

import sys
import time
from typing import Any

from tests.integration.conftest import Installation
from tests.support.servers import ROOT, wait_until

PARAMETERS = {"profiling_s": 16, "profiling_steps": 4, "restart_s": 1, "grace_s": 1, "migration": False}
STATED_ERROR = 0.05
"""Of a fitted model on its own points at most; what it must not exceed is asserted of the profile."""


def submit(installation: Installation, gpus: int) -> str:
    train = [sys.executable, str(ROOT / "examples" / "train.py"), "--steps", "1000000", "--step-seconds", "0.05"]
    spec = {
        "name": "power",
        "command": train,
        "gpus": {"min": gpus},
        "processes": "per_node",
        "work": {"total": 1_000_000},
        "grace_s": 1,
        "labels": {"kind": "power"},
    }
    return installation.gateway.call("POST", "/v1/jobs", body=spec, key=f"power-{gpus}-{time.monotonic_ns()}")["id"]


def limit(installation: Installation, **parameters: Any) -> None:
    body = {"name": "powerflow", "parameters": PARAMETERS | parameters}
    installation.gateway.call("PUT", "/v1/policies/active", body=body)


def drawn_w(installation: Installation) -> float:
    return sum(node["power_w"] for node in installation.nodes())


def states(installation: Installation, jobs: list[str]) -> list[str]:
    return [installation.job(job)["state"] for job in jobs]


def test_a_limit_that_falls_is_kept_by_what_is_measured(rare_rounds: Installation) -> None:
    limit(rare_rounds)
    first = submit(rare_rounds, 2)
    wait_until(lambda: rare_rounds.gateway.get(f"/v1/jobs/{first}/profile")["curves"], 120)
    profile = rare_rounds.gateway.get(f"/v1/jobs/{first}/profile")
    (curve,) = profile["curves"]
    assert len(curve["values"]) == 4
    assert curve["power_w"] == sorted(curve["power_w"])
    assert curve["speed"][0] < curve["speed"][-1] == 1.0
    assert curve["energy_mape"] < STATED_ERROR

    jobs = [first, submit(rare_rounds, 4), submit(rare_rounds, 2)]
    wait_until(lambda: states(rare_rounds, jobs) == ["running"] * 3, 60)
    wait_until(lambda: all(each["utilization"] > 0 for node in rare_rounds.nodes() for each in node["readings"]), 60)
    full_w = drawn_w(rare_rounds)
    for share in (0.75, 0.5):
        cap_w = share * full_w
        limit(rare_rounds, power_limit_w=cap_w)
        wait_until(lambda cap_w=cap_w: drawn_w(rare_rounds) <= cap_w, 60)
        seen = _watch(rare_rounds, looks=8)
        assert max(seen) <= cap_w * (1 + STATED_ERROR), seen
        assert states(rare_rounds, jobs) == ["running"] * 3, "settings are enough"

    limit(rare_rounds, power_limit_w=0.22 * full_w)
    wait_until(lambda: drawn_w(rare_rounds) <= 0.22 * full_w, 60)
    wait_until(lambda: "queued" in states(rare_rounds, jobs), 60)  # no settings are enough: a gang gives way
    limit(rare_rounds)
    wait_until(lambda: states(rare_rounds, jobs) == ["running"] * 3, 60)
    for job in jobs:
        rare_rounds.gateway.call("POST", f"/v1/jobs/{job}/cancel")
    rare_rounds.wait_for_ends(jobs, 60)


def _watch(installation: Installation, looks: int) -> list[float]:
    """Return the draw as each of so many newer heartbeats shows it."""
    seen: list[float] = []
    heard = ""
    while len(seen) < looks:
        nodes = installation.nodes()
        newest = str([node["heartbeat_at"] for node in nodes])
        if newest == heard:
            time.sleep(0.1)
            continue
        heard = newest
        seen.append(sum(node["power_w"] for node in nodes))
    return seen
