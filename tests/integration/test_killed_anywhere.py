"""Kill -9 of schedulers and telemetry, lost commands, lost nodes: every job ends once and no gang has a twin."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.plant import Plant, a_plant, kill
from tests.support.control_plane import accept_job, eventually


@pytest.fixture
async def plant(postgres_url: str, redis_url: str) -> AsyncIterator[Plant]:
    async with a_plant(postgres_url, redis_url) as made:
        await made.start("telemetry")
        yield made


@pytest.fixture
async def short_leases(postgres_url: str, redis_url: str) -> AsyncIterator[Plant]:
    async with a_plant(postgres_url, redis_url) as made:
        await made.start("telemetry", TELEMETRY_LEASE_TTL_S="2")
        yield made


async def ended(plant: Plant, jobs: int) -> bool:
    return (await plant.states()).get("succeeded", 0) == jobs


async def check_everything(plant: Plant) -> None:
    assert plant.twins.seen == []
    assert await plant.broken_rules() == []
    assert await plant.ask("SELECT * FROM device_claims") == []
    ends = await plant.ask("SELECT job_id FROM job_events WHERE type = 'job.succeeded' GROUP BY 1 HAVING count(*) > 1")
    assert ends == [], "a job ended twice"


async def test_killing_schedulers_and_telemetry_while_jobs_run(plant: Plant) -> None:
    dice = random.Random(7)
    (telemetry,) = plant.processes
    scheduler = await plant.start("scheduler")
    jobs = 24
    async with plant.agents(4, 4, 2):
        for number in range(jobs):
            await accept_job(plant.database, gpus={"min": dice.choice([1, 1, 2, 4, 6])}, name=f"j{number}")
        for victims in ({"scheduler"}, {"telemetry"}, {"scheduler", "telemetry"}):
            seen = (await plant.states()).get("succeeded", 0)

            async def went_on(seen: int = seen) -> bool:
                done = (await plant.states()).get("succeeded", 0)
                return done > seen or done == jobs

            await eventually(went_on, within_s=90)
            if "scheduler" in victims:
                kill(scheduler)
            if "telemetry" in victims:
                kill(telemetry)
                telemetry = await plant.start("telemetry", plant.telemetry_port)
            if "scheduler" in victims:
                scheduler = await plant.start("scheduler")
        await eventually(lambda: ended(plant, jobs), within_s=60)
        await check_everything(plant)


async def test_a_plan_that_was_committed_and_not_published_is_carried_out(plant: Plant) -> None:
    async with plant.agents(4):
        await eventually(lambda: plant.ask("SELECT id FROM nodes WHERE state = 'up'"))
        cut_off = await plant.start("scheduler", cut_off=True)
        job = await accept_job(plant.database, gpus={"min": 2})
        await eventually(lambda: plant.ask("SELECT id FROM outbox"))
        kill(cut_off)
        assert plant.twins.started == {}
        await plant.start("scheduler")
        await eventually(lambda: ended(plant, 1))
        assert plant.twins.started == {f"{job}.1": 1}, "the committed gang, once"
        await check_everything(plant)


async def test_the_batch_of_a_committed_plan_is_delivered_once_whoever_dies(plant: Plant) -> None:
    """The scheduler dies between its plan and the start, and Redis forgets what the next one has published."""
    async with plant.agents(4) as (agent,):
        await eventually(lambda: plant.ask("SELECT id FROM nodes WHERE state = 'up'"))
        cut_off = await plant.start("scheduler", cut_off=True, SCHEDULER_POLICY="pollux")
        job = await accept_job(plant.database, gpus={"min": 2}, batch={"min": 64, "max": 1_024})
        await eventually(lambda: plant.ask("SELECT id FROM outbox"))
        kill(cut_off)
        (planned,) = await plant.ask("SELECT batch_size FROM allocations")
        # What a later plan would choose is another batch; the gang has that of its own plan.
        await plant.ask("INSERT INTO job_progress (job_id, done, noise_scale) VALUES ($1, 0, 1e9) RETURNING 1", job)
        real, agent.plant.redis = agent.plant.redis, _WithoutStream()  # type: ignore[assignment]
        await plant.start("scheduler")
        await eventually(lambda: published(real))
        await real.flushdb()
        await agent.forget_redis()
        agent.plant.redis = real
        started: list[tuple[int | None, int | None]] = []

        async def starts() -> bool:
            started[:] = [(start.batch_size, start.base_batch) for start in agent.known.values()] or started
            return bool(started)

        await eventually(starts)
        await eventually(lambda: ended(plant, 1))
        assert started == [(planned["batch_size"], 64)]
        assert plant.twins.started == {f"{job}.1": 1}
        await check_everything(plant)


async def test_commands_that_redis_lost_are_sent_again(plant: Plant) -> None:
    async with plant.agents(4) as (agent,):
        await eventually(lambda: plant.ask("SELECT id FROM nodes WHERE state = 'up'"))
        real, agent.plant.redis = agent.plant.redis, _WithoutStream()  # type: ignore[assignment]
        await plant.start("scheduler")
        await accept_job(plant.database, gpus={"min": 2})
        await eventually(lambda: plant.ask("SELECT id FROM allocations"))
        await eventually(lambda: published(real))
        await real.flushdb()
        await agent.forget_redis()
        agent.plant.redis = real
        await eventually(lambda: ended(plant, 1))
        await check_everything(plant)


async def test_settings_reach_every_gang_whoever_is_killed_and_whatever_redis_loses(
    plant: Plant, tmp_path: Path
) -> None:
    curves = tmp_path / "curves.json"
    curve = {"kind": "k", "gpu_model": "A100", "setting": "power_limit", "values": [200, 400]}
    curves.write_text(json.dumps([curve | {"speed": [0.9, 1.0], "power_w": [150, 380]}]))
    zeus = {"SCHEDULER_POLICY": "zeus+las", "SCHEDULER_SETTING_CURVES": str(curves)}
    (telemetry,) = plant.processes
    plant.beats = 1_000_000
    async with plant.agents(2, 2, 1) as agents:
        await eventually(lambda: plant.ask("SELECT 1 FROM nodes WHERE state = 'up' HAVING count(*) = 3"))
        scheduler = await plant.start("scheduler", **zeus)
        jobs = [await accept_job(plant.database, gpus={"min": size}, labels={"kind": "k"}) for size in (4, 1)]
        await eventually(lambda: plant.ask("SELECT id FROM allocations WHERE power_limit_w = 200"))
        kill(scheduler)
        await plant.redis.flushdb()  # whatever was published and not read yet is gone
        for agent in agents:
            await agent.forget_redis()
        kill(telemetry)
        await plant.start("telemetry", plant.telemetry_port)
        await plant.start("scheduler", **zeus)

        def in_force() -> dict[str, float]:
            running = ((agent, gang) for agent in agents for gang in agent.beats_left)
            return {
                f"{agent.node_id} {gang}": agent.settings.get(gang, {}).get("power_limit_w") for agent, gang in running
            }

        async def all_set() -> bool:
            return len(in_force()) == 3 and set(in_force().values()) == {200.0}

        await eventually(all_set, within_s=90)
        await eventually(
            lambda: plant.ask(
                "SELECT 1 FROM rank_statuses WHERE settings ->> 'power_limit_w' = '200.0' HAVING count(*) = 3"
            )
        )
        for agent in agents:
            agent.beats_left = dict.fromkeys(agent.beats_left, 1)
        await eventually(lambda: ended(plant, len(jobs)), within_s=90)
        sets = await plant.ask("SELECT job_id FROM job_events WHERE type = 'job.set' GROUP BY 1 HAVING count(*) > 1")
        assert sets == [], "a gang was set twice"
        await check_everything(plant)


async def published(redis) -> bool:
    return await redis.xlen("wattshift:node:n0:commands") > 0


class _WithoutStream:
    async def xrange(self, *_: object, **__: object) -> list[object]:
        return []


async def test_a_standby_takes_over_and_two_never_decide_together(plant: Plant) -> None:
    first = await plant.start("scheduler")
    await plant.start("scheduler")
    async with plant.agents(4, 4):
        for _ in range(6):
            await accept_job(plant.database, gpus={"min": 2})

        async def some_ended() -> bool:
            return (await plant.states()).get("succeeded", 0) >= 2

        await eventually(some_ended)
        kill(first)
        for _ in range(4):
            await accept_job(plant.database, gpus={"min": 3})
        await eventually(lambda: ended(plant, 10), within_s=90)
        await check_everything(plant)
    assert len(plant.twins.started) == 10, "every job had exactly one gang"


async def test_a_lost_node_comes_back_and_is_not_told_of_its_old_gangs(short_leases: Plant) -> None:
    plant = short_leases
    plant.beats = 10_000
    await plant.start("scheduler")
    async with plant.agents(2, 2) as (one, two):
        job = await accept_job(plant.database, gpus={"min": 2})
        await eventually(lambda: plant.ask("SELECT id FROM allocations WHERE state = 'running'"))
        here, there = (one, two) if one.beats_left else (two, one)
        here.is_cut_off = True
        await eventually(lambda: plant.ask("SELECT id FROM allocations WHERE generation = 2 AND state = 'running'"))
        assert there.beats_left.keys() == {f"{job}.2"}
        (row,) = await plant.ask("SELECT restarts, preemptions FROM jobs")
        assert tuple(row) == (0, 0), "losing a node is nobody's failure"
        here.answers.clear()
        here.is_cut_off = False

        async def is_back() -> bool:
            return len(here.answers) > 2

        await eventually(is_back)
        assert {gang for named in here.answers for gang in named} == set()
        plant.beats = 1
        there.beats_left = dict.fromkeys(there.beats_left, 1)
        await eventually(lambda: ended(plant, 1))
        await check_everything(plant)


async def test_a_node_of_a_wide_gang_is_lost_and_the_rest_is_stopped_first(short_leases: Plant) -> None:
    plant = short_leases
    plant.beats = 10_000
    await plant.start("scheduler")
    async with plant.agents(2, 2, 2) as agents:
        job = await accept_job(plant.database, gpus={"min": 4})
        await eventually(lambda: plant.ask("SELECT id FROM allocations WHERE state = 'running'"))
        busy = [agent for agent in agents if agent.beats_left]
        busy[1].is_cut_off = True
        await eventually(lambda: plant.ask("SELECT id FROM allocations WHERE generation = 2 AND state = 'running'"))
        assert plant.twins.started == {f"{job}.1": 2, f"{job}.2": 2}
        assert plant.twins.seen == []


async def test_cancelling_while_gangs_start_leaves_nothing_behind(plant: Plant) -> None:
    plant.beats = 10_000
    await plant.start("scheduler")
    async with plant.agents(4, 4):
        jobs = [await accept_job(plant.database, gpus={"min": 1}) for _ in range(8)]

        async def cancel(job: str, pause_s: float) -> None:
            await asyncio.sleep(pause_s)
            await plant.ask(
                """UPDATE jobs SET cancel_requested = state NOT IN ('queued', 'held'),
                    state = CASE WHEN state IN ('queued', 'held') THEN 'cancelled' ELSE state END
                WHERE id = $1 AND state NOT IN ('succeeded', 'failed', 'cancelled') RETURNING id""",
                job,
            )

        await asyncio.gather(*(cancel(job, 0.04 * number) for number, job in enumerate(jobs)))

        async def all_cancelled() -> bool:
            return (await plant.states()).get("cancelled", 0) == len(jobs)

        await eventually(all_cancelled)
        await check_everything(plant)
