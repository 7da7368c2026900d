"""Nodes that fall silent, commands that get lost, schedulers that die."""

import asyncio
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import asyncpg
import pytest
from redis.exceptions import RedisError

from services.contracts.streams import command_stream
from services.db.leadership import Leadership
from services.db.locks import LEADERSHIP
from services.kit.redis import connect
from services.scheduler.ingest.database_clock import DatabaseClock
from services.scheduler.ingest.reports import Ingest
from services.scheduler.loop import Relay
from services.scheduler.repository import gangs, outbox
from services.scheduler.repository.outbox import Outgoing
from tests.scheduler.world import World, a_world
from tests.support.servers import fresh_database

leading = partial(Leadership, lock=LEADERSHIP, name="scheduler-leader")


async def test_a_node_is_given_up_only_when_its_lease_is_surely_over(world: World) -> None:
    await world.node("n1")
    job = await world.running()
    margin_s = world.settings.lease_margin_s
    await world.lease("n1", -margin_s + 2)
    await world.scheduler.turn()
    assert await world.state(job) == "running"

    await world.lease("n1", -margin_s - 1)
    await world.scheduler.turn()

    assert await world.state(job) == "queued"
    assert await world.claims() == 0
    (row,) = await world.fetch("SELECT restarts, preemptions, reason FROM jobs WHERE id = $1", job)
    assert tuple(row) == (0, 0, "node_closed")


async def test_the_rest_of_a_gang_is_stopped_before_the_job_waits_again(world: World) -> None:
    await world.node("n1", 2)
    await world.node("n2", 2)
    job = await world.running(4)
    await world.lease("n2", -world.settings.lease_margin_s - 1)
    await world.scheduler.turn()
    assert await world.state(job) == "preempting"
    assert await world.claims() == 2

    await world.report(await world.allocation(job), "exited", "n1", exit_code=-15, ended_by="stop")
    await world.scheduler.turn()

    assert await world.state(job) == "queued"
    assert await world.claims() == 0


async def test_what_a_node_reports_when_it_returns_ends_a_job_that_waits_to_run_again(world: World) -> None:
    await world.node("n1")
    waits, held = await world.running(), await world.running()
    await lose(world, "n1")
    assert [await world.state(job) for job in (waits, held)] == ["queued", "queued"]
    await world.ask(held, "hold")
    for job in (waits, held):
        await world.report(await world.allocation(job), "exited", exit_code=0, ended_by="itself")
    await world.scheduler.turn()

    for job in (waits, held):
        (row,) = await world.fetch("SELECT state, reason, exit_code, generation FROM jobs WHERE id = $1", job)
        assert tuple(row) == ("succeeded", "finished", 0, 1)
    await world.fetch("UPDATE nodes SET state = 'up', lease_until = now() + interval '60 s' RETURNING 1")
    await world.scheduler.turn()
    assert await world.claims() == 0, "a finished job is never run again"


async def test_the_second_run_of_a_finished_job_is_stopped_and_the_first_one_counts(world: World) -> None:
    await world.node("n1")
    job = await world.running()
    first = await world.allocation(job)
    await lose(world, "n1")
    await world.node("n2")
    await world.scheduler.turn()
    second = await world.allocation(job)
    assert second != first
    await world.report(first, "exited", exit_code=0, ended_by="itself")
    await world.scheduler.turn()
    assert await world.state(job) == "preempting"

    await world.report(second, "exited", exit_code=1, ended_by="itself")
    await world.scheduler.turn()

    (row,) = await world.fetch("SELECT state, reason, exit_code, restarts FROM jobs WHERE id = $1", job)
    assert tuple(row) == ("succeeded", "finished", 0, 0)


@pytest.mark.parametrize(("exit_code", "ended_by"), [(0, "stop"), (0, "lease"), (1, "itself"), (-9, "host")], ids=str)
async def test_a_part_that_did_not_finish_by_itself_runs_again(world: World, exit_code: int, ended_by: str) -> None:
    await world.node("n1", 2)
    await world.node("n2", 2)
    job = await world.running(4)
    allocation = await world.allocation(job)
    await lose(world, "n1", "n2")
    await world.report(allocation, "exited", "n1", exit_code=0, ended_by="itself")
    await world.report(allocation, "exited", "n2", exit_code=exit_code, ended_by=ended_by)
    await world.scheduler.turn()
    assert await world.state(job) == "queued"


async def test_a_part_that_was_over_before_its_node_was_lost_is_no_reason_to_stop_the_others(world: World) -> None:
    await world.node("n1", 2)
    await world.node("n2", 2)
    job = await world.running(4)
    await world.report(await world.allocation(job), "exited", "n1", exit_code=0, ended_by="itself")
    await lose(world, "n1")
    assert await world.state(job) == "running"
    await world.report(await world.allocation(job), "exited", "n2", exit_code=0, ended_by="itself")
    await world.scheduler.turn()
    assert await world.state(job) == "succeeded"


async def test_nodes_are_heard_before_they_are_given_up(postgres_url: str, redis_url: str) -> None:
    async with a_world(fresh_database(postgres_url), redis_url, node_return_s=60) as world:
        await world.node("n1")
        job = await world.running()
        await lose(world, "n1")
        assert await world.state(job) == "running", "the scheduler has only just started"

        ingest = Ingest(world.database, world.settings)
        now_s = 1_000.0
        for after_s in range(0, 60, 4):
            assert not (await ingest.look(now_s + after_s)).nodes_lost
        await world.fetch("UPDATE nodes SET heartbeat_at = now()")  # after its end: no lease from before is waited for
        await world.fetch("ALTER TABLE nodes ADD CONSTRAINT full_disk CHECK (state <> 'lost') NOT VALID")
        with pytest.raises(asyncpg.PostgresError):
            await ingest.look(now_s + 60)
        await world.fetch("ALTER TABLE nodes DROP CONSTRAINT full_disk")
        for after_s in range(64, 122, 4):
            assert not (await ingest.look(now_s + after_s)).nodes_lost, "the database has only just taken writes again"
        assert (await ingest.look(now_s + 124)).nodes_lost == 1


async def lose(world: World, *nodes: str) -> None:
    """Let nodes fall silent until they are given up."""
    for node in nodes:
        await world.lease(node, -world.settings.lease_margin_s - 1)
    await world.scheduler.turn()


async def test_a_renewal_that_holds_the_row_keeps_the_node(world: World) -> None:
    await world.node("n1")
    job = await world.running()
    await world.lease("n1", -world.settings.lease_margin_s - 1)
    async with world.database.transaction() as heartbeat:
        await heartbeat.execute("UPDATE nodes SET lease_until = now() + interval '60 s' WHERE id = 'n1'")
        await world.scheduler.turn()
        assert await world.state(job) == "running"
    await world.scheduler.turn()
    assert await world.state(job) == "running"


async def test_a_command_without_effect_is_sent_again(postgres_url: str, redis_url: str) -> None:
    async with a_world(fresh_database(postgres_url), redis_url, republish_after_s=0.05) as world:
        await world.node("n1", 2)
        await world.node("n2", 2)
        job = await world.job(4)
        await world.scheduler.turn()
        await Relay(world.database, world.redis).publish()
        await world.report(await world.allocation(job), "running", "n1")
        await asyncio.sleep(0.1)  # the age of the command is what counts
        await world.scheduler.turn()
        await Relay(world.database, world.redis).publish()

        assert [command.type for command in await world.published("n1")] == ["start_gang"]
        first, again = await world.published("n2")
        assert first == again


async def test_a_command_that_redis_has_not_had_is_not_repeated(postgres_url: str, redis_url: str) -> None:
    async with a_world(fresh_database(postgres_url), redis_url, republish_after_s=1e-9) as world:
        await world.node("n1")
        await world.job()
        for _ in range(4):
            await world.scheduler.turn()
        assert len(await world.outbox()) == 1
        await Relay(world.database, world.redis).publish()
        await world.scheduler.turn()
        assert len(await world.outbox()) == 1, "it has had no effect: now it is sent again"


async def test_a_node_that_comes_back_with_more_gpus_is_noticed(world: World) -> None:
    await world.node("n1", 1)
    job = await world.job(2)
    await world.scheduler.turn()
    assert await world.state(job) == "queued"
    await world.fetch(
        "UPDATE nodes SET devices = devices || jsonb_build_array(jsonb_set(devices -> 0, '{index}', '1')) RETURNING 1"
    )
    await world.scheduler.turn()
    assert await world.state(job) == "starting"


async def test_what_redis_did_not_take_stays_in_the_outbox(world: World) -> None:
    await world.node("n1")
    await world.job()
    await world.scheduler.turn()
    unreachable = connect("redis://127.0.0.1:1/0")
    with pytest.raises(RedisError):
        await Relay(world.database, unreachable).publish()
    await unreachable.aclose()
    assert len(await world.outbox()) == 1

    await Relay(world.database, world.redis).publish()

    assert await world.outbox() == []
    assert len(await world.published("n1")) == 1


async def test_one_scheduler_leads_and_the_next_takes_over(world: World) -> None:
    first, second = (
        leading(world.settings.database_url),
        leading(world.settings.database_url),
    )
    assert await first.hold()
    assert not await second.hold()
    assert await first.hold()

    first.release()

    async with asyncio.timeout(10):
        while not await second.hold():  # noqa: ASYNC110, the server lets go of the lock when it sees the connection end
            await asyncio.sleep(0.01)
    assert not await first.hold()
    second.release()


async def test_a_node_that_takes_no_work_keeps_its_gangs_and_gets_no_more(world: World) -> None:
    await world.node("n1")
    runs = await world.running()
    await world.fetch("UPDATE nodes SET closed = 'Its disk is nearly full.' RETURNING 1")
    waits = await world.job()
    await world.scheduler.turn()
    assert (await world.state(runs), await world.state(waits)) == ("running", "queued")
    await world.fetch("UPDATE nodes SET closed = NULL RETURNING 1")
    await world.scheduler.turn()
    assert await world.state(waits) == "starting"


async def test_nothing_is_started_while_the_disk_of_the_database_is_nearly_full(
    postgres_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_blocks=1_000, f_bavail=1_000, f_frsize=1 << 20, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    async with a_world(fresh_database(postgres_url), redis_url, database_dir=tmp_path) as world:
        await world.node("n1")
        runs = await world.running()
        disk.f_bavail = 99
        waits = await world.job()
        await world.exits(runs)
        assert (await world.state(runs), await world.state(waits)) == ("succeeded", "queued")
        disk.f_bavail = 125
        await world.scheduler.turn()
        assert await world.state(waits) == "starting"


async def test_the_trace_of_a_command_is_beside_it(world: World) -> None:
    """Agents of an earlier release refuse a command with a field that they do not know."""
    given = f"00-{'4' * 32}-{'5' * 16}-01"
    stream = command_stream("n1")
    async with world.database.transaction() as connection:
        await outbox.put(connection, [Outgoing(stream, {"type": "a"}, given), Outgoing(stream, {"type": "b"})])
    await Relay(world.database, world.redis).publish()

    sent = [fields for _, fields in await world.redis.xrange(stream) or ()]
    assert sent == [{"command": '{"type":"a"}', "traceparent": given}, {"command": '{"type":"b"}'}]


async def test_a_share_that_stops_when_its_lost_node_returns_has_not_failed(world: World) -> None:
    await world.node("n1")
    job = await world.running(max_restarts=0)
    allocation = await world.allocation(job)
    async with world.database.transaction() as connection:
        await gangs.lose_nodes(connection, ["n1"])
    await world.report(allocation, "exited", exit_code=143, ended_by="stop")
    await world.scheduler.turn()
    (row,) = await world.fetch("SELECT state, restarts, reason FROM jobs WHERE id = $1", job)
    assert (row["state"], row["restarts"]) == ("queued", 0), row["reason"]


async def test_leases_are_not_over_because_the_clock_was_set(world: World) -> None:
    await world.node("n1")
    steady_s, margin_s = 1_000.0, world.settings.lease_margin_s
    clock = DatabaseClock(margin_s, lambda: steady_s, begins_unsure=False)

    async def is_steady_after(passed_s: float) -> bool:
        nonlocal steady_s
        steady_s += passed_s
        async with world.database.transaction() as connection:
            return await clock.is_steady(connection)

    await world.fetch("UPDATE nodes SET heartbeat_at = now() - interval '1 s', lease_until = now() + interval '19 s'")
    assert await is_steady_after(0)
    assert await is_steady_after(0)
    assert await is_steady_after(50), "one that falls behind ends no lease early"
    assert not await is_steady_after(-3_600), "set forward by an hour, for all that the process can tell"
    assert not await is_steady_after(19 + margin_s), "a lease of 20 s may not be over"
    assert await is_steady_after(1.1)


async def test_a_clock_that_was_set_while_no_scheduler_ran_ends_no_lease(world: World) -> None:
    """Its successor cannot know: as long as a lease may be that was given a moment before, none is over."""
    await world.node("n1")
    job = await world.running()
    lease = "heartbeat_at = now() - interval '1 h', lease_until = now() - interval '1 h' + interval '2 s'"
    await world.fetch(f"UPDATE nodes SET {lease} RETURNING 1")
    settings = world.settings.model_copy(update={"node_return_s": 0.01, "lease_margin_s": 1.0})
    successor, began_s = Ingest(world.database, settings), time.monotonic()
    while await world.state(job) == "running":
        await successor.look(time.monotonic())
        await asyncio.sleep(0.1)
    assert time.monotonic() - began_s >= 3.0, "two seconds of lease, and the margin"


async def test_a_lease_that_was_given_before_the_clock_was_set_back_ends_as_it_would_have(world: World) -> None:
    await world.node("n1")
    job = await world.running()
    await world.fetch(
        "UPDATE nodes SET heartbeat_at = now() + interval '1 h', lease_until = now() + interval '1 h 20 s'"
    )
    await world.scheduler.turn()
    (row,) = await world.fetch("SELECT extract(epoch FROM lease_until - now())::float8 AS left_s FROM nodes")
    assert 0 < row["left_s"] <= 20
    assert await world.state(job) == "running"
