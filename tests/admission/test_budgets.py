"""Budgets of projects: counted from the ledger, held and released, warned of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from services.admission.budgets import Budgets
from services.admission.repository.budgets import BudgetRepository
from services.admission.settings import ModelPrice
from services.contracts.identity import ResolvedKey
from services.db.database import Database
from services.db.engine import create_engine
from services.scheduler.repository import snapshots
from tests.admission.conftest import admission_on
from tests.admission.installation import Admission


@pytest.fixture(scope="module")
async def admission(
    database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Admission]:
    """Admission that counts only when it is asked to."""
    folder: Path = tmp_path_factory.mktemp("admission")
    async with admission_on(database_url, redis_url, folder, budget_interval_s=3_600) as found:
        yield found


async def spend(admission: Admission, job_id: str, kwh: float, *, at: datetime | None = None) -> None:
    """Add a ledger line of an hour on one GPU at 500 gCO2/kWh."""
    start = at or datetime.now(UTC)
    await admission.database.execute(
        """INSERT INTO energy_usages (node_id, boot_id, sequence, owner, job_id, start_at, end_at, gpus, gpu_energy_j,
            cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue,
            carbon_gco2) VALUES ('n', $1, 1, $1, $2, $3, $4, 1, $5, 0, 0, 'counter', 'DE', 'average_direct', 500,
            false, 1, $6)""",
        f"{job_id}-{start.timestamp()}",
        job_id,
        start,
        start + timedelta(hours=1),
        kwh * 3.6e6,
        kwh * 500,
    )


async def put(admission: Admission, tenant: str, **spec: Any) -> dict[str, Any]:
    answer = await admission.ask("PUT", "/v1/budgets", role="admin", json={"tenant_id": tenant, **spec})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def job(admission: Admission, job_id: str, tenant: str) -> dict[str, Any]:
    return (await admission.ask("GET", f"/v1/jobs/{job_id}", tenant=tenant)).json()


async def events(admission: Admission, job_id: str) -> list[str]:
    query = "SELECT type FROM job_events WHERE job_id = $1 ORDER BY transaction_id, sequence"
    return [row["type"] for row in await admission.database.fetch(query, job_id)]


async def planned(database_url: str) -> set[str]:
    """Return the jobs that the scheduler would see."""
    database = await Database.open(database_url, size=1)
    async with database.connection() as connection:
        found = {row.id for row in await snapshots.jobs(connection)}
    await database.close()
    return found


async def test_jobs_beyond_a_budget_are_held_by_name_and_released_when_it_is_raised(
    admission: Admission, database_url: str
) -> None:
    tenant = await admission.make_tenant("holds")
    waits = await admission.submit({"project": "vision"}, tenant=tenant)
    other = await admission.submit({"project": "speech"}, tenant=tenant)
    runs = await admission.submit({"project": "vision"}, tenant=tenant)
    await admission.start(runs)
    await spend(admission, runs, 2.0)
    await spend(admission, runs, 50.0, at=datetime.now(UTC) - timedelta(days=40))

    made = await put(admission, tenant, project="vision", quantity="kwh", amount=2)

    assert (made["used"], made["exceeded"]) == (2.0, True)
    held = await job(admission, waits, tenant)
    assert (held["state"], held["reason"]) == ("held", "budget_exceeded")
    month = f"{datetime.now(UTC):%Y-%m}"
    assert held["detail"] == f"The budget of project vision for {month} is 2 kWh; 2 are used."
    assert (await job(admission, other, tenant))["state"] == "queued"
    assert (await job(admission, runs, tenant))["state"] == "running"
    late = await admission.submit({"project": "vision"}, tenant=tenant)
    seen = await planned(database_url)
    assert {other, runs} <= seen
    assert late not in seen, "not counted yet, and still not started"

    again = await put(admission, tenant, project="vision", quantity="kwh", amount=3)

    assert again["id"] == made["id"]
    assert (await job(admission, waits, tenant))["state"] == "queued"
    assert late in await planned(database_url)
    assert await events(admission, waits) == ["job.submitted", "job.held", "job.queued"]


async def test_a_job_that_comes_while_budgets_are_counted_is_held_after_it_was_submitted(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of its events, which go by transactions, would else take it for one that is queued."""
    tenant, spent, late = await admission.make_tenant("late"), BudgetRepository.spent, list[str]()

    async def meanwhile(self: BudgetRepository, start_at: datetime) -> Any:
        late.append(await admission.submit({}, tenant=tenant))
        return await spent(self, start_at)

    monkeypatch.setattr(BudgetRepository, "spent", meanwhile)
    await put(admission, tenant, quantity="kwh", amount=0)

    assert await events(admission, late[0]) == ["job.submitted", "job.held"]


async def test_the_waiting_tasks_of_an_array_are_held_and_those_that_run_go_on(
    admission: Admission, database_url: str
) -> None:
    tenant = await admission.make_tenant("sweeps")
    array_id = await admission.submit({"project": "vision", "array": "0-4%2"}, tenant=tenant)
    path = f"/v1/arrays/{array_id}"
    tasks = (await admission.ask("GET", f"/v1/jobs?array={array_id}", tenant=tenant)).json()["items"]
    ids = sorted(task["id"] for task in tasks)
    await admission.start(ids[0])
    await spend(admission, ids[0], 2.0)

    made = await put(admission, tenant, project="vision", quantity="kwh", amount=2)

    held = (await admission.ask("GET", path, tenant=tenant)).json()
    assert (held["state"], held["tasks"]["running"], held["tasks"]["held"]) == ("running", 1, 4)
    assert (held["waiting"], held["next_task"]) == ({"budget_exceeded": 4}, ids[1])
    assert not set(ids[1:]) & await planned(database_url)
    assert (await admission.ask("POST", f"{path}/release", tenant=tenant)).status_code == 200
    assert not set(ids[1:]) & await planned(database_url), "an own release does not lift a budget"

    await admission.ask("DELETE", f"/v1/budgets/{made['id']}", role="admin")

    freed = (await admission.ask("GET", path, tenant=tenant)).json()
    assert (freed["tasks"]["queued"], freed["waiting"], freed["next_task"]) == (4, {}, ids[1])
    assert set(ids) <= await planned(database_url)


async def test_a_job_that_its_user_holds_is_not_released_by_a_budget(admission: Admission) -> None:
    tenant = await admission.make_tenant("mine")
    held = await admission.submit({"project": "vision", "hold": True}, tenant=tenant)
    later = await admission.submit({"project": "vision"}, tenant=tenant)
    array = await admission.submit({"project": "vision", "array": "0-1"}, tenant=tenant)
    made = await put(admission, tenant, project="vision", quantity="gpu_h", amount=0)
    for path in (f"/v1/jobs/{later}/hold", f"/v1/arrays/{array}/hold") * 2:
        answer = await admission.ask("POST", path, tenant=tenant)
        assert (answer.status_code, answer.json()["state"]) == (200, "held"), "also of what the budget holds already"
    assert (await admission.ask("DELETE", f"/v1/budgets/{made['id']}", role="admin")).status_code == 204
    kept = await job(admission, later, tenant)
    assert (kept["state"], kept["reason"], kept["detail"]) == ("held", "held", None)
    assert await events(admission, later) == ["job.submitted", "job.held", "job.held"]
    assert (await admission.ask("GET", f"/v1/arrays/{array}", tenant=tenant)).json()["waiting"] == {"held": 2}
    assert (await admission.ask("DELETE", f"/v1/budgets/{made['id']}", role="admin")).status_code == 404
    assert (await job(admission, held, tenant))["reason"] == "held"


async def test_a_warning_is_in_the_job_and_once_in_its_events(admission: Admission, database_url: str) -> None:
    tenant = await admission.make_tenant("warns")
    job_id = await admission.submit({"project": "vision"}, tenant=tenant)
    await spend(admission, job_id, 1.0)
    for _ in range(2):
        await put(admission, tenant, quantity="gco2", amount=400, action="warn")
    found = await job(admission, job_id, tenant)
    assert found["state"] == "queued"
    month = f"{datetime.now(UTC):%Y-%m}"
    assert found["warnings"] == [f"The budget of tenant warns for {month} is 400 gCO2; 500 are used."]
    assert await events(admission, job_id) == ["job.submitted", "job.budget_warning"]
    assert job_id in await planned(database_url)


async def test_a_new_month_begins_at_zero(admission: Admission, database_url: str) -> None:
    tenant = await admission.make_tenant("months")
    job_id = await admission.submit({"project": "vision"}, tenant=tenant)
    await spend(admission, job_id, 1.0)
    assert (await put(admission, tenant, project="vision", quantity="gpu_h", amount=1))["exceeded"]
    assert (await job(admission, job_id, tenant))["state"] == "held"
    engine = create_engine(database_url)
    hints: list[None] = []
    await Budgets(engine, lambda: hints.append(None), now=lambda: datetime(2099, 1, 1, tzinfo=UTC)).count()
    await engine.dispose()
    assert (await job(admission, job_id, tenant))["state"] == "queued"
    assert len(hints) == 1, "the scheduler is told"


async def test_budgets_are_seen_by_their_tenant_and_set_by_admins(admission: Admission) -> None:
    tenant = await admission.make_tenant("sees")
    spec = {"tenant_id": tenant, "quantity": "kwh", "amount": 1}
    assert (await admission.ask("PUT", "/v1/budgets", role="operator", json=spec)).status_code == 403
    await put(admission, tenant, quantity="kwh", amount=1)
    own = (await admission.ask("GET", "/v1/budgets", tenant=tenant)).json()["items"]
    assert [(budget["tenant_id"], budget["project"], budget["exceeded"]) for budget in own] == [(tenant, None, False)]
    assert (await admission.ask("GET", "/v1/budgets", tenant="default")).json()["items"] == []
    stranger = await admission.ask("PUT", "/v1/budgets", role="admin", json={**spec, "tenant_id": "nobody"})
    assert (stranger.status_code, stranger.json()["errors"][0]["pointer"]) == (422, "/tenant_id")


async def use(admission: Admission, key_id: str, model: str, tokens: int, gco2: float, at: datetime) -> None:
    """Add requests of a key, as telemetry does."""
    await admission.database.execute(
        """INSERT INTO request_usages (router, start_at, job_id, tenant_id, key_id, model, request_class, requests,
            input_tokens, output_tokens, share_s, energy_j, carbon_gco2)
           VALUES ('r', $1, 'j', 'default', $2, $3, 'any', 1, $4, $4, 1, 1, $5)""",
        at,
        key_id,
        model,
        tokens,
        gco2,
    )


async def test_what_a_key_and_those_before_it_have_used_exceeds_its_budget_until_the_month_ends(
    admission: Admission, database_url: str
) -> None:
    """All three are counted from what routers report; whoever asks whose key it is hears which one is used up."""
    engine = create_engine(database_url)
    now = datetime.now(UTC)
    last_month = now.replace(day=1) - timedelta(days=2)
    prices = {"dear": ModelPrice(input=1.0, output=3.0)}
    body = {"tenant_id": "default", "limits": {"month_gco2": 10.0, "month_cost": 1.0, "month_tokens": 10**9}}
    old = (await admission.ask("POST", "/v1/keys", role="admin", json=body)).json()
    await use(admission, old["id"], "dear", 100_000, 4.0, now)
    await use(admission, old["id"], "free", 100_000, 5.0, now)
    await use(admission, old["id"], "free", 7, 100.0, last_month)

    async def excess(key_id: str) -> str | None:
        await Budgets(engine, lambda: None, prices=prices).count()
        answer = await admission.ask("POST", "/internal/keys/resolve", json={"key_id": key_id})
        return ResolvedKey.model_validate_json(answer.content).excess

    assert await excess(old["id"]) is None
    (shown,) = [
        key for key in (await admission.ask("GET", "/v1/keys", role="admin")).json()["items"] if key["id"] == old["id"]
    ]
    assert shown["used"] == {"month": f"{now:%Y-%m}", "tokens": 400_000, "gco2": 9.0, "cost": pytest.approx(0.4)}
    path = f"/v1/keys/{old['id']}/rotate"
    new = (await admission.ask("POST", path, role="admin", json={"overlap_s": 60})).json()
    assert new["used"] == shown["used"]
    await use(admission, new["id"], "free", 1, 1.0, now)
    assert await excess(old["id"]) is None
    assert "10 gCO2; 10 are used" in (await excess(new["id"]) or "")
    raised = {"limits": {"month_gco2": 20.0, "month_cost": 0.4}}
    await admission.ask("PATCH", f"/v1/keys/{new['id']}", role="admin", json=raised)
    assert "0.4 in money" in (await excess(new["id"]) or "")
    await admission.database.execute(
        'UPDATE api_keys SET used = used || \'{"month": "2020-01"}\' WHERE id = $1', new["id"]
    )
    answer = await admission.ask("POST", "/internal/keys/resolve", json={"key_id": new["id"]})
    assert "excess" not in answer.json(), "a new month begins at zero"
    await engine.dispose()


async def test_a_job_that_a_plan_has_locked_waits_for_the_next_count(admission: Admission) -> None:
    """A plan locks many jobs in an order of its own: a count that waited for one could be what PostgreSQL ends."""
    tenant = await admission.make_tenant("locks")
    first, second = [await admission.submit({"project": "vision"}, tenant=tenant) for _ in range(2)]
    plan = await asyncpg.connect(admission.database_url)
    try:
        async with asyncio.timeout(10):
            for amount, before, after in ((0, "queued", "held"), (10, "held", "queued")):
                async with plan.transaction():
                    await plan.execute("SELECT FROM jobs WHERE id = $1 FOR UPDATE", second)
                    await put(admission, tenant, project="vision", quantity="kwh", amount=amount)
                    assert [(await job(admission, each, tenant))["state"] for each in (first, second)] == [
                        after,
                        before,
                    ]
                await admission.app.state.budgets.count()
                assert (await job(admission, second, tenant))["state"] == after
    finally:
        await plan.close()


async def test_a_count_waits_for_nobody_who_changes_keys(admission: Admission) -> None:
    tenant = await admission.make_tenant("key-locks")
    made = await admission.ask(
        "POST", "/v1/keys", role="admin", json={"tenant_id": tenant, "limits": {"month_tokens": 5}}
    )
    other = await asyncpg.connect(admission.database_url)
    used = "SELECT used FROM api_keys WHERE id = $1"
    try:
        async with other.transaction(), asyncio.timeout(10):
            await other.execute("SELECT FROM api_keys WHERE id = $1 FOR UPDATE", made.json()["id"])
            await admission.app.state.budgets.count()
            assert await admission.database.fetchval(used, made.json()["id"]) is None
        await admission.app.state.budgets.count()
        assert '"tokens": 0' in await admission.database.fetchval(used, made.json()["id"])
    finally:
        await other.close()


async def test_a_budget_that_was_set_is_answered_for_although_the_count_fails(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await admission.make_tenant("unlucky")

    async def lose(_: Budgets) -> None:
        raise RuntimeError("deadlock detected")

    monkeypatch.setattr(Budgets, "count", lose)
    made = await put(admission, tenant, quantity="kwh", amount=5)
    assert made["amount"] == 5
    assert (await admission.ask("DELETE", f"/v1/budgets/{made['id']}", role="admin")).status_code == 204
