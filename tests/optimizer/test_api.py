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
from tests.optimizer.problems import a_long_plan, a_plan
from tests.support.api_examples import EXAMPLES
from tests.support.background import Installation
from tests.support.servers import wait_until

POOLS = "/v1/optimize/pools"


def problem_of(answer: httpx.Response) -> Problem:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return Problem.model_validate_json(answer.content)


async def test_a_plan_is_accepted_solved_and_read(optimizer: Installation) -> None:
    answer = await optimizer.submit(a_plan())
    assert answer.status_code == 202
    accepted = answer.json()
    assert answer.headers["location"] == f"/v1/optimize/{accepted['id']}"
    assert (accepted["kind"], accepted["tenant_id"], accepted["attempts"]) == ("pools", "acme", 0)
    solve = await optimizer.ended(accepted["id"])
    assert (solve["state"], solve["attempts"], solve["failure"]) == ("succeeded", 1, None)
    assert solve["submitted_at"] <= solve["started_at"] <= solve["ended_at"]
    assert 0 < solve["solve_s"] < 5
    least = 3 * 3_600_000 * 100  # three instances for an hour, joules times gCO2/kWh
    outcome = {"status": "optimal", "solver": "highs", "objective": least, "bound": least, "gap": 0, "note": ""}
    assert solve["outcome"] == outcome
    result = solve["result"]
    assert (result["emissions_kg"], result["energy_kwh"]) == (pytest.approx(0.3), pytest.approx(3))
    assert [each["count"] for each in result["instances"]] == [3]
    assert solve["problem"]["step_s"] == 3_600
    assert solve["progress"] == {"share": 1, "doing": "done", "best": least}


@pytest.mark.parametrize("solver", ["cbc", "gurobi"])
async def test_the_solver_is_the_callers_choice(optimizer: Installation, solver: str) -> None:
    solve = await optimizer.ended(await optimizer.accepted(a_plan(solver=solver)))
    assert (solve["outcome"]["solver"], solve["result"]["emissions_kg"]) == (solver, pytest.approx(0.3))


async def test_an_infeasible_problem_is_a_result(optimizer: Installation) -> None:
    solve = await optimizer.ended(await optimizer.accepted(a_plan(9_000)))
    assert (solve["state"], solve["outcome"]["status"]) == ("succeeded", "infeasible")
    assert [each["request_class"] for each in solve["result"]["shortfall"]] == ["all"]


async def test_the_same_problem_is_not_solved_twice(optimizer: Installation) -> None:
    body = a_long_plan(7)
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
    first = await optimizer.submit(a_plan(500, 100, 300), **key)
    again = await optimizer.submit(a_plan(500, 100, 300), **key)
    assert (first.status_code, again.json()["id"]) == (202, first.json()["id"])
    reused = problem_of(await optimizer.submit(a_plan(500, 100, 301), **key))
    assert (reused.status, reused.code) == (422, "idempotency_key_reused")
    # Another key for the same problem stands for the same solve; another tenant's key is another key.
    other = await optimizer.submit(a_plan(500, 100, 300), headers={"Idempotency-Key": "key-2"})
    assert other.json()["id"] == first.json()["id"]
    stranger = await optimizer.submit(a_plan(1, 2, 3), tenant="umbra", **key)
    assert stranger.status_code == 202


async def test_a_running_solve_is_cancelled_and_stops(optimizer: Installation) -> None:
    solve_id = await optimizer.accepted(a_long_plan(1, time_limit_s=300))
    waiting_id = await optimizer.accepted(a_plan(7, 7, 7))
    going = await optimizer.until(solve_id, lambda solve: "nodes" in (solve["progress"] or {}).get("doing", ""))
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

    solve_id = await optimizer.accepted(a_long_plan(4, solver="cbc", time_limit_s=300))
    await asyncio.to_thread(wait_until, programs)
    started = programs()
    await optimizer.call("DELETE", f"/v1/optimize/{solve_id}")
    await asyncio.to_thread(wait_until, lambda: not any(map(runs, started)))


async def test_a_cancelled_problem_may_be_asked_for_anew(optimizer: Installation) -> None:
    blocker = await optimizer.accepted(a_long_plan(2, time_limit_s=300))
    queued = await optimizer.accepted(a_plan(8, 8, 8))
    assert (await optimizer.call("DELETE", f"/v1/optimize/{queued}")).json()["state"] == "cancelled"
    anew = await optimizer.accepted(a_plan(8, 8, 8))
    assert anew != queued
    await optimizer.call("DELETE", f"/v1/optimize/{blocker}")
    assert (await optimizer.ended(anew))["state"] == "succeeded"
    assert (await optimizer.read(queued))["state"] == "cancelled"


async def test_tenants_see_their_own_and_operators_see_all(optimizer: Installation) -> None:
    solve_id = await optimizer.accepted(a_long_plan(3, time_limit_s=300), tenant="initech")
    for method in ("GET", "DELETE"):
        problem = problem_of(await optimizer.call(method, f"/v1/optimize/{solve_id}"))
        assert (problem.status, problem.code) == (404, "not_found")
    assert (await optimizer.call("GET", "/v1/optimize?tenant=initech")).status_code == 403
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
    made = [await optimizer.accepted(a_plan(index), tenant="pager") for index in range(1, 6)]
    for solve_id in made:
        await optimizer.ended(solve_id, tenant="pager")
    seen: list[str] = []
    query = "limit=2&kind=pools&state=succeeded&state=failed"
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
    made = [await optimizer.accepted(a_long_plan(time_limit_s=300), tenant="greedy")]
    made += [await optimizer.accepted(a_plan(n), tenant="greedy") for n in range(4)]
    problem = problem_of(await optimizer.submit(a_plan(9), tenant="greedy"))
    assert (problem.status, problem.code) == (429, "quota_exceeded")
    for solve_id in made:
        await optimizer.call("DELETE", f"/v1/optimize/{solve_id}", tenant="greedy")
    assert (await optimizer.submit(a_plan(9), tenant="greedy")).status_code == 202


BAD: list[tuple[dict[str, Any], str]] = [
    ({"step_s": "3600"}, "/step_s"),
    ({"step_s": -1}, "/step_s"),
    ({"modes": []}, "/modes"),
    ({"modes": [{"name": "a\x00", "gpus": {"A100": 1}}]}, "/modes/0/name"),
    ({"modes": [{"name": "small", "gpus": {"A100": 1.5}}]}, "/modes/0/gpus/A100"),
    ({"locations": [{"name": "here", "gpus": {"A100": 4}, "intensity": [1, 2]}]}, ""),
    ({"objective": "cost"}, ""),
    ({"gap": -1}, "/gap"),
    ({"solver": "exhaustive"}, "/solver"),
    ({"time_limit_s": 0}, "/time_limit_s"),
    ({"unheard_of": 1}, "/unheard_of"),
]


@pytest.mark.parametrize(("change", "pointer"), BAD)
async def test_what_is_wrong_is_pointed_at(optimizer: Installation, change: dict[str, Any], pointer: str) -> None:
    problem = problem_of(await optimizer.submit(a_plan(**change)))
    assert (problem.status, problem.code) == (422, "invalid_request")
    assert [error.pointer for error in problem.errors] == [pointer]


async def test_other_refusals_are_problems_too(optimizer: Installation) -> None:
    path = POOLS
    answer = await optimizer.call("POST", path, content=b"{", headers={"content-type": "application/json"})
    assert problem_of(answer).code == "body_not_json"
    assert problem_of(await optimizer.http.get("/v1/optimize")).code == "unauthenticated"
    async with httpx.AsyncClient(base_url=optimizer.stack.urls["optimizer"]) as stranger:
        assert problem_of(await stranger.post(path, json=a_plan())).code == "unauthenticated"
    for missing in ("solve_00000000000000000000000000", "%00", "pools"):
        assert problem_of(await optimizer.call("GET", f"/v1/optimize/{missing}")).status == 404
    answer = await optimizer.submit(a_plan(), headers={"Idempotency-Key": "x" * 300})
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


async def test_a_solve_of_a_kind_that_is_gone_is_listed_and_cannot_be_read(optimizer: Installation) -> None:
    solve_id = await optimizer.accepted(a_plan(6, 6), tenant="former")
    await optimizer.ended(solve_id, tenant="former")
    async with optimizer.database() as connection:
        await connection.execute("UPDATE solves SET kind = 'carbon-bound' WHERE id = $1", solve_id)
    listed = (await optimizer.call("GET", "/v1/optimize", tenant="former")).json()["items"]
    assert [(each["id"], each["kind"]) for each in listed] == [(solve_id, "carbon-bound")]
    problem = problem_of(await optimizer.call("GET", f"/v1/optimize/{solve_id}", tenant="former"))
    assert (problem.status, problem.code) == (404, "not_found")
