"""Pools are planned by a real worker from what routers reported and what the carbon service predicts."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from services.contracts.serving import PoolPlanResult
from tests.serving.installation import database_of, installed
from tests.serving.pools import a_spec, add_node, add_pool, add_traffic, revise
from tests.support.background import Installation
from tests.support.control_plane import eventually
from tests.support.servers import fresh_database


@pytest.fixture(scope="module")
async def serving(postgres_url: str, redis_url: str) -> AsyncIterator[Installation]:
    """An installation with one node of eight GPUs, whose database notes every decision on a plan."""
    async with installed(DATABASE_URL=fresh_database(postgres_url), REDIS_URL=redis_url) as installation:
        async with database_of(installation) as connection:
            await add_node(connection, "node-1")
            await connection.execute("""
                CREATE TABLE decisions (id TEXT, outcome TEXT);
                CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN INSERT INTO decisions VALUES (NEW.id, NEW.outcome); RETURN NEW; END $$;
                CREATE TRIGGER decided AFTER UPDATE ON pool_plans FOR EACH ROW
                WHEN (NEW.outcome IS DISTINCT FROM OLD.outcome) EXECUTE FUNCTION note();
            """)
        yield installation


@pytest.fixture
async def database(serving: Installation) -> AsyncIterator[Any]:
    """A connection; no pool is left of the tests before."""
    async with database_of(serving) as connection:
        await connection.execute("DELETE FROM pools")
        await connection.execute("DELETE FROM pool_instances")
        yield connection


async def plans_of(database: Any, pool: str) -> list[Any]:
    return await database.fetch("SELECT * FROM pool_plans WHERE pool = $1 ORDER BY id", pool)


async def until(database: Any, pool: str, *outcomes: str | None) -> list[Any]:
    """Return the pool's plans once these have become of them, in order."""

    async def reached() -> bool:
        return tuple(plan["outcome"] for plan in await plans_of(database, pool)) == outcomes

    await eventually(reached, within_s=40)
    return await plans_of(database, pool)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have a process stand still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def in_force(database: Any, pool: str) -> str | None:
    return await database.fetchval("SELECT plan_id FROM pools WHERE name = $1", pool)


async def test_a_plan_is_made_from_reported_traffic_and_put_in_force(serving: Installation, database: Any) -> None:
    await add_traffic(database, "busy", hours=1, per_window=15)
    await add_traffic(database, "busy", hours=1, per_window=10, source="another")
    await add_pool(database, "busy", a_spec())
    (plan,) = await until(database, "busy", "applied")
    result = PoolPlanResult.model_validate(plan["result"])
    assert (plan["trigger"], plan["tenant_id"], plan["attempts"]) == ("clock", "acme", 1)
    assert await in_force(database, "busy") == plan["id"]
    demand = result.forecasts.demand["one"]
    assert demand.peaks_qps == {"all": [5.0] * 6}
    assert (demand.is_assumed, demand.method) == (True, "greatest peak so far")
    assert demand.history_s == pytest.approx(3_600, abs=10)
    assert result.forecasts.gpus == {"west": {"A100": 8}}
    grid = result.forecasts.intensity["west"]
    assert (grid.zone, grid.signal, grid.provider) == ("US-CAL-CISO", "average_direct", "recorded")
    assert len(grid.gco2_per_kwh) == 6
    # 5.5/s with head-room: a large one (5/s, 550 W) and a small one (2/s, 300 W), not three small ones (900 W).
    assert {(each.mode, each.count) for each in result.plan.instances} == {("large", 1), ("small", 1)}


async def decisions(database: Any, plan_id: str) -> list[str]:
    return [row["outcome"] for row in await database.fetch("SELECT outcome FROM decisions WHERE id = $1", plan_id)]


async def under_way(database: Any, pool: str) -> Any:
    """Return the pool's newest plan once a worker has it."""

    async def found() -> Any:
        plans = await plans_of(database, pool)
        return plans and plans[-1]["state"] == "running" and plans[-1]

    return await eventually(found, within_s=40)


async def test_jobs_that_may_not_be_preempted_and_other_pools_keep_their_gpus(database: Any) -> None:
    for number, (job, is_preemptible) in enumerate([("own", False), ("training", True), ("fixed", False)]):
        job_spec = {"preemptible": is_preemptible}
        await database.execute(
            "INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state) "
            "VALUES ($1, 'acme', 'a', 'p', '{}', $2, 'running')",
            *(job, job_spec),
        )
        shares = [{"node_id": "node-1", "devices": [number]}]
        await database.execute(
            "INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port) "
            "VALUES ($1 || '.1', $1, 1, 'running', 1, $2, 0)",
            *(job, shares),
        )
        await database.execute("INSERT INTO device_claims VALUES ('node-1', $1, $2)", number, f"{job}.1")
    spec = a_spec()
    terms = {
        "mode": spec.modes[0].model_dump(mode="json"),
        "place": spec.places[0].model_dump(mode="json"),
        "probes": spec.probes.model_dump(mode="json"),
    }
    for name, pool, state, job in [("i1", "mine", "ready", "own"), ("i2", "theirs", "wanted", None)]:
        await database.execute(
            "INSERT INTO pool_instances (id, pool, tenant_id, place, mode, terms, state, job_id) "
            "VALUES ($1, $2, 'acme', 'west', 'small', $3, $4, $5)",
            *(name, pool, terms, state, job),
        )
    await add_traffic(database, "mine", hours=0.2, per_window=5)
    await add_pool(database, "mine", spec)
    (plan,) = await until(database, "mine", "applied")
    result = PoolPlanResult.model_validate(plan["result"])
    assert result.forecasts.gpus == {"west": {"A100": 6}}, "of eight, one is a job's and one another pool's"
    assert (result.plan.starts, result.plan.stops) == ([], []), "the one there suffices"
    await database.execute("DELETE FROM device_claims")


async def test_a_pool_is_not_given_what_another_was_given_just_before(database: Any) -> None:
    half = a_spec(partitions=[{**one_class(), "assumed_qps": {"all": 9}}])  # 9.9/s: two large ones, four GPUs
    for name in ("first", "second", "third"):
        await add_pool(database, name, half)
    found: dict[str, Any] = {}
    for name in ("first", "second", "third"):
        (plan,) = await until(database, name, "applied")
        result = PoolPlanResult.model_validate(plan["result"])
        found[name] = result.forecasts.gpus["west"]["A100"], sum(each.count for each in result.plan.instances)
    assert sorted(found.values()) == [(0, 0), (4, 2), (8, 2)]


async def test_what_cannot_be_served_is_named_and_the_least_shortfall_applied(database: Any) -> None:
    await add_pool(database, "crowded", a_spec(partitions=[{**one_class(), "assumed_qps": {"all": 100}}]))
    (plan,) = await until(database, "crowded", "applied")
    result = PoolPlanResult.model_validate(plan["result"])
    assert (result.plan.status, result.forecasts.demand["one"].method) == ("infeasible", "assumed")
    assert {(each.mode, each.count) for each in result.plan.instances} == {("large", 4)}
    assert [(each.request_class, each.qps) for each in result.plan.shortfall] == [("all", pytest.approx(90))]


def one_class() -> dict[str, Any]:
    return a_spec().partitions[0].model_dump()


async def test_without_the_carbon_service_the_old_plan_stays_until_it_is_back(
    serving: Installation, database: Any
) -> None:
    await add_pool(database, "grid", a_spec())
    (old,) = await until(database, "grid", "applied")
    with stopped(serving.pid("carbon")):
        await revise(database, "grid", a_spec(gap=0.05))

        async def failed() -> bool:
            return sum(plan["outcome"] == "failed" for plan in await plans_of(database, "grid")) >= 2

        await eventually(failed, within_s=60)
        assert await in_force(database, "grid") == old["id"]
        assert (await plans_of(database, "grid"))[1]["failure"] == {
            "code": "unavailable",
            "detail": "The carbon service does not answer; try again.",
        }

    async def applied() -> bool:
        return (await plans_of(database, "grid"))[-1]["outcome"] == "applied"

    await eventually(applied, within_s=60)
    assert await in_force(database, "grid") == (await plans_of(database, "grid"))[-1]["id"] != old["id"]


async def test_a_pool_of_least_energy_needs_no_carbon_service(serving: Installation, database: Any) -> None:
    with stopped(serving.pid("carbon")):
        await add_pool(database, "thrifty", a_spec(objective="energy"))
        (plan,) = await until(database, "thrifty", "applied")
    result = PoolPlanResult.model_validate(plan["result"])
    assert (result.forecasts.intensity, result.plan.emissions_kg) == ({}, None)


async def test_a_plan_is_made_for_the_orders_that_are_in_force(database: Any) -> None:
    await database.execute(
        "INSERT INTO grid_orders (id, key_id, source, body_sha256, name, start_at, end_at, notice_s, steps) "
        "VALUES ('grid_1', 'k', 'api', '', '', now(), now() + interval '1 hour', 0, '[]')"
    )
    try:
        await add_pool(database, "ordered", a_spec())
        (plan,) = await until(database, "ordered", "applied")
    finally:
        await database.execute("DELETE FROM grid_orders")
    result = PoolPlanResult.model_validate(plan["result"])
    assert (result.forecasts.ordered, result.plan.cost) == (["west"], None)
    again = await until(database, "ordered", "applied", "applied")
    assert [each["trigger"] for each in again] == ["clock", "grid_order"]
    assert "ordered" not in again[-1]["result"]["forecasts"], "releases that do not know it can read the plan"


async def test_a_zone_that_is_not_there_fails_with_its_name(database: Any) -> None:
    await add_pool(database, "lost", a_spec(places=[{"name": "deep", "zone": "ATLANTIS"}]))

    async def failed() -> Any:
        plans = await plans_of(database, "lost")
        return plans and plans[0]["failure"]

    failure = await eventually(failed, within_s=40)
    assert failure["code"] == "invalid_problem"
    assert "Place deep, zone ATLANTIS: " in failure["detail"]
    await revise(database, "lost", a_spec())

    async def applied() -> bool:
        return (await plans_of(database, "lost"))[-1]["outcome"] == "applied"

    await eventually(applied, within_s=40)


def planning_worker(serving: Installation) -> psutil.Process:
    (worker,) = psutil.Process(serving.pid("serving")).children()
    return worker


async def test_a_worker_killed_while_it_reads(serving: Installation, database: Any) -> None:
    with stopped(serving.pid("carbon")):
        await add_pool(database, "killed", a_spec())
        plan = await under_way(database, "killed")
        planning_worker(serving).kill()
    (done,) = await until(database, "killed", "applied")
    assert (done["id"], done["attempts"]) == (plan["id"], 2)
    assert await decisions(database, plan["id"]) == ["applied"]
    assert await in_force(database, "killed") == plan["id"]


@pytest.mark.parametrize("victim", ["worker", "serving"])
async def test_what_is_killed_while_the_optimizer_solves_asks_for_the_same_solve_again(
    serving: Installation, database: Any, victim: str
) -> None:
    with stopped(serving.pid("plan-solver")):
        await add_pool(database, victim, a_spec(head_room=len(victim)))  # else an equal problem was solved before

        async def asked() -> Any:
            return await database.fetchval("SELECT idempotency_key FROM solve_submissions WHERE idempotency_key = "
                                           "(SELECT id FROM pool_plans WHERE pool = $1)", victim)  # fmt: skip

        plan_id = await eventually(asked, within_s=40)
        planning_worker(serving).kill() if victim == "worker" else os.kill(serving.pid("serving"), signal.SIGKILL)

        async def taken_up() -> bool:
            return (await plans_of(database, victim))[-1]["attempts"] == 2

        await eventually(taken_up, within_s=40)
    (done,) = await until(database, victim, "applied")
    assert (done["id"], done["attempts"]) == (plan_id, 2)
    solves = await database.fetch("SELECT * FROM solves WHERE submitted_at >= $1", done["submitted_at"])
    assert [(solve["state"], solve["key_id"], solve["tenant_id"]) for solve in solves] == [
        ("succeeded", "serving", "installation")
    ]
    assert done["problem"].keys() == {"made_at", "spec"}, "what was asked is not kept beside the answer"


async def test_a_plan_that_nobody_wants_any_more_has_its_solve_cancelled(serving: Installation, database: Any) -> None:
    with stopped(serving.pid("plan-solver")):
        await add_pool(database, "unwanted", a_spec(head_room=3))

        async def solve() -> Any:
            return await database.fetchrow(
                "SELECT s.state FROM solves s JOIN solve_submissions k ON k.solve_id = s.id "
                "JOIN pool_plans p ON p.id = k.idempotency_key WHERE p.pool = 'unwanted'"
            )

        assert (await eventually(solve, within_s=40))["state"] == "queued"
        await database.execute("UPDATE pools SET deleted_at = now() WHERE name = 'unwanted'")

        async def cancelled() -> bool:
            return (await solve())["state"] == "cancelled"

        await eventually(cancelled, within_s=40)
    (plan,) = await plans_of(database, "unwanted")
    assert (plan["state"], plan["outcome"]) == ("cancelled", "superseded")


async def test_a_service_killed_between_the_answer_and_its_application(serving: Installation, database: Any) -> None:
    service = serving.pid("serving")
    with stopped(serving.pid("carbon")):
        await add_pool(database, "between", a_spec())
        plan = await under_way(database, "between")
        os.kill(service, signal.SIGSTOP)

    async def answered() -> bool:
        return (await plans_of(database, "between"))[-1]["state"] == "succeeded"

    await eventually(answered, within_s=40)
    assert await in_force(database, "between") is None
    os.kill(service, signal.SIGKILL)
    (done,) = await until(database, "between", "applied")
    assert done["id"] == plan["id"] == await in_force(database, "between")
    assert await decisions(database, plan["id"]) == ["applied"]


async def test_a_change_while_a_plan_is_made_supersedes_it(serving: Installation, database: Any) -> None:
    with stopped(serving.pid("carbon")):
        await add_pool(database, "changed", a_spec())
        plan = await under_way(database, "changed")
        await revise(database, "changed", a_spec(head_room=2))

        async def superseded() -> bool:
            return (await plans_of(database, "changed"))[0]["outcome"] == "superseded"

        await eventually(superseded)
    plans = await plans_of(database, "changed")
    assert plans[0]["id"] == plan["id"]
    (_, new) = await until(database, "changed", "superseded", "applied")
    assert (new["revision"], await in_force(database, "changed")) == (2, new["id"])
