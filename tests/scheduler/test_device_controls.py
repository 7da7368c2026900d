"""From a plan that sets a gang to the nodes, and back from what they made of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.contracts.commands import SetDevices, StartGang
from services.core.cycle.plan import Plan, SetControl
from services.core.cycle.snapshot import Snapshot
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.baselines.fifo import Fifo, FifoConfig
from services.scheduler import loop
from services.scheduler.loop import Relay
from services.scheduler.power.device_controls import NoSuchGangError, set_gangs
from tests.scheduler.world import World, a_world
from tests.support.servers import fresh_database


class Setter(Fifo):
    """FIFO that sets every gang it starts or finds to what a test wants."""

    def __init__(self) -> None:
        super().__init__(FifoConfig())
        self.wants: dict[str, tuple[float | None, int | None]] = {}
        self.seen: Snapshot | None = None

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        self.seen = snapshot
        plan, memory = super().decide(snapshot, memory)
        actions: list[Any] = list(plan.actions)
        for job_id, (power_limit_w, clock_mhz) in self.wants.items():
            if JobId(job_id) in snapshot.jobs.ids:
                actions.append(SetControl(JobId(job_id), ControlKind.POWER_LIMIT, power_limit_w, Reason.LEAST_COST))
                actions.append(SetControl(JobId(job_id), ControlKind.CLOCK, clock_mhz, Reason.LEAST_COST))
        return Plan(plan.snapshot_version, tuple(actions)), memory


@pytest.fixture
def setter(monkeypatch: pytest.MonkeyPatch) -> Setter:
    policy = Setter()
    monkeypatch.setattr(loop, "build_policy", lambda *_: policy)
    return policy


async def settable(world: World, name: str = "n1", gpus: int = 4) -> None:
    await world.node(name, gpus)
    await world.fetch(
        'UPDATE nodes SET devices = (SELECT jsonb_agg(d || \'{"can_set_clock": true, "can_set_power_limit": true}\') '
        "FROM jsonb_array_elements(devices) d) WHERE id = $1 RETURNING 1",
        name,
    )


async def says(world: World, gang: str, node: str, revision: int, **words: Any) -> None:
    settings = {"revision": revision, "power_limit_w": None, "clock_mhz": None, "refused": {}, **words}
    await world.fetch(
        "UPDATE rank_statuses SET settings = $3 WHERE allocation_id = $1 AND node_id = $2 RETURNING 1",
        gang,
        node,
        settings,
    )


async def set_of(world: World, gang: str) -> tuple[Any, ...]:
    rows = await world.fetch("SELECT power_limit_w, clock_mhz, settings_revision FROM allocations WHERE id = $1", gang)
    return tuple(rows[0])


async def active_round(world: World) -> None:
    await world.fetch("UPDATE scheduler_state SET last_active_at = NULL RETURNING 1")
    await world.scheduler.turn()


async def test_a_gang_is_set_with_the_plan_that_starts_it(world: World, setter: Setter) -> None:
    await settable(world, "n1", 2)
    await settable(world, "n2", 2)
    job = await world.job(4)
    setter.wants = {job: (150.0, 1_200)}

    await world.scheduler.turn()

    gang = await world.allocation(job)
    assert await set_of(world, gang) == (150.0, 1_200, 1)
    commands = await world.outbox()
    assert [type(command) for _, command in commands] == [StartGang, StartGang, SetDevices, SetDevices]
    asked = [command for _, command in commands if isinstance(command, SetDevices)]
    assert [command.settings.model_dump() for command in asked] == [
        {"revision": 1, "power_limit_w": 150.0, "clock_mhz": 1_200, "measure": False, "slice_s": 0.0}
    ] * 2
    assert await world.events(job) == ["starting", "set"]
    (event,) = await world.fetch("SELECT data FROM job_events WHERE type = 'job.set'")
    assert event["data"]["reason"] == "least_cost"
    (plan,) = await world.fetch("SELECT actions FROM plans ORDER BY round DESC LIMIT 1")
    assert {"action": "set_clock", "job_id": job, "reason": "least_cost", "clock_mhz": 1_200} in plan["actions"]


async def test_the_next_round_sees_what_is_set_and_what_can_be(world: World, setter: Setter) -> None:
    await settable(world)
    await world.node("old", 1, model="K80")
    job = await world.job()
    setter.wants = {job: (150.0, None)}
    await world.scheduler.turn()
    await active_round(world)

    assert setter.seen is not None
    assert setter.seen.jobs.power_limit_w.tolist() == [150.0]
    by_model = dict(zip(setter.seen.gpu_models, setter.seen.settable, strict=True))
    assert {model: sorted(kinds) for model, kinds in by_model.items()} == {"A100": ["clock", "power_limit"], "K80": []}
    assert await set_of(world, await world.allocation(job)) == (150.0, None, 1), "the same again changes nothing"
    assert await world.events(job) == ["starting", "set"]


async def test_a_setting_that_is_refused_goes_back_to_the_default_and_is_not_asked_for_again(
    world: World, setter: Setter
) -> None:
    await settable(world, "n1", 1)
    await settable(world, "n2", 1)
    job = await world.job(2)
    setter.wants = {job: (150.0, 1_200)}
    await world.scheduler.turn()
    gang = await world.allocation(job)
    await world.report(gang, "running")
    await says(world, gang, "n1", 1, power_limit_w=150.0, clock_mhz=1_200)
    await says(world, gang, "n2", 1, clock_mhz=1_200, refused={"power_limit": "device 0: it takes root"})

    await world.scheduler.turn()
    await world.scheduler.turn()
    await active_round(world)

    assert await set_of(world, gang) == (None, 1_200, 2)
    assert await world.state(job) == "running"
    assert await world.events(job) == ["starting", "set", "running", "setting_refused"]
    (event,) = await world.fetch("SELECT data FROM job_events WHERE type = 'job.setting_refused'")
    assert event["data"]["detail"] == "n2: device 0: it takes root"
    last = [command for _, command in await world.outbox()][-2:]
    assert [c.settings.model_dump() for c in last if isinstance(c, SetDevices)] == [
        {"revision": 2, "power_limit_w": None, "clock_mhz": 1_200, "measure": False, "slice_s": 0.0}
    ] * 2


async def test_settings_that_redis_lost_are_sent_again(postgres_url: str, redis_url: str, setter: Setter) -> None:
    async with a_world(fresh_database(postgres_url), redis_url, republish_after_s=0.05) as world:
        await settable(world)
        job = await world.job()
        setter.wants = {job: (150.0, None)}
        await world.scheduler.turn()
        gang = await world.allocation(job)
        await Relay(world.database, world.redis).publish()
        await world.redis.flushdb()
        await world.report(gang, "running")
        await world.scheduler.turn()
        await world.scheduler.turn()
        await asyncio.sleep(0.1)
        await world.scheduler.turn()
        assert [command.type for _, command in await world.outbox()] == ["set_devices"]
        await says(world, gang, "n1", 1, power_limit_w=150.0)
        await Relay(world.database, world.redis).publish()
        await asyncio.sleep(0.1)
        await world.scheduler.turn()

        assert await world.outbox() == []


async def test_a_gang_that_is_gone_makes_the_plan_stale(world: World) -> None:
    async with world.database.transaction() as connection:
        with pytest.raises(NoSuchGangError):
            await set_gangs(
                connection, [SetControl(JobId("job_gone"), ControlKind.POWER_LIMIT, 150.0, Reason.LEAST_COST)]
            )
