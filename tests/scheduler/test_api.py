"""Policies and rounds over HTTP."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.contracts.identity import Identity, Role
from services.core.cycle.snapshot import Trigger
from services.core.domain.reasons import Reason
from services.kit.problems import install_problem_handlers
from services.scheduler import endpoints
from services.scheduler.power.hooks import build_hook
from services.scheduler.reasons import SENTENCES
from services.scheduler.service import SchedulerService
from tests.scheduler.world import World
from tests.support.tokens import ActingAs


def client(world: World, role: Role = Role.OPERATOR) -> httpx.AsyncClient:
    app = FastAPI()
    install_problem_handlers(app)
    app.include_router(endpoints.router)
    app.state.service, app.state.redis = SchedulerService(world.database), world.redis
    app.state.settings, app.state.scheduler = world.settings, world.scheduler
    app.state.power_hook = build_hook(world.settings)
    identity = Identity(tenant_id="default", role=role, key_id="key-1")
    return httpx.AsyncClient(transport=httpx.ASGITransport(ActingAs(app, identity)), base_url="http://scheduler")


def test_every_reason_has_a_sentence() -> None:
    assert set(SENTENCES) == set(Reason)


async def test_an_operator_changes_the_policy_and_is_noted(world: World) -> None:
    await world.scheduler.turn()
    async with client(world) as api:
        answer = await api.put("/v1/policies/active", json={"name": "green", "parameters": {"mu": 3}})
        active = (await api.get("/v1/policies/active")).json()
        listed = (await api.get("/v1/policies")).json()["items"]

    assert answer.status_code == 200
    assert (active["name"], active["parameters"]["mu"], active["changed_by"]) == ("green", 3, "key-1")
    assert [entry["name"] for entry in listed if entry["active"]] == ["green"]
    (noted,) = await world.fetch("SELECT action, target, data FROM audit_log")
    assert tuple(noted) == ("policy.set", "green", {"parameters": {"mu": 3}})


@pytest.mark.parametrize(
    ("choice", "status", "code", "pointer"),
    [
        ({"name": "greed"}, 404, "unknown_policy", "/name"),
        ({"name": "green", "parameters": {"mu": 0.5}}, 422, "invalid_policy_parameters", "/parameters/mu"),
        ({"name": "green", "parameters": {"mu": True}}, 422, "invalid_policy_parameters", "/parameters/mu"),
        ({"name": "green", "parameters": {"nu": 1}}, 422, "invalid_policy_parameters", "/parameters/nu"),
        ({"parameters": {}}, 422, "invalid_request", "/name"),
    ],
)
async def test_a_bad_choice_changes_nothing(world: World, choice: Any, status: int, code: str, pointer: str) -> None:
    await world.scheduler.turn()
    async with client(world) as api:
        answer = await api.put("/v1/policies/active", json=choice)
        active = (await api.get("/v1/policies/active")).json()

    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["errors"][0]["pointer"]) == (status, code, pointer)
    assert active["name"] == "fifo"
    assert await world.fetch("SELECT 1 FROM audit_log") == []


async def test_a_user_may_look_but_not_steer(world: World) -> None:
    await world.scheduler.turn()
    async with client(world, Role.USER) as api:
        assert (await api.get("/v1/policies/green")).status_code == 200
        assert (await api.put("/v1/policies/active", json={"name": "las"})).status_code == 403
        assert (await api.get("/v1/plans")).status_code == 403


async def test_rounds_are_listed_newest_first(world: World) -> None:
    await world.node("n1", 4)
    jobs = []
    for _ in range(3):
        jobs.append(await world.job())
        await world.scheduler.turn()
    async with client(world) as api:
        first = (await api.get("/v1/plans?limit=2")).json()
        rest = (await api.get("/v1/plans", params={"cursor": first["next_cursor"]})).json()
        one = (await api.get(f"/v1/plans/{first['items'][0]['round']}")).json()
        missing = await api.get("/v1/plans/999999")
        nonsense = await api.get("/v1/plans?cursor=x")

    started = [action["job_id"] for plan in first["items"] + rest["items"] for action in plan["actions"]]
    assert started == jobs[::-1]
    assert one == first["items"][0]
    assert (missing.status_code, nonsense.status_code) == (404, 422)


async def test_a_stored_policy_that_no_longer_builds_stops_no_round_and_an_operator_sees_why(world: World) -> None:
    await world.scheduler.turn()
    async with world.database.connection() as connection:
        await connection.execute("UPDATE scheduler_state SET parameters = '{\"long_gone\": 1}'")

    held = await world.scheduler.hold(Trigger.ACTIVE)

    assert held is not None
    async with client(world) as api:
        active = (await api.get("/v1/policies/active")).json()
        assert "long_gone" in active["problem"]
        choice = {"name": "fifo", "parameters": {}}
        assert (await api.put("/v1/policies/active", json=choice)).json().get("problem") is None


async def test_a_stored_policy_of_the_lab_without_the_lab_stops_no_round_and_says_what_to_install(world: World) -> None:
    """As after an upgrade from a release that had it: its memory stays for when the lab is there."""
    await world.node("n1", 2)
    await world.scheduler.turn()
    memory = {"turns": {"a": 1}}
    await world.fetch(
        "UPDATE scheduler_state SET policy = 'gandiva', parameters = '{}', memory = $1 RETURNING 1", memory
    )
    job = await world.job()

    held = await world.scheduler.hold(Trigger.ACTIVE)

    assert held is not None
    assert await world.state(job) == "starting"
    assert tuple((await world.fetch("SELECT policy, memory FROM scheduler_state"))[0]) == ("gandiva", memory)
    async with client(world) as api:
        active = (await api.get("/v1/policies/active")).json()
        listed = (await api.get("/v1/policies")).json()["items"]
        shares = (await api.get("/v1/shares")).json()
        one = (await api.get("/v1/policies/fair+gandiva")).json()
        chosen = await api.put("/v1/policies/active", json={"name": "las+zeus", "parameters": {}})
    assert (active["name"], [entry for entry in listed if entry["active"]]) == ("gandiva", [])
    assert (shares["policy"], shares["active"]) == ("gandiva", False)
    assert chosen.status_code == 404
    for said in (active["problem"], one["detail"], chosen.json()["detail"]):
        assert "wattshift-lab" in said
        assert "pip install ./lab" in said
    assert "'las+zeus'" in chosen.json()["detail"]


async def test_a_round_is_shown_though_its_actions_say_more_than_a_plan_shows(world: World) -> None:
    """Where a policy chose the batch, the action has its size, and a later release may write yet other fields."""
    await world.node("n1", 4)
    await world.job()
    await world.scheduler.turn()
    await world.fetch("UPDATE plans SET actions = jsonb_set(actions, '{0,batch_size}', '64') RETURNING 1")
    async with client(world) as api:
        listed = await api.get("/v1/plans")
        one = await api.get(f"/v1/plans/{listed.json()['items'][0]['round']}")

    assert (listed.status_code, one.status_code) == (200, 200)
    assert one.json()["actions"][0]["action"] == "start"
