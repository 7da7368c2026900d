"""From a queued job to its end, as rows, commands and events."""

import asyncio
from pathlib import Path

import orjson
import pytest

from lab.recording import plan_to_json
from lab.replay import snapshot_from_json
from services.contracts.commands import StopGang
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Trigger
from services.core.policies.registry import build_policy
from services.scheduler.planning.apply import Decided, StalePlanError, apply
from services.scheduler.planning.snapshot import Loaded, load
from tests.scheduler.world import World, a_world
from tests.support.servers import fresh_database


def decided_on(world: World, loaded: Loaded) -> Decided:
    return world.scheduler._decide(loaded, *world.scheduler._policy_of(loaded), 0)[0]


async def test_a_job_goes_from_queued_to_succeeded(world: World) -> None:
    await world.node("n1")
    job = await world.running(2)
    assert await world.claims() == 2

    await world.exits(job)

    assert await world.state(job) == "succeeded"
    assert await world.claims() == 0
    assert await world.events(job) == ["starting", "running", "succeeded"]


async def test_a_gang_over_two_nodes_knows_its_ranks(world: World) -> None:
    await world.node("n1", 2)
    await world.node("n2", 4)
    job = await world.job(6)
    await world.scheduler.turn()

    commands = [command for _, command in await world.outbox()]

    assert [(c.node_rank, c.rank_offset, len(c.devices)) for c in commands] == [(0, 0, 4), (1, 4, 2)]
    assert {(c.job_id, c.generation, c.nnodes, c.world_size) for c in commands} == {(job, 1, 2, 6)}
    assert {c.master_addr for c in commands} == {"10.0.0.4"}
    assert len({c.master_port for c in commands}) == 1


async def test_gangs_at_one_address_never_share_a_port(world: World) -> None:
    await world.node("n1", 4)
    for _ in range(4):
        await world.job()
    await world.scheduler.turn()

    ports = [command.master_port for _, command in await world.outbox()]

    assert len(set(ports)) == 4


async def test_every_waiting_job_has_a_reason(world: World) -> None:
    await world.node("n1", 2)
    fits, waits, never = await world.job(2), await world.job(1), await world.job(1, gpus={"min": 1, "model": "H100"})
    await world.scheduler.turn()

    rows = {row["id"]: row for row in await world.fetch("SELECT id, state, reason, detail FROM jobs")}

    assert rows[fits]["state"] == "starting"
    assert rows[waits]["reason"] == "not_enough_free_gpus"
    assert rows[never]["reason"] == "no_eligible_node"
    assert all(row["detail"] for row in rows.values())


@pytest.mark.parametrize(("restarts", "state"), [(0, "failed"), (1, "starting")])
async def test_a_failure_fails_the_job_or_restarts_it(world: World, restarts: int, state: str) -> None:
    await world.node("n1")
    job = await world.running(1, max_restarts=restarts)

    await world.exits(job, exit_code=3)
    await world.scheduler.turn()

    (row,) = await world.fetch("SELECT state, exit_code, restarts, generation FROM jobs WHERE id = $1", job)
    assert tuple(row) == (state, 3, restarts, 1 + restarts)


async def test_a_part_that_fails_takes_the_rest_with_it(world: World) -> None:
    await world.node("n1", 2)
    await world.node("n2", 2)
    job = await world.running(4)
    gang = await world.allocation(job)
    await world.report(gang, "exited", "n1", exit_code=9, ended_by="itself")
    await world.scheduler.turn()
    stops = [command for _, command in await world.outbox() if command.type == "stop_gang"]
    assert len(stops) == 2
    assert await world.claims() == 4  # until every part has ended, none of its devices is anybody else's

    await world.report(gang, "exited", "n2", exit_code=-15, ended_by="stop")
    await world.scheduler.turn()

    (row,) = await world.fetch("SELECT state, exit_code FROM jobs WHERE id = $1", job)
    assert tuple(row) == ("failed", 9)
    assert await world.claims() == 0


async def test_a_job_that_reached_its_time_limit_has_failed_and_is_not_restarted(world: World) -> None:
    await world.node("n1")
    job = await world.running(1, time_limit_s=60, max_restarts=3)
    await world.exits(job, ended_by="time_limit")
    await world.scheduler.turn()

    (row,) = await world.fetch("SELECT state, reason, detail, restarts FROM jobs WHERE id = $1", job)
    assert tuple(row) == ("failed", "time_limit", "It reached its time limit.", 0)


@pytest.mark.parametrize(("wish", "state"), [("cancel", "cancelled"), ("hold", "held")])
async def test_a_running_job_is_cancelled_or_held(world: World, wish: str, state: str) -> None:
    await world.node("n1")
    job = await world.running()
    await world.ask(job, wish)
    assert await world.state(job) == "preempting"

    await world.exits(job, ended_by="stop")

    assert await world.state(job) == state
    assert await world.claims() == 0


async def test_a_gang_that_does_not_start_is_tried_again_and_then_given_up(postgres_url: str, redis_url: str) -> None:
    url = fresh_database(postgres_url)
    async with a_world(url, redis_url, start_timeout_s=1e-9, start_attempts=2) as world:
        await world.node("n1")
        job = await world.job()
        for attempt in (1, 2):
            await world.scheduler.turn()
            await world.scheduler.turn()
            assert await world.allocation(job) == f"{job}.{attempt}"
            await world.exits(job, ended_by="stop")
        assert await world.state(job) == "failed"


async def test_an_exit_reported_twice_counts_once(world: World) -> None:
    await world.node("n1")
    job = await world.running(1, max_restarts=1)
    await world.exits(job, exit_code=3)
    await world.scheduler.turn()
    await world.report(f"{job}.1", "exited", exit_code=3, ended_by="itself")
    await world.scheduler.turn()

    (row,) = await world.fetch("SELECT state, restarts FROM jobs WHERE id = $1", job)
    assert tuple(row) == ("starting", 1)


async def test_a_plan_is_written_whole_or_not_at_all(world: World) -> None:
    await world.node("n1", 2)
    first, second = await world.job(), await world.job()
    await world.scheduler.prepare()
    outlooks = await world.scheduler._carbon.outlooks([], 0)
    loaded = await load(world.database, Trigger.PASSIVE, outlooks, world.settings)
    decided = decided_on(world, loaded)
    await world.fetch("UPDATE jobs SET state = 'cancelled' WHERE id = $1", second)

    with pytest.raises(StalePlanError):
        await apply(world.database, decided, (29_500, 30_000))

    assert await world.state(first) == "queued"
    assert await world.outbox() == []
    assert await world.claims() == 0
    assert [row["version"] for row in await world.fetch("SELECT version FROM scheduler_state")] == [0]


async def test_of_two_plans_from_one_version_one_is_written(world: World) -> None:
    await world.node("n1", 4)
    await world.job()
    await world.scheduler.prepare()
    outlooks = await world.scheduler._carbon.outlooks([], 0)
    decided = [
        decided_on(world, await load(world.database, Trigger.PASSIVE, outlooks, world.settings)) for _ in range(2)
    ]
    outcomes = await asyncio.gather(
        *(apply(world.database, one, (29_500, 30_000)) for one in decided), return_exceptions=True
    )
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Applied", "StalePlanError"]
    assert len(await world.fetch("SELECT 1 FROM allocations")) == 1


async def test_a_job_that_cannot_be_read_keeps_no_other_from_starting(world: World) -> None:
    """As after an upgrade that was taken back: what the later release stored is held, or ends, and says so."""
    later = 'UPDATE jobs SET spec = spec || \'{"environment": "of a later release"}\' WHERE id = $1'
    await world.node("n1", 2)
    started = await world.job()
    await world.scheduler.turn()
    await world.fetch(later, started)
    await world.scheduler.turn()  # it has not begun: its command is to be sent again
    unreadable, other = await world.job(), await world.job()
    await world.fetch(later, unreadable)
    world.scheduler._ingest._settings = world.settings.model_copy(update={"republish_after_s": 0.0})
    await world.fetch("DELETE FROM outbox")

    await world.scheduler.turn()

    assert (await world.state(unreadable), await world.state(other)) == ("held", "starting")
    (row,) = await world.fetch("SELECT reason, detail FROM jobs WHERE id = $1", unreadable)
    assert row["reason"] == "start_failed"
    assert row["detail"].startswith("This release cannot read the job: environment: ")


async def test_a_recorded_round_replays_to_the_same_plan(postgres_url: str, redis_url: str, tmp_path: Path) -> None:
    url = fresh_database(postgres_url)
    async with a_world(url, redis_url, policy="green", record_dir=tmp_path, round_interval_s=1e-6) as world:
        await world.node("n1", 4)
        for size in (1, 2, 4):
            await world.running(size) if size < 4 else await world.job(size)
            await world.scheduler.turn()
    records = [orjson.loads(path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    assert len(records) >= 3
    for record in records:
        policy = build_policy(record["policy"], record["parameters"])
        memory = policy.load(record["memory"]) if record["memory"] else policy.initial()
        result = run_cycle(policy, snapshot_from_json(record["snapshot"]), memory)
        assert plan_to_json(result.plan) == record["plan"]


async def test_no_policy_stops_a_gang_before_its_guaranteed_run_is_over(postgres_url: str, redis_url: str) -> None:
    async with a_world(fresh_database(postgres_url), redis_url, policy="las", min_run_s=3_600) as world:
        await world.node("n1", 1)
        job = await world.running(1)
        await world.fetch("UPDATE jobs SET attained_gpu_s = 1e6 WHERE id = $1 RETURNING 1", job)
        await world.job(1)
        states = list[str]()
        for hours in (0.5, 1):
            await world.fetch(
                "UPDATE allocations SET started_at = started_at - make_interval(secs => $1) RETURNING 1", 3_600 * hours
            )
            await world.fetch("UPDATE scheduler_state SET last_active_at = NULL RETURNING 1")
            await world.scheduler.turn()
            states.append(await world.state(job))
        assert states == ["running", "preempting"]


async def outgoing_stops(world: World) -> list[tuple[str, float]]:
    return [(stream, each.wait_s) for stream, each in await world.outbox() if isinstance(each, StopGang)]


async def a_gang_that_is_waited_for(world: World) -> str:
    """Return a job on two nodes that is to be stopped when it saves its work, in about 20 minutes."""
    for name in ("n1", "n2"):
        await world.node(name, 1)
    job = await world.running(2)
    await world.fetch("UPDATE jobs SET attained_gpu_s = 1e6 WHERE id = $1 RETURNING 1", job)
    await world.fetch("UPDATE allocations SET started_at = started_at - interval '1 hour' RETURNING 1")
    await world.fetch(
        "INSERT INTO job_progress (job_id, done, saved_at, save_every_s) "
        "VALUES ($1, 1, now() - interval '10 minutes', 1800) RETURNING 1",
        job,
    )
    await world.job(1)
    await world.fetch("UPDATE scheduler_state SET last_active_at = NULL RETURNING 1")
    await world.scheduler.turn()
    assert await world.state(job) == "preempting"
    return job


@pytest.mark.parametrize("presses", ["nothing", "saved", "cancel", "instance"])
async def test_a_gang_that_will_soon_save_is_stopped_then_or_when_something_presses(
    postgres_url: str, redis_url: str, presses: str
) -> None:
    async with a_world(fresh_database(postgres_url), redis_url, policy="las", republish_after_s=0.01) as world:
        job = await a_gang_that_is_waited_for(world)
        ((stream, wait_s),) = await outgoing_stops(world)
        assert wait_s == pytest.approx(1_200 + 450, abs=60)
        assert ":n1:" in stream, "rank 0 alone reports"
        await world.fetch("DELETE FROM outbox RETURNING 1")
        await world.scheduler.turn()
        assert not await outgoing_stops(world), "nothing is repeated meanwhile"
        if presses == "saved":
            await world.report(await world.allocation(job), "stopping", "n1")
        elif presses == "cancel":
            await world.ask(job, "cancel")
        elif presses == "instance":
            await world.job(1, service={"zone": "Z"})
        await world.scheduler.turn()
        told = [] if presses == "nothing" else [0.0, 0.0]
        assert [wait_s for _, wait_s in await outgoing_stops(world)] == told
        assert await world.state(job) == "preempting"
