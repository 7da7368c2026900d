"""Why a job waits, how it runs, and what happened to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.contracts.explanations import Explanation, OneChange
from services.contracts.identity import Identity, Role
from services.contracts.jobs import JobSpec
from services.contracts.live import Earlier, EarlierRequest, LiveJob, LiveState
from services.contracts.nodes import OUT_OF_MEMORY
from services.core.cycle.plan import Preempt
from services.core.cycle.snapshot import Trigger
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.one_change import Change
from services.kit.http import ServiceClient, new_session
from services.kit.problems import install_problem_handlers, unavailable
from services.scheduler import explaining_endpoints
from services.scheduler.explaining.explanations import Explanations
from services.scheduler.explaining.waiting import next_step, shown
from services.scheduler.planning.dry_run import LiveView
from services.scheduler.power.hooks import NoHook
from tests.scheduler.test_dry_run import HOUR_S, set_grid
from tests.scheduler.world import World, a_world
from tests.support.servers import fresh_database
from tests.support.tokens import ActingAs


async def answer(
    world: World,
    job_id: str,
    *,
    tenant: str = "default",
    role: Role = Role.USER,
    project: str | None = None,
    query: str = "",
) -> httpx.Response:
    """Return the answer of an installation whose what-if service is down."""
    app = FastAPI()
    install_problem_handlers(app)
    app.include_router(explaining_endpoints.router)
    carbon = world.scheduler._carbon
    await world.scheduler.prepare()
    async with new_session() as session:
        app.state.explanations = Explanations(
            world.database,
            LiveView(world.database, world.settings, carbon, NoHook()),
            carbon,
            ServiceClient(session, "http://127.0.0.1:1", "The simulator"),
        )
        identity = Identity(tenant_id=tenant, role=role, key_id="key-1", project=project)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(ActingAs(app, identity)), base_url="http://scheduler"
        ) as client:
            return await client.get(f"/v1/jobs/{job_id}/explain{query}")


async def explain(world: World, job_id: str, **caller: Any) -> Explanation:
    found = await answer(world, job_id, **caller)
    assert found.status_code == 200, found.text
    return Explanation.model_validate_json(found.content)


async def renamed(world: World, job_id: str, **columns: str) -> str:
    for column, value in columns.items():
        await world.fetch(f"UPDATE jobs SET {column} = $2 WHERE id = $1 RETURNING 1", job_id, value)
    return job_id


async def happened(world: World, job_id: str, event: str, data: Mapping[str, Any] | None = None) -> None:
    await world.fetch(
        "INSERT INTO job_events (job_id, tenant_id, type, data) VALUES ($1, 'default', $2, $3) RETURNING 1",
        job_id,
        event,
        dict(data or {}),
    )


async def test_a_job_is_explained_with_its_number(world: World) -> None:
    _, (task, _) = await world.array(2)
    await world.fetch("UPDATE jobs SET number = 12 RETURNING 1")

    found = await explain(world, task)

    assert (found.number, found.array_index) == (12, 0)


async def test_a_waiting_job_is_told_its_place_and_who_is_ahead(world: World) -> None:
    await world.node("n1")
    await world.running(4)
    first = await renamed(world, await world.job(2), name="first")
    await renamed(world, await world.job(1), tenant_id="other", name="secret")
    job = await world.job(3)
    await world.scheduler.hold(Trigger.PASSIVE)

    found = await explain(world, job)

    assert (found.state, found.reason, found.policy) == ("queued", "not_enough_free_gpus", "fifo")
    assert found.waiting is not None
    place = found.waiting.place
    assert place is not None
    assert (place.position, place.waiting_jobs, place.ahead, place.ahead_gpus, place.hidden_ahead) == (3, 3, 2, 3, 1)
    assert [(each.job_id, each.name, each.gpus) for each in place.first] == [(first, "first", 2)]
    assert "secret" not in found.model_dump_json()
    assert (found.waiting.gpus.min, found.waiting.gpus.suitable, found.waiting.gpus.free) == (3, 4, 0)
    assert found.summary.startswith("It is number 3 of the 3 jobs that wait.")
    operator = await explain(world, job, tenant="ops", role=Role.OPERATOR)
    assert operator.waiting is not None
    assert operator.waiting.place is not None
    assert [each.name for each in operator.waiting.place.first] == ["first", "secret"]


async def test_a_key_of_a_project_is_told_of_that_project_alone(world: World) -> None:
    await world.node("n1")
    await world.running(4)
    await renamed(world, await world.job(1), name="elsewhere")
    mine = await renamed(world, await world.job(1), name="mine", project="vision")
    job = await renamed(world, await world.job(1), project="vision")

    found = await explain(world, job, project="vision")

    assert found.waiting is not None
    assert found.waiting.place is not None
    assert (found.waiting.place.ahead, found.waiting.place.hidden_ahead) == (2, 1)
    assert [each.job_id for each in found.waiting.place.first] == [mine]
    assert (await answer(world, job, project="speech")).status_code == 404


async def test_explaining_changes_nothing(world: World) -> None:
    await world.node("n1")
    job = await world.job(2)

    found = await explain(world, job)

    assert found.waiting is not None
    assert found.waiting.starts_now
    assert found.waiting.place is not None
    assert found.waiting.place.position == 1
    assert await world.state(job) == "queued"
    assert await world.claims() == 0


async def test_drained_nodes_are_counted_apart(world: World) -> None:
    await world.node("n1")
    await world.node("n2", gpus=2)
    await world.fetch("UPDATE nodes SET draining = true WHERE id = 'n1' RETURNING 1")
    job = await world.job(3)

    found = await explain(world, job)

    assert found.waiting is not None
    assert (found.waiting.gpus.suitable, found.waiting.gpus.drained) == (2, 4)


async def test_it_tells_what_a_start_emits_now_and_in_the_greenest_window_that_is_left(world: World) -> None:
    await world.node("n1")
    await world.running(4)
    begin_s = set_grid(world)
    free, bound = [await world.job(1, time_limit_s=HOUR_S, **more) for more in ({}, {"flexibility_s": HOUR_S})]

    found, tight = await explain(world, free), await explain(world, bound)

    assert found.waiting is not None
    assert found.waiting.now is not None
    assert found.waiting.greenest is not None
    assert found.waiting.now.intensity_gco2_per_kwh == pytest.approx(400)
    assert found.waiting.greenest.starts_at.timestamp() == begin_s + 5 * HOUR_S
    assert found.waiting.power_w is not None
    assert found.waiting.greenest.carbon_gco2 == pytest.approx(found.waiting.power_w / 1_000 * 50)
    assert found.waiting.length.source == "time_limit"
    assert found.waiting.forecast is not None
    assert not found.waiting.forecast.stale
    assert any("PUE is not included" in sentence for sentence in found.assumptions)
    # The hours that the job allows are counted from its submission; the green ones come later.
    assert tight.waiting is not None
    assert tight.waiting.greenest is not None
    assert tight.waiting.greenest.intensity_gco2_per_kwh == pytest.approx(400)


async def test_a_forecast_that_is_stale_is_said_to_be(world: World) -> None:
    await world.node("n1")

    found = await explain(world, await world.job(1))

    assert found.waiting is not None
    assert found.waiting.forecast is not None
    assert found.waiting.forecast.stale
    assert any("stale" in sentence for sentence in found.assumptions)


@pytest.mark.usefixtures("the_lab")
async def test_a_policy_that_plans_a_start_says_when(postgres_url: str, redis_url: str) -> None:
    async with a_world(fresh_database(postgres_url), redis_url, policy="gaia") as world:
        await world.node("n1")
        begin_s = set_grid(world)
        job = await world.job(1, flexibility_s=12 * HOUR_S)
        await world.scheduler.turn()

        found = await explain(world, job)

        assert found.reason == "greener_hours"
        assert found.waiting is not None
        assert found.waiting.expected_start_from == "policy"
        assert found.waiting.expected_start_at is not None
        assert found.waiting.expected_start_at.timestamp() > begin_s + HOUR_S
        assert found.waiting.place is not None
        assert found.waiting.place.position is None


@pytest.mark.parametrize(
    ("state", "reason", "detail", "said"),
    [
        ("held", "held", None, "on hold"),
        ("held", "budget_exceeded", "The budget of 5 kWh is used up.", "The budget of 5 kWh is used up."),
        ("held", "node_losses", None, "Nodes or GPUs were lost under it"),
        ("held", "some_later_reason", None, "Some later reason."),
    ],
)
async def test_a_job_that_no_policy_sees_says_why_by_its_own_reason(
    world: World, state: str, reason: str, detail: str | None, said: str
) -> None:
    await world.node("n1")
    job = await world.job(1, time_limit_s=60)
    await world.fetch(
        "UPDATE jobs SET state = $2, reason = $3, detail = $4 WHERE id = $1 RETURNING 1", job, state, reason, detail
    )

    found = await explain(world, job)

    assert (found.state, found.reason) == (state, reason)
    assert found.detail is not None
    assert said in found.detail
    assert found.waiting is not None
    assert found.waiting.place is None
    assert found.waiting.now is not None  # what it would emit can be told all the same
    assert found.under_policies is None


async def test_a_job_with_an_open_dependency_names_it(world: World) -> None:
    await world.node("n1")
    first = await renamed(world, await world.running(), name="prepare")
    then = await world.job(1, time_limit_s=60)
    await world.after(then, first, "ok")
    await world.scheduler.turn()

    found = await explain(world, then)
    await world.exits(first, 1)
    after = await explain(world, then)

    said = f"It waits for prepare ({first}) to succeed."
    assert (found.state, found.reason, found.summary) == ("queued", "dependency", said)
    assert found.waiting is not None
    assert (found.waiting.place, found.waiting.starts_now, found.under_policies) == (None, False, None)
    assert found.waiting.gpus.free == 3
    never = f"It was to start only if prepare ({first}) succeeds, and that did not succeed."
    assert (after.state, after.reason, after.detail) == ("cancelled", "dependency_failed", never)
    assert after.ended is not None
    assert after.story[-1].text.endswith(never)


async def test_a_task_beyond_the_limit_of_its_array_says_so(world: World) -> None:
    await world.node("n1")
    _, tasks = await world.array(3, limit=1)
    await world.scheduler.turn()

    found = await explain(world, tasks[1])

    assert (found.state, found.reason) == ("queued", "array_limit")
    assert found.summary == "At most 1 task of its array may run at once."
    assert found.waiting is not None
    assert (found.waiting.place, found.waiting.starts_now) == (None, False)
    assert found.waiting.gpus.free == 3  # it is not GPUs that it waits for


async def test_the_story_says_from_when_to_when_a_job_was_on_hold(world: World) -> None:
    job = await world.job(1)
    (row,) = await world.fetch("SELECT extract(epoch FROM submitted_at)::float8 AS s FROM jobs WHERE id = $1", job)
    happenings: list[tuple[float, str, dict[str, Any]]] = [
        (0, "job.submitted", {"state": "held"}),
        (60, "job.queued", {"state": "queued", "by": "key"}),
        (70, "job.held", {"state": "held", "reason": "budget_exceeded", "detail": "The budget is 5 kWh; 6 are used."}),
        (3_670, "job.queued", {"state": "queued", "reason": "budget_available"}),
        (3_680, "job.queued", {"state": "queued", "reason": "node_lost"}),
        (3_690, "job.held", {"state": "held", "by": "key"}),
    ]
    for after_s, event, data in happenings:
        await world.fetch(
            "INSERT INTO job_events (job_id, tenant_id, type, data, at) "
            "VALUES ($1, 'default', $2, $3, to_timestamp($4::float8)) RETURNING 1",
            job,
            event,
            data,
            row["s"] + after_s,
        )

    found = await explain(world, job)

    assert [line.text for line in found.story] == [
        "Submitted, on hold.",
        "Released after 1 min on hold; it waits for GPUs.",
        "On hold. The budget is 5 kWh; 6 are used.",
        "Released after 1 h on hold; it waits for GPUs. The budget of its project or tenant has room again.",
        "Waits again. A node it ran on was lost; it continues from its checkpoint.",
        "On hold.",
    ]


async def test_a_running_job_is_told_where_why_and_what_comes_next(postgres_url: str, redis_url: str) -> None:
    async with a_world(fresh_database(postgres_url), redis_url, policy="las") as world:
        await world.node("n1")
        job = await world.running(4)
        await world.fetch("UPDATE jobs SET attained_gpu_s = 1e6 WHERE id = $1 RETURNING 1", job)

        alone = await explain(world, job)
        await world.job(4)
        outranked = await explain(world, job)

        assert alone.running is not None
        assert (alone.state, alone.running.gpus) == ("running", 4)
        assert [share.node_id for share in alone.running.placement] == ["n1"]
        assert alone.running.why[0] == "4 GPUs: the one size that it asks for."
        assert alone.running.next is not None
        assert (alone.running.next.action, alone.running.next.reason) == ("keep", None)
        assert outranked.running is not None
        assert outranked.running.next is not None
        assert (outranked.running.next.action, outranked.running.next.reason) == ("stop", "outranked")
        assert outranked.summary.endswith("would stop it. Jobs ahead of it in the policy's order need its GPUs.")
        assert await world.state(job) == "running"


@pytest.mark.parametrize(("end_s", "action"), [(1_000.0, "keep"), (3_000.0, "stop")])
def test_a_round_stops_no_job_that_has_ended_by_then_and_says_so_of_none(end_s: float, action: str) -> None:
    stop = Preempt(JobId("job"), Reason.OUTRANKED, 1)
    dry: Any = SimpleNamespace(plan=SimpleNamespace(actions=[stop]), snapshot=SimpleNamespace(now_s=0.0))

    step = next_step(dry, JobId("job"), 2_000.0, datetime.fromtimestamp(end_s, UTC), preemptible=True)

    assert step.action == action
    assert ("GPUs" in step.detail, step.reason) == ((False, None) if action == "keep" else (True, "outranked"))


async def test_the_end_of_a_running_job_is_expected_by_its_own_progress(world: World) -> None:
    await world.node("n1")
    job = await world.running(2, work={"total": 100, "unit": "steps"})
    await world.fetch("INSERT INTO job_progress (job_id, done, updated_at) VALUES ($1, 25, now()) RETURNING 1", job)
    await world.fetch("UPDATE jobs SET attained_gpu_s = 2000 WHERE id = $1 RETURNING 1", job)

    found = await explain(world, job)

    assert found.running is not None
    assert found.running.length.source == "progress"
    assert found.running.length.seconds == pytest.approx(3_000, rel=0.02)
    assert found.running.expected_end_at is not None
    left_s = (found.running.expected_end_at - found.as_of).total_seconds()
    assert left_s == pytest.approx(found.running.length.seconds, abs=5)
    assert found.running.stop_at is None
    await world.fetch("UPDATE allocations SET stop_requested_at = now() WHERE job_id = $1 RETURNING 1", job)
    told = (await explain(world, job)).running
    assert told is not None
    assert told.stop_at is not None
    assert (told.stop_at - found.as_of).total_seconds() == pytest.approx(120, abs=30)


@pytest.mark.parametrize(
    ("said", "code", "reason"),
    [
        (f"It was killed because it {OUT_OF_MEMORY} of 3.0 GiB (peak 3.0 GiB).", -9, "out_of_memory"),
        ("Its files took 210.3 GiB of the node's disk; a job may take 200.0 GiB.", -25, "failed"),
    ],
)
async def test_a_job_that_took_too_much_says_so_with_its_limit(world: World, said: str, code: int, reason: str) -> None:
    await world.node("n1")
    job = await world.running(max_restarts=1)
    for _ in range(2):
        await world.report(await world.allocation(job), "exited", exit_code=code, ended_by="itself", detail=said)
        await world.scheduler.turn()
    found = await explain(world, job)

    assert f"Waits again. {said} Restart 1 of 1." in [line.text for line in found.story]
    assert (found.state, found.reason, found.detail) == ("failed", reason, said)
    assert found.story[-1].text.startswith(f"Failed with exit status {code}")
    assert found.story[-1].text.endswith(said)


async def test_an_ended_job_has_a_story_with_a_sum(world: World) -> None:
    await world.node("n1")
    job = await world.job(2)
    await happened(world, job, "job.submitted")
    await world.scheduler.turn()
    await world.report(await world.allocation(job), "running")
    await world.scheduler.turn()
    await world.exits(job, exit_code=3)
    await happened(world, job, "job.something_new", {"reason": "of_a_later_release"})

    found = await explain(world, job)

    assert (found.state, found.reason) == ("failed", "failed")
    assert found.ended is not None
    assert (found.ended.exit_code, found.ended.starts, found.ended.preemptions) == (3, 1, 0)
    told = [line.text for line in found.story]
    assert told[0] == "Submitted."
    assert told[1].startswith("Got 2 GPUs after waiting ")
    assert any(text.startswith("Failed with exit status 3") for text in told)
    assert told[-1] == "Something new. Of a later release."
    assert found.baseline_gco2 is None  # no ledger line, no figure
    assert found.under_policies is None


async def test_a_long_story_keeps_its_ends(world: World) -> None:
    job = await world.job(1)
    await world.fetch(
        "INSERT INTO job_events (job_id, tenant_id, type, data) SELECT $1, 'default', 'job.n' || n, '{}' "
        "FROM generate_series(1, 250) n RETURNING 1",
        job,
    )

    found = await explain(world, job)

    assert (len(found.story), found.story_left_out) == (200, 50)
    assert (found.story[0].text, found.story[-1].text) == ("N1.", "N250.")


async def test_the_same_energy_at_the_mean_intensity(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.node("n1")
    job = await world.running(1)
    await world.exits(job)
    await world.fetch(
        "INSERT INTO energy_usages (node_id, boot_id, sequence, owner, job_id, start_at, end_at, gpus, gpu_energy_j, "
        "cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue, "
        "carbon_gco2) SELECT 'n1', 'b', n, 'a', $1, now(), now(), 1, 3.6e6, 0, 0, 'counter', zone, 'average_direct', "
        "100, false, 1.5, 150 FROM (VALUES (1, 'Z'), (2, 'Y')) AS v(n, zone) RETURNING 1",
        job,
    )
    means: dict[str, float | None] = {"Z": 200.0, "Y": 400.0}

    async def past_mean(zone: str, signal: str, start_s: float, end_s: float) -> float | None:
        assert (signal, start_s <= end_s) == ("average_direct", True)
        return means[zone]

    monkeypatch.setattr(world.scheduler._carbon, "past_mean", past_mean)

    assert (await explain(world, job)).baseline_gco2 == pytest.approx(1.5 * 200 + 1.5 * 400)
    means["Y"] = None
    assert (await explain(world, job)).baseline_gco2 is None


async def test_a_down_simulator_leaves_only_its_part_open(world: World) -> None:
    await world.node("n1")

    found = await explain(world, await world.job(1))

    assert found.under_policies is not None
    assert (found.under_policies.status, found.under_policies.items) == ("pending", [])


async def test_no_policies_are_compared_on_a_model_server(world: World) -> None:
    await world.node("n1")
    waits, runs = await world.job(8, service={}), await world.running(service={})

    assert [(await explain(world, each)).under_policies for each in (waits, runs)] == [None, None]


async def test_other_tenants_jobs_and_no_jobs_are_not_found(world: World) -> None:
    job = await world.job(1)

    assert (await answer(world, job, tenant="other")).status_code == 404
    assert (await answer(world, "job_00000000000000000000000000")).status_code == 404
    assert (await answer(world, job, tenant="ops", role=Role.OPERATOR)).status_code == 200


async def test_a_policy_that_cannot_be_built_any_more_does_not_hide_the_rest(world: World) -> None:
    await world.node("n1")
    job = await world.job(1)
    await world.scheduler.prepare()
    await world.fetch("UPDATE scheduler_state SET policy = 'of-a-lost-plugin', memory = '{\"a\": 1}' RETURNING 1")

    found = await explain(world, job)

    assert found.waiting is not None
    assert isinstance(found.submitted_at, datetime)


async def test_a_policy_that_can_tell_says_what_each_lever_does(postgres_url: str, redis_url: str) -> None:
    async with a_world(fresh_database(postgres_url), redis_url, policy="joint") as world:
        await world.node("n1", 2)
        job = await world.running(1, maximum=2, work={"total": 100, "unit": "samples"})
        await world.fetch("UPDATE jobs SET attained_gpu_s = 3600 WHERE id = $1 RETURNING 1", job)
        await world.fetch("INSERT INTO job_progress (job_id, done) VALUES ($1, 50) RETURNING 1", job)
        found = {each.lever: each for each in (await explain(world, job)).levers}

        assert list(found) == ["width", "batch", "power_limit", "hours", "order", "sleep"]
        assert (found["batch"].carbon_saved_gco2, found["batch"].minutes_added) == (0, 0)
        assert (found["power_limit"].carbon_saved_gco2, found["power_limit"].minutes_added) == (None, None)
        assert all(each.detail for each in found.values())


async def test_a_policy_that_cannot_tell_says_nothing_of_levers(world: World) -> None:
    await world.node("n1", 2)

    assert (await explain(world, await world.running(1))).levers == []


async def test_the_ledger_tells_what_levers_did_for_a_job_that_ended(world: World) -> None:
    await world.node("n1", 2)
    job = await world.running(1)
    await world.exits(job)
    await world.fetch(
        "INSERT INTO job_footprints (job_id, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s) "
        "VALUES ($1, 4600, 4600, 0, 46, 280) RETURNING 1",
        job,
    )
    for gpus, progress, energy_j, duration_s in ((1, 10, 1_000, 100), (2, 30, 3_600, 180)):
        await world.fetch(
            "INSERT INTO job_profiles (job_id, gpus, progress, energy_j, gpu_energy_j, duration_s) "
            "VALUES ($1, $2, $3, $4, $4, $5) RETURNING 1",
            job,
            gpus,
            progress,
            energy_j,
            duration_s,
        )
    found = {each.lever: each for each in (await explain(world, job)).levers}

    assert found["width"].carbon_saved_gco2 == pytest.approx(-6.0)
    assert found["width"].minutes_added == pytest.approx(-2.0)
    assert (found["batch"].carbon_saved_gco2, found["power_limit"].minutes_added) == (0, 0)
    assert found["hours"].carbon_saved_gco2 is None
    assert found["order"].minutes_added is None


async def test_the_ledger_tells_what_limits_and_batches_did_for_a_job_that_ended(world: World) -> None:
    """Two GPUs, 100 s at 150 W of 250, then at the default: 0.8 of the speed at 140 W in place of 240 W, 10 W of host.

    The batch was four times its base, in half the steps' time each, of noise as large as it.
    """
    await world.node("n1", 2)
    job = await world.running(2, global_batch=64, batch={"min": 64, "max": 4_096})
    await world.exits(job)
    allocation = await world.allocation(job)
    for statement, *values in (
        (
            "INSERT INTO job_footprints (job_id, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s) "
            "VALUES ($1, 100000, 96000, 0, 1000, 400) RETURNING 1",
            job,
        ),
        (
            "UPDATE allocations SET batch_size = 256, running_at = now() - interval '200 s', ended_at = now() "
            "WHERE id = $1 RETURNING 1",
            allocation,
        ),
        (
            "INSERT INTO settings_in_force (allocation_id, node_id, revision, power_limit_w, refused, enforced_w, "
            "since) "
            "SELECT id, 'n1', n, CASE n WHEN 1 THEN 150 END, '[]', '[]', running_at + (n - 1) * interval '100 s' "
            "FROM allocations, generate_series(1, 2) n WHERE id = $1 RETURNING 1",
            allocation,
        ),
        ("INSERT INTO job_progress (job_id, done, noise_scale) VALUES ($1, 1, 256) RETURNING 1", job),
    ):
        await world.fetch(statement, *values)
    unmeasured = {each.lever: each for each in (await explain(world, job)).levers}
    assert {unmeasured[lever].carbon_saved_gco2 for lever in ("batch", "power_limit")} == {None}

    await world.fetch(
        "INSERT INTO setting_profiles (kind, gpu_model, setting, gpus, settings, speed, power_w, measured_gpus, "
        "points, by_batch) VALUES ($1, 'A100', 'power_limit', '[2]', '[150, 250]', '[[0.8, 1.0]]', '[[280, 480]]', "
        "'[2]', 2, $2) RETURNING 1",
        job,
        {"gpus": [2], "batch": [64, 256], "step_s": [[1.0, 2.0]]},
    )
    found = {each.lever: each for each in (await explain(world, job)).levers}

    limit, batch = found["power_limit"], found["batch"]
    assert limit.carbon_saved_gco2 == pytest.approx(2 * (250 * 80 - 150 * 100) * 0.01, rel=0.01)
    assert limit.minutes_added == pytest.approx(20 / 60, rel=0.01)
    gain = 4 / 2 * (256 + 64) / (256 + 256)
    assert batch.carbon_saved_gco2 == pytest.approx(100_000 * (gain - 1) * 0.01, rel=0.01)
    assert batch.minutes_added == pytest.approx(-200 * (gain - 1) / 60, rel=0.01)

    await world.fetch("DELETE FROM settings_in_force RETURNING 1")
    await world.fetch("UPDATE allocations SET power_limit_w = 150 WHERE id = $1 RETURNING 1", allocation)
    found = {each.lever: each for each in (await explain(world, job)).levers}
    assert found["power_limit"].carbon_saved_gco2 is None, "when it had which is no longer stored"


async def change_of(world: World, job_id: str, **caller: Any) -> OneChange | None:
    found = await explain(world, job_id, query="?one_change=true", **caller)
    assert found.waiting is not None
    change = found.waiting.one_change
    assert change is None or found.summary.endswith(change.detail)
    assert (await explain(world, job_id)).waiting.one_change is None, "what nobody asks for is looked for"  # type: ignore[union-attr]
    return change


async def test_what_is_named_as_the_one_change_starts_the_job(world: World) -> None:
    await world.node("n1")
    await world.running(1)
    job = await world.job(4)
    await world.scheduler.turn()

    change = await change_of(world, job)

    assert change is not None
    assert (change.what, change.gpus) == ("gpus", 2)
    assert change.detail == "Withdrawn and submitted again with 2 GPUs instead of 4, it would start now."
    await world.ask(job, "cancel")
    again = await world.job(2)
    await world.scheduler.hold(Trigger.PASSIVE)
    assert await world.state(again) == "starting"


async def test_another_model_is_a_smaller_change_than_fewer_gpus(world: World) -> None:
    await world.node("n1")
    await world.node("n2", model="V100")
    await world.running(1, gpus={"min": 1, "max": 1, "model": "A100"})
    job = await world.job(gpus={"min": 4, "model": "A100"})
    of_any_model = await world.job(8)

    change = await change_of(world, job)

    assert change is not None
    assert (change.what, change.model, change.gpus) == ("model", "V100", None)
    await world.ask(job, "cancel")
    again = await world.job(gpus={"min": 4, "model": "V100"})
    await world.ask(of_any_model, "cancel")
    await world.scheduler.turn()
    assert await world.state(again) == "starting"


async def test_a_job_that_names_a_zone_could_start_without_it(world: World) -> None:
    await world.node("n1")
    await world.node("n2", zone="Y")
    await world.running(1, gpus={"min": 1, "max": 1, "zone": "Z"})
    layout = {"stages": [{"replicas": 4}]}
    job = await world.job(gpus={"min": 4, "zone": "Z"}, layout=layout)

    change = await change_of(world, job)

    assert change is not None
    assert change.what == "zone"
    assert change.detail == "Withdrawn and submitted again for any zone instead of Z, it would start now."
    await world.ask(job, "cancel")
    again = await world.job(gpus={"min": 4}, layout=layout)
    await world.scheduler.turn()
    assert await world.state(again) == "starting"


async def test_no_change_is_named_that_does_not_start_it_or_that_it_does_not_need(world: World) -> None:
    await world.node("n1")
    job = await world.job(4)
    assert await change_of(world, job) is None
    await world.scheduler.turn()
    assert await change_of(world, await world.job(4)) is None


async def test_no_change_is_named_for_a_job_with_a_layout_or_one_that_has_run(world: World) -> None:
    await world.node("n1")
    await world.running(2)
    tied = await world.job(4, layout={"stages": [{"replicas": 4}]})
    ran = await world.job(4)
    await world.fetch("UPDATE jobs SET attained_gpu_s = 60 WHERE id = $1 RETURNING 1", ran)

    assert await change_of(world, ran) is None
    assert await change_of(world, tied) is None


@pytest.mark.parametrize(
    ("change", "fields", "words"),
    [
        (Change(preemptible=True), {"what": "preemptible"}, "as preemptible"),
        (Change(flex=0.5), {"what": "flex", "flex": 50}, "with flex 50, so that orders of the grid may slow it down"),
        (Change(within=2), {"what": "within", "within": "block"}, "within one block instead of one rack"),
        (Change(within=3), {"what": "within"}, "on any nodes instead of one rack"),
        (Change(deadline_s=math.inf), {"what": "deadline"}, "without its deadline"),
        (
            Change(deadline_s=1_800_000_000.0),
            {"what": "deadline", "deadline": datetime.fromtimestamp(1_800_000_000, UTC)},
            "with a deadline at Fri 08:00 UTC, in dirtier hours",
        ),
    ],
    ids=["preemptible", "flex", "level", "no level", "no deadline", "deadline"],
)
def test_a_change_is_said_in_words(change: Change, fields: dict[str, Any], words: str) -> None:
    spec = JobSpec.model_validate({"name": "a", "command": ["true"], "gpus": {"min": 4, "max": 4, "within": "rack"}})
    found = shown(change, spec, ("node", "rack", "block"))

    assert found.model_dump(exclude={"detail"}, exclude_none=True) == fields
    assert found.detail == f"Withdrawn and submitted again {words}, it would start now."


def test_an_earlier_start_is_said_with_both_times() -> None:
    spec = JobSpec.model_validate({"name": "a", "command": ["true"], "gpus": {"min": 4, "max": 4}})
    at_s = 1_800_000_000.0

    found = shown(Change(gpus=2), spec, (), Earlier(change=3, starts_s=at_s, planned_s=at_s + 6_600))
    never = shown(Change(gpus=2), spec, (), Earlier(change=3, starts_s=at_s))

    words = "Withdrawn and submitted again with 2 GPUs instead of 4, it would start at Fri 08:00 UTC: "
    assert found.starts_at == datetime.fromtimestamp(at_s, UTC)
    assert found.detail == f"{words}1 h 50 min before Fri 09:50 UTC, as simulated."
    assert never.detail == f"{words}not within two weeks, as it is."


@dataclass
class Simulator:
    """What is asked of the what-if service, which answers nothing."""

    asked: list[EarlierRequest] = field(default_factory=list)

    async def call(self, method: str, path: str, answers: type[Any], **options: Any) -> Any:
        if path == "/internal/earlier":
            self.asked.append(options["body"])
        raise unavailable("The simulator")


async def test_what_is_simulated_in_a_jobs_place_is_what_its_user_would_submit(world: World) -> None:
    """Of each change: the job of the live state that there is once it was made."""
    await world.scheduler.prepare()
    for node, model in (("n1", "A100"), ("n2", "V100")):
        await world.node(node, model=model)
        await world.running(gpus={"min": 4, "model": model}, preemptible=False)
    asked: dict[str, Any] = {"gpus": {"min": 4, "model": "A100"}, "preemptible": False, "time_limit_s": 4_000}
    waits = await world.job(**asked)
    simulator, carbon = Simulator(), world.scheduler._carbon
    view = LiveView(world.database, world.settings, carbon, NoHook())
    explaining = Explanations(world.database, view, carbon, simulator)  # type: ignore[arg-type]
    submitted: list[dict[str, Any]] = [asked, {**asked, "preemptible": True}]
    submitted += [{**asked, "gpus": {"min": 4, "model": "V100"}}]
    submitted += [{**asked, "gpus": {"min": gpus, "model": "A100"}} for gpus in (2, 1)]

    def shape(job: LiveJob | None, state: LiveState) -> dict[str, Any]:
        assert job is not None
        return job.model_dump(exclude={"id", "submitted_s", "since_s", "profile"}) | {"on": state.profiles[job.profile]}

    await explaining.explain(Identity(tenant_id="default", role=Role.OPERATOR, key_id="k"), waits, one_change=True)

    (request,) = simulator.asked
    assert request.job_id == waits
    assert waits in {job.id for job in request.state.jobs}
    simulated = [shape(job, request.state) for job in request.instead]
    made: list[dict[str, Any]] = []
    for spec in submitted:
        await world.fetch("UPDATE jobs SET state = 'cancelled' WHERE id = $1 RETURNING 1", waits)
        waits = await world.job(**spec)
        state = await explaining.live_state()
        made.append(shape(next(job for job in state.jobs if job.id == waits), state))
    assert simulated[: len(made)] == made
