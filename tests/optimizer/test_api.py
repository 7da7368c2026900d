"""What a caller sees: submission, result, idempotency, cancelling, lists, refusals."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import asyncpg
import httpx
import psutil
import pytest

from services.contracts.identity import Role
from services.contracts.problems import Problem
from tests.optimizer.problems import START, a_bound, a_long_bound, points
from tests.support.api_examples import EXAMPLES
from tests.support.background import Installation
from tests.support.servers import wait_until

POOLS = "/v1/optimize/pools"


def problem_of(answer: httpx.Response) -> Problem:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return Problem.model_validate_json(answer.content)


async def test_a_bound_is_accepted_solved_and_read(optimizer: Installation) -> None:
    answer = await optimizer.submit(a_bound())
    assert answer.status_code == 202
    accepted = answer.json()
    assert answer.headers["location"] == f"/v1/optimize/{accepted['id']}"
    assert (accepted["kind"], accepted["tenant_id"], accepted["attempts"]) == ("carbon-bound", "acme", 0)
    solve = await optimizer.ended(accepted["id"])
    assert (solve["state"], solve["attempts"], solve["failure"]) == ("succeeded", 1, None)
    assert solve["submitted_at"] <= solve["started_at"] <= solve["ended_at"]
    assert 0 < solve["solve_s"] < 5
    outcome = {"status": "optimal", "solver": "highs", "objective": 400, "bound": 400, "gap": 0, "note": ""}
    assert solve["outcome"] == outcome
    result = solve["result"]
    assert (result["carbon_gco2"], result["busy_energy_kwh"], result["idle_energy_kwh"]) == (400, 3, 0)
    assert result["schedule"] == [{"name": "work", "first_step": 1, "gpu_hours": [4, 2], "shortfall_gpu_hours": 0}]
    assert solve["problem"]["capacity_gpus"] == 4
    assert solve["progress"] == {"share": 1, "doing": "done", "best": 400}


async def test_capacity_may_change_from_step_to_step(optimizer: Installation) -> None:
    body = a_bound(capacity_gpus=None, capacity_gpus_by_step=[4, 1, 5])
    solve = await optimizer.ended(await optimizer.accepted(body))
    assert solve["outcome"]["objective"] == pytest.approx(0.5 * (1 * 100 + 5 * 200))


@pytest.mark.parametrize("solver", ["cbc", "gurobi"])
async def test_the_solver_is_the_callers_choice(optimizer: Installation, solver: str) -> None:
    solve = await optimizer.ended(await optimizer.accepted(a_bound(solver=solver)))
    assert (solve["outcome"]["solver"], solve["outcome"]["objective"]) == (solver, 400)


async def test_an_infeasible_problem_is_a_result(optimizer: Installation) -> None:
    work = [{"name": "a", "gpu_hours": 9, "power_w": 500}]
    solve = await optimizer.ended(await optimizer.accepted(a_bound(100, 100, work=work)))
    assert (solve["state"], solve["outcome"]["status"]) == ("succeeded", "infeasible")
    assert solve["result"]["carbon_gco2"] is None
    assert solve["result"]["schedule"][0]["shortfall_gpu_hours"] == pytest.approx(1)


async def test_a_zones_forecast_stands_in_for_intensities(optimizer: Installation) -> None:
    body = a_bound(intensity=None, zone="US-CAL-CISO", horizon_h=24, idle_power_fraction=0.2)
    solve = await optimizer.ended(await optimizer.accepted(body))
    problem = solve["problem"]
    assert solve["outcome"]["status"] == "optimal"
    assert len(problem["intensity"]["points"]) == 24
    assert problem["idle_power_w"] == pytest.approx(100)
    assert (problem["source"]["zone"], problem["source"]["provider"]) == ("US-CAL-CISO", "recorded")
    greenest = sorted(point["gco2_per_kwh"] for point in problem["intensity"]["points"])
    idle = 0.1 * (4 * sum(greenest) - 4 * greenest[0] - 2 * greenest[1])
    assert solve["result"]["carbon_gco2"] == pytest.approx(0.5 * (4 * greenest[0] + 2 * greenest[1]) + idle)


async def test_a_zone_that_is_not_there_is_pointed_at(optimizer: Installation) -> None:
    answer = await optimizer.submit(a_bound(intensity=None, zone="ATLANTIS"))
    problem = problem_of(answer)
    assert (problem.status, problem.code) == (422, "unknown_zone")
    assert [error.pointer for error in problem.errors] == ["/zone"]
    answer = await optimizer.submit(a_bound(intensity=None, zone="US-CAL-CISO", signal="marginal"))
    assert [error.pointer for error in problem_of(answer).errors] == ["/signal"]


async def test_the_same_problem_is_not_solved_twice(optimizer: Installation) -> None:
    body = a_long_bound(seed=7)
    answers = await asyncio.gather(*(optimizer.submit(body) for _ in range(3)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    solve = await optimizer.ended(answers[0].json()["id"])
    again = await optimizer.submit(body)
    assert (again.status_code, again.json()["id"], again.json()["state"]) == (200, solve["id"], "succeeded")
    assert again.json()["outcome"] == solve["outcome"]
    other = await optimizer.submit(body, tenant="umbra")
    assert other.json()["id"] != solve["id"]
    await optimizer.call("DELETE", f"/v1/optimize/{other.json()['id']}", tenant="umbra")


async def test_an_idempotency_key_stands_for_one_body(optimizer: Installation) -> None:
    key = {"headers": {"Idempotency-Key": "key-1"}}
    first = await optimizer.submit(a_bound(500, 100, 300), **key)
    again = await optimizer.submit(a_bound(500, 100, 300), **key)
    assert (first.status_code, again.json()["id"]) == (202, first.json()["id"])
    reused = problem_of(await optimizer.submit(a_bound(500, 100, 301), **key))
    assert (reused.status, reused.code) == (422, "idempotency_key_reused")
    # Another key for the same problem stands for the same solve; another tenant's key is another key.
    other = await optimizer.submit(a_bound(500, 100, 300), headers={"Idempotency-Key": "key-2"})
    assert other.json()["id"] == first.json()["id"]
    stranger = await optimizer.submit(a_bound(1, 2, 3), tenant="umbra", **key)
    assert stranger.status_code == 202


async def test_a_forecast_asked_for_again_by_key_is_the_one_already_read(optimizer: Installation) -> None:
    key = {"headers": {"Idempotency-Key": "key-3"}}
    body = a_bound(intensity=None, zone="US-CAL-CISO")
    first = await optimizer.submit(body, **key)
    assert (await optimizer.submit(body, **key)).json()["id"] == first.json()["id"]


async def test_a_running_solve_is_cancelled_and_stops(optimizer: Installation) -> None:
    solve_id = await optimizer.accepted(a_long_bound(hours=3_000, window_h=48, seed=1))
    waiting_id = await optimizer.accepted(a_bound(7, 7, 7))
    going = await optimizer.until(solve_id, lambda solve: "iterations" in (solve["progress"] or {}).get("doing", ""))
    assert 0 < going["progress"]["share"] < 1
    assert (await optimizer.read(waiting_id))["progress"] is None
    answer = await optimizer.call("DELETE", f"/v1/optimize/{solve_id}")
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    # The worker is free again long before the solve could have been over.
    assert (await optimizer.until(waiting_id, lambda solve: solve["state"] == "succeeded", within_s=60))[
        "attempts"
    ] == 1
    assert (await optimizer.read(solve_id))["result"] is None
    again = await optimizer.call("DELETE", f"/v1/optimize/{solve_id}")
    assert (again.status_code, again.json()["state"]) == (200, "cancelled")
    over = problem_of(await optimizer.call("DELETE", f"/v1/optimize/{waiting_id}"))
    assert (over.status, over.code) == (409, "invalid_transition")


async def test_a_program_that_a_cancelled_solve_runs_ends_with_it(optimizer: Installation) -> None:
    worker = psutil.Process(optimizer.pid("worker"))

    def programs() -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [each for each in worker.children(recursive=True) if each.name() == "cbc"]
        return []

    def runs(program: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return program.is_running() and program.status() != psutil.STATUS_ZOMBIE
        return False

    solve_id = await optimizer.accepted({**a_long_bound(hours=900, window_h=48, seed=4), "solver": "cbc"})
    await asyncio.to_thread(wait_until, programs)
    started = programs()
    await optimizer.call("DELETE", f"/v1/optimize/{solve_id}")
    await asyncio.to_thread(wait_until, lambda: not any(map(runs, started)))


async def test_a_cancelled_problem_may_be_asked_for_anew(optimizer: Installation) -> None:
    blocker = await optimizer.accepted(a_long_bound(hours=1_500, seed=2))
    queued = await optimizer.accepted(a_bound(8, 8, 8))
    assert (await optimizer.call("DELETE", f"/v1/optimize/{queued}")).json()["state"] == "cancelled"
    anew = await optimizer.accepted(a_bound(8, 8, 8))
    assert anew != queued
    await optimizer.call("DELETE", f"/v1/optimize/{blocker}")
    assert (await optimizer.ended(anew))["state"] == "succeeded"
    assert (await optimizer.read(queued))["state"] == "cancelled"


async def test_tenants_see_their_own_and_operators_see_all(optimizer: Installation) -> None:
    solve_id = await optimizer.accepted(a_long_bound(hours=1_500, seed=3), tenant="initech")
    for method in ("GET", "DELETE"):
        problem = problem_of(await optimizer.call(method, f"/v1/optimize/{solve_id}"))
        assert (problem.status, problem.code) == (404, "not_found")
    listed = (await optimizer.call("GET", "/v1/optimize?tenant=initech")).json()
    assert all(solve["tenant_id"] == "acme" for solve in listed["items"])
    operator: dict[str, Any] = {"role": Role.OPERATOR, "tenant": "ops"}
    listed = (await optimizer.call("GET", "/v1/optimize?tenant=initech", **operator)).json()
    assert [solve["id"] for solve in listed["items"]] == [solve_id]
    assert (await optimizer.call("DELETE", f"/v1/optimize/{solve_id}", **operator)).json()["state"] == "cancelled"
    connection = await asyncpg.connect(optimizer.stack.environment["DATABASE_URL"])
    audited = await connection.fetchrow("SELECT tenant_id, action, data FROM audit_log WHERE target = $1", solve_id)
    await connection.close()
    assert (audited["tenant_id"], audited["action"]) == ("ops", "solve.cancelled")
    assert "initech" in audited["data"]


async def test_lists_are_paged_and_filtered(optimizer: Installation) -> None:
    made = [await optimizer.accepted(a_bound(index), tenant="pager") for index in range(1, 6)]
    for solve_id in made:
        await optimizer.ended(solve_id, tenant="pager")
    seen: list[str] = []
    query = "limit=2&kind=carbon-bound&state=succeeded&state=failed"
    cursor: str | None = ""
    while cursor is not None:
        path = f"/v1/optimize?{query}" + (f"&cursor={cursor}" if cursor else "")
        page = (await optimizer.call("GET", path, tenant="pager")).json()
        seen += [solve["id"] for solve in page["items"]]
        cursor = page["next_cursor"]
    assert seen == made[::-1]
    assert (await optimizer.call("GET", "/v1/optimize?state=running", tenant="pager")).json()["items"] == []
    problem = problem_of(await optimizer.call("GET", "/v1/optimize?cursor=abc"))
    assert (problem.status, problem.code, problem.errors[0].pointer) == (422, "invalid_cursor", "?cursor")


async def test_a_tenant_has_so_many_solves_and_no_more(optimizer: Installation) -> None:
    made = [await optimizer.accepted(a_long_bound(hours=3_000, window_h=48), tenant="greedy")]
    made += [await optimizer.accepted(a_bound(n), tenant="greedy") for n in range(4)]
    problem = problem_of(await optimizer.submit(a_bound(9), tenant="greedy"))
    assert (problem.status, problem.code) == (429, "quota_exceeded")
    for solve_id in made:
        await optimizer.call("DELETE", f"/v1/optimize/{solve_id}", tenant="greedy")
    assert (await optimizer.submit(a_bound(9), tenant="greedy")).status_code == 202


BAD: list[tuple[dict[str, Any], str]] = [
    ({"capacity_gpus": "4"}, "/capacity_gpus"),
    ({"capacity_gpus": -1}, "/capacity_gpus"),
    ({"capacity_gpus": None}, ""),
    ({"capacity_gpus_by_step": [4, 4, 4]}, ""),
    ({"capacity_gpus": None, "capacity_gpus_by_step": [4, 4]}, ""),
    ({"capacity_gpus": None, "capacity_gpus_by_step": [4, -1, 4]}, "/capacity_gpus_by_step/1"),
    ({"work": []}, "/work"),
    ({"work": [{"gpu_hours": 0, "power_w": 1}]}, "/work/0/gpu_hours"),
    ({"work": [{"gpu_hours": 1, "power_w": 1, "release_at": "2026-01-01"}]}, "/work/0/release_at"),
    ({"work": [{"gpu_hours": 1, "power_w": 1, "name": "a\x00"}]}, "/work/0/name"),
    (
        {"work": [{"gpu_hours": 1, "power_w": 1, "release_at": START.isoformat(), "deadline_at": START.isoformat()}]},
        "/work/0",
    ),
    ({"intensity": {"signal": "average_direct", "points": []}}, "/intensity/points"),
    ({"intensity": {"signal": "average", "points": points([1])}}, "/intensity/signal"),
    ({"intensity": {"signal": "average_direct", "points": points([1]) + points([1])}}, "/intensity/points"),
    ({"intensity": None}, ""),
    ({"zone": "GB"}, ""),
    ({"pue": 0.5}, "/pue"),
    ({"idle_power_w": 1, "idle_power_fraction": 0.1}, ""),
    ({"solver": "exhaustive"}, "/solver"),
    ({"time_limit_s": 0}, "/time_limit_s"),
    ({"unheard_of": 1}, "/unheard_of"),
]


@pytest.mark.parametrize(("change", "pointer"), BAD)
async def test_what_is_wrong_is_pointed_at(optimizer: Installation, change: dict[str, Any], pointer: str) -> None:
    problem = problem_of(await optimizer.submit(a_bound(**change)))
    assert (problem.status, problem.code) == (422, "invalid_request")
    assert [error.pointer for error in problem.errors] == [pointer]


async def test_other_refusals_are_problems_too(optimizer: Installation) -> None:
    path = "/v1/optimize/carbon-bound"
    answer = await optimizer.call("POST", path, content=b"{", headers={"content-type": "application/json"})
    assert problem_of(answer).code == "body_not_json"
    assert problem_of(await optimizer.http.get("/v1/optimize")).code == "unauthenticated"
    async with httpx.AsyncClient(base_url=optimizer.stack.urls["optimizer"]) as stranger:
        assert problem_of(await stranger.post(path, json=a_bound())).code == "unauthenticated"
    for missing in ("solve_00000000000000000000000000", "%00", "carbon-bound"):
        assert problem_of(await optimizer.call("GET", f"/v1/optimize/{missing}")).status == 404
    answer = await optimizer.submit(a_bound(), headers={"Idempotency-Key": "x" * 300})
    assert problem_of(answer).errors[0].pointer == "#Idempotency-Key"


async def test_pools_are_planned_by_a_worker(optimizer: Installation) -> None:
    body = EXAMPLES["PoolsRequest"]
    solve = await optimizer.ended(await optimizer.accepted(body, path=POOLS))
    assert (solve["kind"], solve["outcome"]["status"]) == ("pools", "optimal")
    result = solve["result"]
    serving = {(each["location"], each["mode"]): each["count"] for each in result["instances"]}
    assert serving == {("virginia", "A100-TP4"): 2}
    assert result["starts"] == [{"location": "virginia", "mode": "A100-TP4", "count": 1}]
    assert result["emissions_kg"] == pytest.approx(2 * 1.466 * 0.5 * 0.410)
    again = await optimizer.submit(body, path=POOLS)
    assert (again.status_code, again.json()["id"]) == (200, solve["id"])


async def test_pools_that_do_not_fit_together_are_refused(optimizer: Installation) -> None:
    body = EXAMPLES["PoolsRequest"] | {"running": [{"location": "texas", "mode": "A100-TP4", "instances": 1}]}
    answer = await optimizer.submit(body, path=POOLS)
    assert answer.status_code == 422
    assert "no location texas" in problem_of(answer).model_dump_json()
    locked = [{"location": "virginia", "mode": "A100-TP4", "instances": 3, "up_s": 0}]
    answer = await optimizer.submit(EXAMPLES["PoolsRequest"] | {"running": locked, "min_up_s": 60}, path=POOLS)
    assert answer.status_code == 422
    assert "more GPUs than there are" in problem_of(answer).detail


async def test_a_partition_is_solved_and_refused(optimizer: Installation) -> None:
    body = EXAMPLES["PartitionRequest"]
    solve = await optimizer.ended(await optimizer.accepted(body, path="/v1/optimize/partition"))
    assert solve["state"] == "succeeded"
    plan = solve["result"]["applications"][0]
    assert plan["keeps_limits"]
    assert plan["objective_pct"] <= plan["bound_pct"] + 0.5
    late = {**body, "applications": [{**body["applications"][0], "sla_p95_ms": None, "requests_per_s": 10_000}]}
    answer = await optimizer.submit(late, path="/v1/optimize/partition")
    assert answer.status_code == 422
    assert "needs sla_p95_ms" in problem_of(answer).detail


async def test_an_allocation_is_solved_once_and_refused(optimizer: Installation) -> None:
    body, path = EXAMPLES["AllocationRequest"], "/v1/optimize/allocation"
    solve = await optimizer.ended(await optimizer.accepted(body, path=path))
    assert (solve["state"], solve["outcome"]["solver"]) == ("succeeded", "greedy")
    bert, resnet = solve["result"]["jobs"]
    assert (bert["gpus"], bert["value"], bert["nodes"]) == (4, 200, [{"node": "n0", "gpus": 4}])
    assert (resnet["gpus"], resnet["value"], resnet["nodes"]) == (1, 300, [{"node": "n1", "gpus": 1}])
    assert solve["result"]["power_w"] <= 1600
    again = await optimizer.submit(body, path=path)
    assert (again.status_code, again.json()["id"]) == (200, solve["id"])
    answer = await optimizer.submit({**body, "idle_w": {}}, path=path)
    assert answer.status_code == 422
    assert "idle_w needs the power of a free GPU of model gpu" in answer.text
