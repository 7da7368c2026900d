"""Levels of the network: a simulation that goes on from the live state begins with what the next live round does."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.core.domain.ids import JobId
from services.core.policies.registry import POLICIES
from services.simulator.live import live_document, read_live
from tests.parity.test_slices import live_file
from tests.scheduler.test_shares import weigh
from tests.scheduler.test_topology import FILE, four_nodes, gang, nodes_of, put
from tests.scheduler.world import a_world
from tests.support.servers import fresh_database


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"a-srpt"}))  # which waits by lengths that are assumed
async def test_gangs_start_in_the_domains_in_which_the_next_round_starts_them(
    policy: str, postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with a_world(fresh_database(postgres_url), redis_url, policy=policy) as world:
        await four_nodes(world)
        await put(world, FILE)
        await weigh(world, "acme", {"max_gpus": 7})
        asked = [gang(1), gang(4, within="rack"), gang(2, within="rack"), gang(2, within="node"), gang(2, near="rack")]
        jobs = [await world.job(**each, time_limit_s=3_600) for each in asked]
        never = [
            await world.job(**each, time_limit_s=3_600) for each in (gang(5, within="rack"), gang(1, within="pod"))
        ]

        run = read_live(await live_file(world, tmp_path))
        document = live_document(run, {policy: run.state.parameters}, lambda *_: None)
        await world.scheduler.turn()
        started = {job for job in jobs if await nodes_of(world, job)}

    (outcome,) = document["policies"]
    starts = dict(zip(document["job_ids"], outcome["jobs"]["starts_at_s"], strict=True))
    assert started
    assert {job for job, at_s in starts.items() if at_s is not None and at_s <= run.state.at_s + 1} == started
    assert {JobId(job) for job, at_s in starts.items() if at_s is None} == {*never}
    assert run.state.levels == ["node", "rack"]
    assert run.state.tenant_gpu_quota
