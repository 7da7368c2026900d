"""A job that ends soon after each start is started again with pauses that grow, and says so."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from services.core.domain.jobs import JobState
from services.scheduler.ingest.gangs import LONGEST_PAUSE_S, End, EndReason
from tests.scheduler.world import World, a_world
from tests.support.servers import fresh_database


@pytest.fixture
async def pausing(postgres_url: str, redis_url: str) -> AsyncIterator[World]:
    async with a_world(fresh_database(postgres_url), redis_url, restart_pause_s=30) as made:
        yield made


async def waits_s(world: World, job: str) -> float:
    (row,) = await world.fetch(
        "SELECT extract(epoch FROM not_before - queued_at)::float8 AS s FROM jobs WHERE id = $1", job
    )
    return row["s"]


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param({"exit_code": 1, "ended_by": "itself"}, id="failures"),
        pytest.param({"ended_by": "refused"}, id="starts"),
        pytest.param({"exit_code": -15, "ended_by": "lease"}, id="losses"),
    ],
)
async def test_each_restart_but_the_first_waits_twice_as_long(pausing: World, ends: dict[str, object]) -> None:
    world = pausing
    await world.node("n1", 1)
    job = await world.job(1, max_restarts=3)
    for pause_s in (0, 30):
        await world.scheduler.turn()
        assert await world.state(job) == "starting"
        await world.report(await world.allocation(job), "exited", **ends)
        await world.fetch("UPDATE rank_statuses SET updated_at = now() RETURNING 1")
        await world.scheduler.turn()
        assert await waits_s(world, job) == pause_s
    other = await world.job(1)
    await world.scheduler.turn()
    assert (await world.state(job), await world.state(other)) == ("queued", "starting"), "others go first meanwhile"
    (row,) = await world.fetch("SELECT reason, detail FROM jobs WHERE id = $1", job)
    assert row["reason"] == "backing_off"
    assert re.fullmatch(r"It ended soon .*: its next start is not before \d\d:\d\d:\d\d UTC\.", row["detail"])

    await world.exits(other)
    await world.scheduler.turn()
    assert await world.state(job) == "queued"
    await world.fetch("UPDATE jobs SET not_before = now() RETURNING 1")
    await world.scheduler.turn()
    assert await world.state(job) == "starting", "it starts when its pause is over, though nothing else has changed"


@pytest.mark.parametrize(
    ("repeated", "ran_s", "pause_s"),
    [(0, 1, 0), (1, 1, 2), (2, 1, 4), (7, 1, 128), (100, 1, LONGEST_PAUSE_S), (100, LONGEST_PAUSE_S, 0)],
)
def test_pauses_double_up_to_a_bound_and_follow_short_runs_alone(repeated: int, ran_s: float, pause_s: float) -> None:
    for state, expected in ((JobState.QUEUED, pause_s), (JobState.HELD, 0), (JobState.FAILED, 0)):
        assert End(state, EndReason.FAILED, "", repeated=repeated).pause_s(ran_s, 2) == expected
