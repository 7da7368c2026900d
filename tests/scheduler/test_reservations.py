"""Reservations and maintenance, live: made over HTTP, stored, kept by the next rounds, cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from services.contracts.identity import Identity, Role
from services.core.domain.carbon import CarbonCurve, CarbonOutlook
from services.core.domain.signal import Signal
from services.kit.problems import install_problem_handlers
from services.scheduler import grid_endpoints
from services.scheduler.planning.dry_run import LiveView
from services.scheduler.power.hooks import NoHook
from services.scheduler.reservations import Reservations
from tests.scheduler.test_device_controls import active_round
from tests.scheduler.world import World
from tests.support.tokens import ActingAs


@asynccontextmanager
async def reserving(
    world: World, role: Role = Role.OPERATOR, tenant: str = "default"
) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    install_problem_handlers(app)
    app.include_router(grid_endpoints.reservations)
    await world.scheduler.prepare()
    view = LiveView(world.database, world.settings, world.scheduler._carbon, NoHook())
    app.state.reservations, app.state.redis = Reservations(world.database, view), world.redis
    identity = Identity(tenant_id="default", role=role, key_id="key-1")
    transport = httpx.ASGITransport(ActingAs(app, identity))
    async with httpx.AsyncClient(transport=transport, base_url="http://scheduler") as api:
        yield api


def at(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


async def make(world: World, status: int = 201, role: Role = Role.OPERATOR, **spec: Any) -> dict[str, Any]:
    async with reserving(world, role) as api:
        answer = await api.post("/v1/reservations", json={"duration_s": 3_600, **spec})
    assert answer.status_code == status, answer.text
    await world.scheduler.turn()
    return answer.json()


async def hour_passes(world: World, hours: float = 1.0) -> None:
    """Let reservations come nearer, as if time had passed."""
    await world.fetch(
        "UPDATE reservations SET start_at = start_at - make_interval(secs => $1), "
        "end_at = end_at - make_interval(secs => $1) RETURNING 1",
        3_600 * hours,
    )
    await world.scheduler.turn()
    await active_round(world)


async def reason(world: World, job: str) -> str | None:
    (row,) = await world.fetch("SELECT reason FROM jobs WHERE id = $1", job)
    return row["reason"]


async def test_a_slot_is_used_until_it_begins_and_is_its_holders_then(world: World) -> None:
    await world.node("n1", 4)
    first = await world.running(2)
    made = await make(world, gpus=4, tenant_id="b", start_at=at(7_200))
    assert (made["state"], made["gpus"], made["tenant_id"]) == ("ahead", {"n1": 4}, "b")
    [slot] = made["slots"]
    assert slot["carbon_gco2"] == pytest.approx(slot["intensity_gco2_per_kwh"] * 4 * 0.3, rel=0.5), "about 300 W a GPU"
    assert await world.state(first) == "running"

    await hour_passes(world, 2 - 100 / 3_600)

    gang = await world.allocation(first)
    (row,) = await world.fetch("SELECT state, stop_reason FROM allocations WHERE id = $1", gang)
    assert tuple(row) == ("stopping", "preempted"), "it has its grace period to write a checkpoint"
    await world.report(gang, "exited", exit_code=0, ended_by="stop")
    await hour_passes(world, 110 / 3_600)
    assert (await world.state(first), await reason(world, first)) == ("queued", "reserved")
    theirs = await world.job(2)
    await world.fetch("UPDATE jobs SET tenant_id = 'b' WHERE id = $1 RETURNING 1", theirs)
    await active_round(world)
    assert await world.state(theirs) == "starting"
    assert await world.state(first) == "queued"

    async with reserving(world) as api:
        gone = (await api.delete(f"/v1/reservations/{made['id']}")).json()
        again = await api.delete(f"/v1/reservations/{made['id']}")
        listed = (await api.get("/v1/reservations")).json()["items"]
    assert (gone["state"], again.status_code, listed) == ("cancelled", 200, [gone])
    await active_round(world)
    assert await world.state(first) == "starting", "what is not reserved any more is used"
    actions = await world.fetch("SELECT action FROM audit_log ORDER BY at")
    assert [row["action"] for row in actions] == ["reservation.made", "reservation.cancelled"]


async def test_maintenance_lets_jobs_with_limits_run_and_says_which_stay(world: World) -> None:
    await world.node("n1", 3)
    short = await world.running(1, time_limit_s=20, grace_s=10)
    firm = await world.running(1, preemptible=False)
    soft = await world.running(1)
    made = await make(world, maintenance=True, nodes=["n1"], start_at=at(3_600))
    assert (made["stays"], made["tenant_id"], made["gpus"]) == ([firm], None, {"n1": 3})
    late = await make(world, 409, gpus=1, start_at=at(5_000))
    assert late["code"] == "conflict", "nothing is reserved of what is in maintenance"

    await hour_passes(world, 1 - 60 / 3_600)

    gangs = [await world.allocation(job) for job in (short, firm, soft)]
    states = await world.fetch("SELECT id, state FROM allocations")
    assert [dict(map(tuple, states))[gang] for gang in gangs] == ["running", "running", "stopping"]
    new = await world.job(1, preemptible=False)
    await hour_passes(world, 61 / 3_600)
    assert (await world.state(new), await world.state(firm)) == ("queued", "running")


async def test_nothing_is_reserved_twice_however_many_ask_at_once(world: World) -> None:
    await world.node("n1", 4)
    await world.node("n2", 4, model="H100")
    async with reserving(world) as api:
        body = {"gpus": 3, "start_at": at(3_600), "duration_s": 600}
        answers = await asyncio.gather(*(api.post("/v1/reservations", json=body) for _ in range(4)))
        after = await api.post("/v1/reservations", json={**body, "start_at": at(4_201)})
    assert sorted(answer.status_code for answer in answers) == [201, 201, 409, 409]
    assert {answer.json()["gpu_model"] for answer in answers if answer.status_code == 201} == {"A100", "H100"}
    assert after.status_code == 201, "after it the GPUs are free"


async def test_the_same_key_is_the_same_reservation(world: World) -> None:
    await world.node("n1", 4)
    async with reserving(world) as api:
        body, key = {"gpus": 3, "start_at": at(3_600), "duration_s": 600}, {"Idempotency-Key": "k"}
        answers = await asyncio.gather(*(api.post("/v1/reservations", json=body, headers=key) for _ in range(3)))
        other = await api.post("/v1/reservations", json={**body, "gpus": 1}, headers=key)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 201]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


async def test_a_twin_that_is_stored_while_one_looks_is_the_same_reservation(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the GPUs then: whoever looked at keys first and at GPUs afterwards would refuse itself."""
    await world.node("n1", 4)
    async with reserving(world) as api:
        read, twins = LiveView.read, list[httpx.Response]()
        body, key = {"gpus": 3, "start_at": at(3_600), "duration_s": 600}, {"Idempotency-Key": "k"}

        async def late(view: LiveView) -> Any:
            monkeypatch.setattr(LiveView, "read", read)
            twins.append(await api.post("/v1/reservations", json=body, headers=key))
            return await read(view)

        monkeypatch.setattr(LiveView, "read", late)
        answer = await api.post("/v1/reservations", json=body, headers=key)
    assert [each.status_code for each in (*twins, answer)] == [201, 200], answer.text
    assert answer.json()["id"] == twins[0].json()["id"]


async def test_the_cleanest_slot_is_chosen_and_the_others_are_shown(world: World) -> None:
    now_s = datetime.now(UTC).timestamp()
    hours: Any = np.arange(24.0)
    values = np.where(hours == 5, 100.0, 400.0 + hours)
    curve = CarbonCurve(now_s + 3_600 * hours, values, now_s + 86_400)
    world.scheduler._carbon._known["Z"] = CarbonOutlook("Z", Signal.AVERAGE_DIRECT, curve)
    await world.node("n1", 4)
    made = await make(world, gpus=4, before=at(20 * 3_600))
    begins_s = datetime.fromisoformat(made["start_at"]).timestamp()
    assert begins_s == pytest.approx(now_s + 5 * 3_600, abs=450), "to the quarter of an hour"
    grams = [slot["carbon_gco2"] for slot in made["slots"]]
    assert grams == sorted(grams)
    assert len(grams) == 24
    assert not any(slot["estimated"] for slot in made["slots"])
    again = await make(world, gpus=4, before=at(30 * 3_600))
    assert again["start_at"] != made["start_at"], "it is taken"


async def test_who_may_reserve_what(world: World) -> None:
    await world.node("n1", 4)
    user, ahead = Role.USER, at(3_600)
    free = await make(world, 201, user, gpus=4, start_at=at(90_000))
    assert free["gpus"] == {"n1": 4}, "a tenant without a limit may hold all"
    assert (await make(world, 403, user, maintenance=True, nodes=["n1"]))["code"] == "forbidden"
    assert (await make(world, 403, user, gpus=1, tenant_id="b"))["code"] == "forbidden"
    await world.fetch(
        "INSERT INTO tenants (id, limits) VALUES ('default', $1) "
        "ON CONFLICT (id) DO UPDATE SET limits = $1 RETURNING 1",
        {"max_gpus": 3},
    )
    assert (await make(world, 201, user, gpus=2, start_at=ahead))["tenant_id"] == "default"
    assert (await make(world, 403, user, gpus=2, start_at=ahead))["code"] == "quota_exceeded"
    theirs = await make(world, 201, gpus=1, start_at=ahead, tenant_id="b")
    async with reserving(world, user) as api:
        assert (await api.delete(f"/v1/reservations/{theirs['id']}")).status_code == 404
        assert len((await api.get("/v1/reservations")).json()["items"]) == 2


@pytest.mark.parametrize(
    ("spec", "pointer"),
    [
        ({"gpus": 1, "start_at": at(-7_200)}, "/start_at"),
        ({"gpus": 1, "before": at(60)}, "/before"),
        ({"maintenance": True, "nodes": ["n9"]}, "/nodes"),
        ({"maintenance": True, "zone": "X"}, "/zone"),
        ({"gpus": 1, "maintenance": True}, ""),
        ({"gpus": 1, "before": at(9_000), "start_at": at(60)}, ""),
    ],
)
async def test_what_cannot_be_is_refused_and_stores_nothing(world: World, spec: dict[str, Any], pointer: str) -> None:
    await world.node("n1", 4)
    problem = await make(world, 422, **spec)
    assert [error["pointer"] for error in problem["errors"]] == [pointer]
    assert await world.fetch("SELECT id FROM reservations") == []


async def test_gpus_of_jobs_that_may_not_be_stopped_are_not_reserved(world: World) -> None:
    await world.node("n1", 4)
    firm = await world.running(2, preemptible=False)
    assert (await make(world, 409, gpus=3, start_at=at(3_600)))["code"] == "conflict"
    await make(world, gpus=2, start_at=at(3_600), tenant_id="b")
    more = await world.job(1, preemptible=False)
    limited = await world.job(1, preemptible=False, time_limit_s=600)
    await active_round(world)
    assert (await world.state(more), await reason(world, more)) == ("queued", "reserved")
    assert (await world.state(limited), await world.state(firm)) == ("starting", "running")
