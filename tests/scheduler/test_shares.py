"""Shares between tenants, from the tenants' weights to what operators see."""

from __future__ import annotations

import pytest

from services.contracts.identity import Role
from services.contracts.policies import TenantShares
from services.core.cycle.plan import Start
from services.core.cycle.snapshot import Trigger
from services.scheduler.planning.apply import StalePlanError, apply
from services.scheduler.planning.snapshot import load
from tests.scheduler.test_api import client
from tests.scheduler.test_explanations import explain
from tests.scheduler.test_rounds import decided_on
from tests.scheduler.world import World


async def jobs_of(world: World, tenant: str, count: int) -> list[str]:
    """Queue jobs of a tenant."""
    found = [await world.job() for _ in range(count)]
    await world.fetch("UPDATE jobs SET tenant_id = $1 WHERE id = ANY($2::text[]) RETURNING 1", tenant, found)
    return found


async def weigh(world: World, tenant: str, limits: dict[str, float]) -> None:
    """Store a tenant, as admission does."""
    await world.fetch("INSERT INTO tenants (id, limits) VALUES ($1, $2) RETURNING 1", tenant, limits)


async def shown(world: World) -> TenantShares:
    """Return what an operator sees."""
    async with client(world) as api:
        return TenantShares.model_validate_json((await api.get("/v1/shares")).content)


async def test_gpus_are_shared_by_weights_that_operators_set(world: World) -> None:
    await world.scheduler.turn()
    async with client(world) as api:
        chosen = await api.put("/v1/policies/active", json={"name": "fair+fifo"})
        listed = (await api.get("/v1/policies")).json()["items"]
    assert chosen.json()["parameters"]["share_half_life_s"] == 604_800.0
    assert [entry["name"] for entry in listed if entry["active"]] == ["fair+fifo"]
    await world.node("n0", gpus=4)
    await weigh(world, "vision", {"share_weight": 3.0})
    await weigh(world, "old", {"max_active_jobs": 5})  # as the release before stored it
    first, vision = await jobs_of(world, "old", 6), await jobs_of(world, "vision", 6)

    await world.scheduler.turn()

    starting = [row[0] for row in await world.fetch("SELECT id FROM jobs WHERE state = 'starting'")]
    assert (len(set(starting) & set(first)), len(set(starting) & set(vision))) == (1, 3)
    held = await shown(world)
    assert (held.policy, held.active) == ("fair+fifo", True)
    assert [(each.tenant_id, each.weight, each.share, each.gpus, each.waiting_jobs) for each in held.items] == [
        ("old", 1.0, 0.25, 1, 5),
        ("vision", 3.0, 0.75, 3, 3),
    ]


async def test_usage_survives_a_restart_and_is_told_with_jains_index(world: World) -> None:
    await world.scheduler.turn()
    async with client(world) as api:
        await api.put("/v1/policies/active", json={"name": "fair+fifo"})
    await world.fetch(
        "UPDATE scheduler_state SET memory = jsonb_build_object('inner', '{}'::jsonb, 'usage', jsonb_build_object("
        "'at_s', extract(epoch FROM now()), 'used_gpu_s', jsonb_build_object('a', 7200.0, 'b', 3600.0),"
        "'gpus', '{}'::jsonb)) RETURNING 1"
    )
    await world.node("n0", gpus=1)
    a, b = await jobs_of(world, "a", 2), await jobs_of(world, "b", 3)

    await world.scheduler.turn()

    found = await shown(world)
    assert [await world.state(job_id) for job_id in (*a, b[0])] == ["queued", "queued", "starting"]
    assert [round(each.used_gpu_hours or 0, 2) for each in found.items] == [2.0, 1.0]
    assert found.jain is not None
    assert abs(found.jain - 0.9) < 0.01


async def test_jobs_in_cells_count_in_what_their_tenant_may_hold_and_has_used(world: World) -> None:
    await world.scheduler.turn()
    async with client(world) as api:
        await api.put("/v1/policies/active", json={"name": "fair+fifo"})
    await weigh(world, "a", {"max_gpus": 3})
    await world.node("n0", gpus=4)
    runs, waits, *here = await jobs_of(world, "a", 4)
    cell = "UPDATE jobs SET cell = 'north', state = $2 WHERE id = $1 RETURNING 1"
    await world.fetch(cell, runs, "running")
    await world.fetch(cell, waits, "queued")

    await world.scheduler.turn()

    assert sorted([await world.state(each) for each in here]) == ["queued", "starting"]
    [memory] = await world.fetch("SELECT memory -> 'usage' -> 'gpus' AS gpus FROM scheduler_state")
    assert memory["gpus"] == {"a": 2}
    await world.fetch("UPDATE jobs SET state = 'succeeded', ended_at = now() WHERE id = $1 RETURNING 1", waits)
    await world.scheduler.turn()
    assert [await world.state(each) for each in here] == ["starting", "starting"], "a place has fallen free"


async def test_a_job_that_is_to_move_to_a_cell_holds_its_gpus_until_it_is_stopped_and_is_not_started_again(
    world: World,
) -> None:
    await world.node("n0", gpus=1)
    moves = await world.running()
    waits = await world.job()
    await world.fetch("UPDATE jobs SET cell = '' WHERE id = $1 RETURNING 1", moves)
    await world.scheduler.turn()
    assert [await world.state(each) for each in (moves, waits)] == ["preempting", "queued"]
    await world.exits(moves, 1, "stop")
    await world.scheduler.turn()
    assert [await world.state(each) for each in (moves, waits)] == ["queued", "starting"]


async def test_a_start_and_a_place_in_a_cell_of_the_same_moment_keep_the_limit_together(world: World) -> None:
    await weigh(world, "a", {"max_gpus": 1})
    await world.node("n0", gpus=4)
    jobs = await jobs_of(world, "a", 2)
    await world.scheduler.prepare()
    outlooks = await world.scheduler._carbon.outlooks([], 0)
    decided = decided_on(world, await load(world.database, Trigger.PASSIVE, outlooks, world.settings))
    (here,) = (each.job_id for each in decided.plan.actions if isinstance(each, Start))
    await world.fetch("UPDATE jobs SET cell = 'north' WHERE id = ANY($1::text[]) RETURNING 1", {*jobs} - {here})

    with pytest.raises(StalePlanError):
        await apply(world.database, decided, (29_500, 30_000))

    assert (await world.state(here), await world.claims()) == ("queued", 0)


async def test_only_operators_see_shares_and_other_policies_remember_none(world: World) -> None:
    await world.scheduler.turn()
    async with client(world, Role.USER) as api:
        assert (await api.get("/v1/shares")).status_code == 403
    await jobs_of(world, "a", 1)

    found = await shown(world)

    assert (found.policy, found.active, found.jain) == ("fifo", False, None)
    assert [(each.tenant_id, each.used_gpu_hours) for each in found.items] == [("a", None)]


async def test_guaranteed_gpus_are_lent_and_given_back_and_it_is_said_to_whom(world: World) -> None:
    await weigh(world, "owner", {"guaranteed_gpus": 2, "max_gpus": 3})
    await world.node("n0", gpus=4)
    lent = await jobs_of(world, "guest", 5)
    await world.scheduler.turn()
    [first] = await jobs_of(world, "owner", 1)

    await world.scheduler.turn()

    states = await world.fetch("SELECT id, state, reason, detail FROM jobs")
    [stopping] = [row for row in states if row["state"] == "preempting"]
    assert stopping["id"] in lent
    assert (stopping["reason"], stopping["detail"]) == (
        "guaranteed",
        "It gives GPUs back to the tenant owner, to which they are guaranteed.",
    )
    [waits] = [row["id"] for row in states if row["state"] == "queued" and row["id"] in lent]
    said = await explain(world, first, tenant="owner")
    assert said.reason == "waiting_for_release"
    assert "Its tenant holds 0 GPUs, and is guaranteed 2." in said.summary
    said = await explain(world, waits, tenant="guest")
    assert "Its tenant holds 4 GPUs, and is guaranteed 0. It borrows 4." in said.summary
    assert "are guaranteed to owner." in said.summary
    held = await shown(world)
    assert [(each.tenant_id, each.gpus, each.guaranteed_gpus, each.borrowed_gpus) for each in held.items] == [
        ("guest", 4, 0, 4),
        ("owner", 0, 2, 0),
    ]
    assert held.items[1].max_gpus == 3
