"""The present queue under every policy: asked for by explanations, one run for all, whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from services.contracts.explanations import Explanation
from services.contracts.identity import Identity, Role
from services.core.policies.registry import LAB, POLICIES
from services.kit.ids import new_id
from services.kit.tokens import outgoing
from services.simulator.service import OWNER
from tests.simulator.service.installation import QUICK
from tests.support import background
from tests.support.background import Installation
from tests.support.servers import fresh_database

NODE = """
INSERT INTO nodes (id, token_sha256, address, agent_url, zone, driver, containers, host_power, devices, heartbeat_at,
                   lease_until)
VALUES ('n1', '', '10.0.0.1', '', 'DE', 'simulated', false, 'modelled',
        '[{"index": 0, "model": "A100", "memory_gib": 40}]', now(), now() + interval '1 hour')
"""

JOB = """
INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, queued_at)
VALUES ($1, 'acme', 'a', 'default', '{}',
        '{"name": "a", "command": ["true"], "gpus": {"min": 1, "max": 1}, "time_limit_s": 3600}', 'queued', now())
"""


@pytest.fixture
async def simulator(postgres_url: str, redis_url: str) -> AsyncIterator[Installation]:
    """A simulator and a scheduler with one node of one GPU."""
    servers = {"DATABASE_URL": fresh_database(postgres_url), "REDIS_URL": redis_url}
    async with background.installed(
        *("carbon", "simulator", "scheduler"),
        workers=("simulator-worker",),
        env={**QUICK, **servers, "SCHEDULER_POLICY": "fifo", "SIMULATOR_COMPARISON_MIN_AGE_S": "0.5"},
        service="simulator",
        submit_path="/v1/simulations",
        path="/v1/simulations",
        state="status",
        table="simulations",
    ) as installation:
        async with installation.database() as connection:
            await connection.execute(NODE)
        yield installation


async def queued(simulator: Installation, count: int) -> list[str]:
    ids = [new_id("job") for _ in range(count)]
    async with simulator.database() as connection:
        for job_id in ids:
            await connection.execute(JOB, job_id)
    return ids


async def answer(simulator: Installation, job_id: str, tenant: str = "acme", query: str = "") -> httpx.Response:
    url = f"{simulator.stack.urls['scheduler']}/v1/jobs/{job_id}/explain{query}"
    identity = Identity(tenant_id=tenant, role=Role.USER, key_id="key_test")
    return await simulator.http.get(
        url, headers=outgoing(simulator.stack.identities.credential("gateway"), "scheduler").headers(identity)
    )


async def explained(
    simulator: Installation, job_id: str, holds: Callable[[Explanation], bool], within_s: float = 90
) -> Explanation:
    """Return the first explanation of which something holds."""
    deadline_s = time.monotonic() + within_s
    while True:
        found = await answer(simulator, job_id)
        assert found.status_code == 200, found.text
        explanation = Explanation.model_validate_json(found.content)
        if holds(explanation):
            return explanation
        assert time.monotonic() < deadline_s, explanation
        await asyncio.sleep(0.2)


def is_ready(found: Explanation) -> bool:
    return found.under_policies is not None and found.under_policies.status == "ready"


async def test_a_change_that_starts_a_job_earlier_is_named_where_none_starts_it_now(simulator: Installation) -> None:
    first, second, wide = await queued(simulator, 3)
    async with simulator.database() as connection:
        await connection.execute(NODE.replace("'n1'", "'n2'"))
        await connection.execute("UPDATE jobs SET spec = spec || '{\"time_limit_s\": 7200}' WHERE id = $1", second)
        await connection.execute('UPDATE jobs SET spec = spec || \'{"gpus": {"min": 2}}\' WHERE id = $1', wide)
    for job in (first, second):
        await explained(simulator, job, lambda found: found.state != "queued")

    found = Explanation.model_validate_json((await answer(simulator, wide, query="?one_change=true")).content)

    assert found.waiting is not None
    change = found.waiting.one_change
    assert change is not None
    assert (change.what, change.gpus) == ("gpus", 1)
    assert change.starts_at is not None
    assert 2_400 < (change.starts_at - found.as_of).total_seconds() < 4_800, "when the first ends, not the second"
    assert found.summary.endswith(change.detail)
    assert "instead of 2, it would start at" in change.detail
    plain = Explanation.model_validate_json((await answer(simulator, wide)).content)
    assert plain.waiting is not None
    assert plain.waiting.one_change is None

    before = await explained(simulator, wide, is_ready)
    async with simulator.database() as connection:
        await connection.execute("UPDATE jobs SET queued_at = now() WHERE id = $1", wide)
    stopped = Explanation.model_validate_json((await answer(simulator, wide)).content)
    assert stopped.waiting is not None
    assert stopped.waiting.expected_start_at is None, "what was simulated before it was stopped says nothing of it"
    again = await explained(simulator, wide, is_ready)
    assert before.under_policies is not None
    assert again.under_policies is not None
    assert before.under_policies.as_of < again.under_policies.as_of  # type: ignore[operator]


async def runs(simulator: Installation) -> list[Any]:
    async with simulator.database() as connection:
        query = "SELECT id, state, attempts FROM simulations WHERE tenant_id = $1 ORDER BY id"
        return await connection.fetch(query, OWNER.tenant_id)


async def test_the_policies_part_arrives_for_all_though_everything_is_killed(simulator: Installation) -> None:
    os.kill(simulator.pid("simulator-worker"), signal.SIGSTOP)  # so that it is killed with the run before it
    jobs = await queued(simulator, 4)
    await explained(simulator, jobs[0], lambda found: found.state != "queued")

    first = await explained(simulator, jobs[3], lambda found: found.state == "queued")
    assert first.under_policies is not None
    assert first.under_policies.status == "pending"
    for process in ("simulator-worker", "simulator"):
        os.kill(simulator.pid(process), signal.SIGKILL)
    away = await explained(simulator, jobs[3], lambda found: found.waiting is not None)
    assert away.waiting is not None
    assert away.waiting.place is not None

    found = await explained(simulator, jobs[3], is_ready)

    assert found.under_policies is not None
    assert {item.policy for item in found.under_policies.items} == {*POLICIES, *LAB}, "all that are installed"
    own = found.under_policies.items[0]
    assert (own.policy, own.in_force) == ("fifo", True)
    assert own.starts_at is not None
    assert found.waiting is not None
    assert (found.waiting.expected_start_from, found.waiting.expected_start_at) == ("simulation", own.starts_at)
    # Behind the one that starts and two others of an hour each.
    assert own.waits_s is not None
    assert 2.4 * 3_600 < own.waits_s < 3.6 * 3_600
    for other in jobs[1:3]:
        await explained(simulator, other, is_ready)
    assert len([run for run in await runs(simulator) if run["state"] == "succeeded"]) == 1
    assert (await answer(simulator, jobs[3], tenant="other")).status_code == 404


async def test_many_who_ask_at_once_share_one_run(simulator: Installation) -> None:
    jobs = await queued(simulator, 3)

    await asyncio.gather(*(answer(simulator, jobs[2]) for _ in range(12)))
    await explained(simulator, jobs[2], is_ready)

    assert len(await runs(simulator)) == 1
    (late,) = await queued(simulator, 1)
    await explained(simulator, late, is_ready)
    assert len(await runs(simulator)) == 2, "a job that the last run does not know makes the next one due"


async def test_operators_may_simulate_the_present_queue_and_nobody_else(simulator: Installation) -> None:
    body = {"policy": ["fifo", "las"], "jobs": "live", "carbon": "live"}
    empty = await simulator.submit(body, tenant="ops", role=Role.OPERATOR)
    assert empty.status_code == 422
    assert "no job waits or runs here now" in empty.text
    jobs = await queued(simulator, 2)

    assert (await simulator.submit(body)).status_code == 403
    refused = await simulator.submit({**body, "days": 3}, tenant="ops", role=Role.OPERATOR)
    assert refused.status_code == 422
    assert "days does not go with jobs 'live'" in refused.text
    work_id = await simulator.accepted(body, tenant="ops", role=Role.OPERATOR)
    ended = await simulator.ended(work_id, tenant="ops", role=Role.OPERATOR)

    assert ended["status"] == "succeeded"
    assert set(jobs) <= set(ended["result"]["job_ids"])
    assert [each["policy"] for each in ended["result"]["policies"]] == ["fifo", "las"]
