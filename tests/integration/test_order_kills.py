"""Kill -9 in the middle of an order of the grid: it is kept, what it paused comes back, and class 0 does not notice."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.conftest import RARE_ROUNDS, UNUSED, Installation
from tests.integration.test_kills import check_events, check_ledger, check_no_twins
from tests.support.servers import ROOT, scratch_folder, wait_until

VICTIMS = ("scheduler", "telemetry", "agent-node-1", "postgres", "valkey", "agent-node-2")
"""The relay of commands lives in the scheduler."""
STEPS = 12_000


@pytest.fixture(scope="module")
def busy() -> Iterator[Installation]:
    with scratch_folder() as folder:
        made = Installation(folder / "data", without=UNUSED, **RARE_ROUNDS)
        made.up()
        made.gateway.call("PUT", "/v1/policies/active", body={"name": "fifo", "parameters": {}})
        yield made
        made.down()


def submit(installation: Installation, number: int, flex: int) -> str:
    train = [sys.executable, str(ROOT / "examples" / "train.py"), "--steps", str(STEPS), "--step-seconds", "0.05"]
    spec = {
        "name": f"ordered-{number}",
        "command": [*train, "--checkpoint-every", "1", "--seed", str(number)],
        "gpus": {"min": 2},
        "processes": "per_node",
        "work": {"total": STEPS},
        "grace_s": 5,
        "max_restarts": 0,
        "flex": flex,
    }
    return installation.gateway.call("POST", "/v1/jobs", body=spec, key=f"ordered-{number}")["id"]


def drawn_w(installation: Installation) -> float:
    return sum(node["power_w"] for node in installation.nodes())


def check_kept(installation: Installation, limit_w: float, looks: int = 5) -> None:
    """Within five seconds of heartbeats of both nodes, nothing is drawn above the limit."""
    wait_until(lambda: len(installation.nodes()) == 2, 60)
    for _ in range(looks):
        assert drawn_w(installation) <= 1.02 * limit_w
        time.sleep(1)


def test_an_order_outlives_every_process(busy: Installation) -> None:
    hard = [submit(busy, number, 0) for number in range(2)]
    soft = [submit(busy, number, 10) for number in range(2, 4)]
    states: dict[str, Any] = {}

    def see() -> dict[str, Any]:
        states.update({each: busy.job(each)["state"] for each in (*hard, *soft)})
        return states

    wait_until(lambda: set(see().values()) == {"running"}, 120)
    wait_until(lambda: all(each["utilization"] > 0 for node in busy.nodes() for each in node["readings"]), 60)
    # Of a gang that has just begun nobody knows what it draws: an order might pause more than it has to, for a moment.
    wait_until(lambda: all((busy.job(each)["progress"] or {}).get("done", 0) > 200 for each in (*hard, *soft)), 60)
    limit_w = 0.8 * drawn_w(busy)
    body = {"duration_s": 3_600, "steps": [{"to_w": limit_w}]}
    order = busy.gateway.call("POST", "/v1/grid/orders", body=body, key="one")
    wait_until(lambda: "queued" in see().values() and drawn_w(busy) <= limit_w, 60)
    paused = [each for each in soft if states[each] == "queued"]
    assert len(paused) == 1, "the order takes one pause"

    for victim in VICTIMS:
        busy.kill(victim)
        check_kept(busy, limit_w)
        assert busy.gateway.call("POST", "/v1/grid/orders", body=body, key="one")["id"] == order["id"]
        (found,) = busy.gateway.get("/v1/grid/orders")["items"]
        assert (found["state"], found["limit_w"]) == ("in_force", limit_w)
        assert [each for each, state in see().items() if state != "running"] == paused, victim
        assert busy.job(paused[0])["reason"] == "grid_order"

    busy.gateway.call("DELETE", f"/v1/grid/orders/{order['id']}")
    wait_until(lambda: see()[paused[0]] == "running", 60)
    assert set(states.values()) == {"running"}, "a job ended before the order did"
    jobs = busy.wait_for_ends([*hard, *soft], 600)

    assert {job["state"] for job in jobs} == {"succeeded"}
    for job in jobs:
        check_no_twins(busy.folder, job)
        check_events(busy, job["id"])
        steps = busy.folder / "checkpoints" / job["id"] / "steps.jsonl"
        lives = [json.loads(line) for line in steps.read_text().splitlines()]
        assert len(lives) == 1 + (job["id"] in paused)
    wait_until(lambda: all(busy.job(each["id"])["footprint"]["energy_j"] > 0 for each in jobs))
    check_ledger(busy)
    for each in hard:
        with busy.gateway.stream(f"/v1/jobs/{each}/events") as answer:
            types = [json.loads(line[5:])["type"] for line in answer.iter_lines() if line.startswith("data:")]
        assert not {"job.set", "job.preempting"} & set(types), "class 0 was touched"
