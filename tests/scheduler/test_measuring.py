"""Online profiling: from a policy's wish over the settings in turn to curves that the next round sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from gpu_agent.devices.simulated import Response
from services.contracts.identity import Identity, Role
from services.contracts.jobs import JobSpec
from services.core.cycle.plan import Plan, ProfileControls
from services.core.cycle.snapshot import Snapshot
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.domain.gpus import GPU_MODELS
from services.core.domain.ids import JobId
from services.core.policies.baselines.fifo import Fifo, FifoConfig
from services.core.profiles.priors import ANY_FAMILY, FAMILIES
from services.scheduler import loop
from services.scheduler.learning import learned
from services.scheduler.learning.learned import learn
from services.scheduler.learning.measuring import Point, Sweep, sweep_after
from services.scheduler.repository import measurements
from services.scheduler.repository.profiles import PointRow
from tests.scheduler.test_api import client
from tests.scheduler.test_device_controls import active_round, set_of
from tests.scheduler.world import World
from tests.support.tokens import as_caller

BOARD = GPU_MODELS["A100-SXM4-80GB"]
RESPONSE = Response(BOARD)
LIMITS = [400.0, 357.0, 314.0, 271.0, 229.0, 186.0, 143.0, 100.0]
STEP_S = 0.1


class Profiler(Fifo):
    """FIFO that wants every gang it starts or finds to be measured."""

    def __init__(self) -> None:
        super().__init__(FifoConfig())
        self.seen: Snapshot | None = None

    def decide(self, snapshot: Snapshot, memory: None) -> tuple[Plan, None]:
        self.seen = snapshot
        plan, memory = super().decide(snapshot, memory)
        going = [action.job_id for action in plan.actions] + [
            job_id for job_id, gpus in zip(snapshot.jobs.ids, snapshot.jobs.gpus.tolist(), strict=True) if gpus
        ]
        wishes = [ProfileControls(JobId(job_id), ControlKind.POWER_LIMIT, 30.0) for job_id in going]
        return Plan(plan.snapshot_version, (*plan.actions, *wishes)), memory


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Profiler:
    made = Profiler()
    monkeypatch.setattr(loop, "build_policy", lambda *_: made)
    return made


async def settable(world: World, *names: str) -> None:
    for name in names:
        await world.node(name, 2, model=BOARD.name)
    await world.fetch(
        "UPDATE nodes SET devices = (SELECT jsonb_agg(d || jsonb_build_object('can_set_power_limit', true, "
        "'power_limit_w', 400, 'lowest_limit_w', 100)) FROM jsonb_array_elements(devices) d) RETURNING 1"
    )


async def slice_over(world: World) -> None:
    """Let the time of the interval that is under way pass."""
    await world.fetch("UPDATE setting_measurements SET slice_since = slice_since - interval '31 s' RETURNING 1")


async def works(
    world: World, gang: str, nodes: dict[str, int], marks: int = 10, local_batch: float | None = 64.0
) -> None:
    """Have the nodes say what the gang did at its present settings, as the board's model has it."""
    power_limit_w, _, revision = await set_of(world, gang)
    clock_mhz = RESPONSE.clock_under_limit_mhz(0.9, BOARD.highest_clock_mhz, power_limit_w or 400.0)
    for node, gpus in nodes.items():
        seen: dict[str, Any] = {
            "elapsed_s": 20.0,
            "work": 20.0 / STEP_S * RESPONSE.relative_speed(clock_mhz) if node == "n1" else 0.0,
            "gpu_energy_j": 20.0 * gpus * RESPONSE.power_w(0.9, clock_mhz),
            "marks": marks if node == "n1" else 0,
            "over": node == "n1",
            "local_batch": local_batch if node == "n1" else None,
        }
        said = {"revision": revision, "power_limit_w": power_limit_w, "measure": True, "refused": {}, "slice": seen}
        await world.fetch(
            "UPDATE rank_statuses SET settings = $3 WHERE allocation_id = $1 AND node_id = $2 RETURNING 1",
            gang,
            node,
            said,
        )


async def started(world: World, gpus: int, kind: str | None = "resnet", **spec: Any) -> tuple[str, str]:
    job = await world.job(gpus, **spec)
    await world.fetch("UPDATE jobs SET labels = $2 WHERE id = $1 RETURNING 1", job, {"kind": kind} if kind else {})
    await world.scheduler.turn()
    gang = await world.allocation(job)
    await world.report(gang, "running")
    await world.scheduler.turn()
    return job, gang


async def test_a_gang_is_run_at_each_setting_and_the_next_round_knows_its_kind(world: World, policy: Profiler) -> None:
    await settable(world, "n1", "n2")
    job, gang = await started(world, 4)
    asked: list[float | None] = []
    for _ in LIMITS:
        await world.scheduler.turn()
        asked.append((await set_of(world, gang))[0])
        await works(world, gang, {"n1": 2, "n2": 2})
        await slice_over(world)
    await world.scheduler.turn()
    await active_round(world)

    assert asked == [None, *LIMITS[1:]], "the default first, then downwards"
    assert (await set_of(world, gang))[0] is None, "back at the default"
    assert await world.events(job) == ["starting", "profiling", "running", "profiled"]
    points = await world.fetch("SELECT value, step_time_s, power_w, local_batch FROM setting_points ORDER BY value")
    assert [row["value"] for row in points] == LIMITS[::-1]
    for row in points:
        clock_mhz = RESPONSE.clock_under_limit_mhz(0.9, BOARD.highest_clock_mhz, row["value"])
        assert row["step_time_s"] == pytest.approx(STEP_S / RESPONSE.relative_speed(clock_mhz))
        assert row["power_w"] == pytest.approx(RESPONSE.power_w(0.9, clock_mhz))
        assert row["local_batch"] == 64.0
    assert policy.seen is not None
    (row,) = policy.seen.jobs.control_curve.tolist()
    curve = policy.seen.control_curve(0, 0, ControlKind.POWER_LIMIT)
    assert curve is not None
    half_mhz = RESPONSE.clock_under_limit_mhz(0.9, BOARD.highest_clock_mhz, 229.0)
    assert curve.at(229.0)[0] == pytest.approx(RESPONSE.relative_speed(half_mhz), rel=0.05)
    table = policy.seen.gangs[row][0]
    speed, power_w = table.at(table.gpus)
    at = table.gpus.tolist().index(4)
    assert speed[at, -1] == pytest.approx(1 / STEP_S), "what was measured stands as measured"
    assert power_w[at, -1] == pytest.approx(4 * RESPONSE.power_w(0.9, BOARD.highest_clock_mhz))
    (profile,) = await world.fetch("SELECT * FROM setting_profiles")
    assert profile["time_mape"] < 0.05
    assert profile["energy_mape"] < 0.05


async def test_another_scheduler_goes_on_where_one_was_killed(world: World, policy: Profiler) -> None:
    await settable(world, "n1")
    _, gang = await started(world, 2)
    await world.scheduler.turn()
    for _ in LIMITS:
        await works(world, gang, {"n1": 2})
        await slice_over(world)
        successor = loop.Scheduler(world.settings, world.database, world.redis, world.scheduler._carbon)
        await successor.turn()

    (points,) = await world.fetch("SELECT count(*) AS n FROM setting_points")
    assert points["n"] == len(LIMITS)
    assert (await world.fetch("SELECT state FROM setting_measurements"))[0]["state"] == "done"
    assert len(await world.fetch("SELECT FROM setting_profiles")) == 1


async def test_a_job_that_reports_nothing_keeps_the_default_and_is_left_alone(world: World, policy: Profiler) -> None:
    await settable(world, "n1")
    job, gang = await started(world, 2, kind=None)
    await world.scheduler.turn()
    await slice_over(world)
    await world.scheduler.turn()
    assert (await set_of(world, gang))[:2] == (None, None)
    assert await world.events(job) == ["starting", "profiling", "running"]
    await world.fetch("UPDATE setting_measurements SET slice_since = now() - interval '241 s' RETURNING 1")
    await world.scheduler.turn()
    await active_round(world)

    assert await world.events(job) == ["starting", "profiling", "running", "profiling_failed"]
    (event,) = await world.fetch("SELECT data FROM job_events WHERE type = 'job.profiling_failed'")
    assert event["data"]["detail"] == "It did not report progress twice within 240 s."
    assert await world.state(job) == "running"
    assert not await world.fetch("SELECT FROM setting_profiles")


async def test_a_setting_without_two_reports_in_its_slice_is_left_out_and_the_event_names_it(
    world: World, policy: Profiler
) -> None:
    await settable(world, "n1")
    job, gang = await started(world, 2)
    await world.scheduler.turn()
    for limit_w in LIMITS:
        rare = limit_w in (314.0, 100.0)
        await works(world, gang, {"n1": 2}, marks=1 if rare else 10)
        if rare:
            await slice_over(world)
        await world.scheduler.turn()

    assert await world.events(job) == ["starting", "profiling", "running", "profiled"]
    (event,) = await world.fetch("SELECT data FROM job_events WHERE type = 'job.profiled'")
    assert event["data"]["detail"] == "Too few reports of progress at 314, 100."
    points = await world.fetch("SELECT value FROM setting_points ORDER BY value DESC")
    assert [row["value"] for row in points] == [400.0, 357.0, 271.0, 229.0, 186.0, 143.0]


async def test_rare_reports_leave_time_for_fewer_settings_and_too_rare_ones_for_none(
    world: World, policy: Profiler
) -> None:
    await settable(world, "n1")
    _, gang = await started(world, 2)
    await world.scheduler.turn()
    await works(world, gang, {"n1": 2}, marks=2)  # a report every 20 s
    await world.scheduler.turn()
    (row,) = await world.fetch("SELECT settings, window_s FROM setting_measurements")
    assert row["settings"] == [400.0, 314.0, 186.0, 100.0], "the default, and down to the lowest as before"
    assert 3 * row["window_s"] + 20.0 <= 240.0

    sweep = Sweep(LIMITS, 30.0, 15.0)
    default = Point(10.0, 300.0, 90.0, 0.0, report_s=90.0, over=True)
    assert sweep_after(sweep, default) is None
    often = sweep_after(sweep, replace(default, elapsed_s=15.0, report_s=0.5))
    assert often is not None
    assert often.values == LIMITS
    assert often.least_s < often.window_s <= 30.0


async def test_a_job_that_reports_too_rarely_keeps_the_default_and_its_event_says_so(
    world: World, policy: Profiler
) -> None:
    await settable(world, "n1")
    job, gang = await started(world, 2)
    await world.scheduler.turn()
    await world.fetch("UPDATE setting_measurements SET window_s = 8 RETURNING 1")  # 64 s for all of them
    await works(world, gang, {"n1": 2}, marks=2)
    await world.scheduler.turn()
    await active_round(world)

    assert (await set_of(world, gang))[:2] == (None, None)
    assert await world.events(job) == ["starting", "profiling", "running", "profiling_failed"]
    (event,) = await world.fetch("SELECT data FROM job_events WHERE type = 'job.profiling_failed'")
    assert event["data"]["detail"] == "It reports progress every 20 s: too rarely to measure a second value."


async def test_a_refusal_ends_the_measurement_with_the_devices_own_words(world: World, policy: Profiler) -> None:
    await settable(world, "n1")
    _job, gang = await started(world, 2)
    await world.scheduler.turn()
    await works(world, gang, {"n1": 2})
    await slice_over(world)
    await world.scheduler.turn()
    _, _, revision = await set_of(world, gang)
    said = {"revision": revision, "refused": {"power_limit": "device 0: it takes root"}}
    await world.fetch("UPDATE rank_statuses SET settings = $1 RETURNING 1", said)
    await world.scheduler.turn()
    await world.scheduler.turn()

    assert (await set_of(world, gang))[0] is None
    (event,) = await world.fetch("SELECT data FROM job_events WHERE type = 'job.profiling_failed'")
    assert event["data"]["detail"] == "Its devices refused: n1: device 0: it takes root"


async def test_a_gang_that_ends_meanwhile_leaves_what_was_seen(world: World, policy: Profiler) -> None:
    await settable(world, "n1")
    job, gang = await started(world, 2)
    await world.scheduler.turn()
    for _ in range(3):
        await works(world, gang, {"n1": 2})
        await slice_over(world)
        await world.scheduler.turn()
    await world.exits(job)
    await world.scheduler.turn()

    assert (await world.fetch("SELECT state FROM setting_measurements"))[0]["state"] == "cut"
    assert len(await world.fetch("SELECT FROM setting_points")) == 3
    (profile,) = await world.fetch("SELECT points FROM setting_profiles")
    assert profile["points"] == 3


async def test_operators_read_what_was_learned_and_tenants_that_of_their_own_jobs(
    world: World, policy: Profiler
) -> None:
    await settable(world, "n1")
    job, gang = await started(world, 2)
    await world.scheduler.turn()
    for _ in LIMITS:
        await works(world, gang, {"n1": 2})
        await slice_over(world)
        await world.scheduler.turn()
    await world.fetch(
        "INSERT INTO settings_in_force (allocation_id, node_id, revision, power_limit_w, refused, enforced_w, since) "
        "SELECT $1, 'n1', n, 200 + n, '{}', '[200, 200]', now() + make_interval(secs => n) "
        "FROM generate_series(1, 2) n RETURNING 1",
        gang,
    )
    stranger = as_caller(Identity(tenant_id="stranger", role=Role.USER, key_id="key-2"))
    async with client(world, Role.USER) as api:
        found = (await api.get(f"/v1/jobs/{job}/profile")).json()
        other = await api.get(f"/v1/jobs/{job}/profile", headers=stranger)

    assert found["kind"] == "resnet"
    (curve,) = found["curves"]
    assert (curve["values"], curve["measured_gpus"], curve["gpus"]) == (LIMITS[::-1], [2], 2)
    assert curve["speed"][-1] == 1.0
    assert curve["power_w"][0] == pytest.approx(100.0)
    assert curve["time_mape"] < 0.05
    assert [each["state"] for each in found["measurements"]] == ["done"]
    assert [(each["current"], each["power_limit_w"]) for each in found["in_force"]] == [(True, 202.0), (True, 201.0)]
    assert other.status_code == 404


async def test_what_one_tenants_jobs_teach_stays_with_that_tenant(world: World, policy: Profiler) -> None:
    await settable(world, "n1", "n2")
    job, gang = await started(world, 1)
    await world.scheduler.turn()
    for _ in LIMITS:
        await works(world, gang, {"n1": 1})
        await world.scheduler.turn()
    namesake, same = await world.job(1), await world.job(1)
    for each, tenant in ((namesake, "other"), (same, "default")):
        await world.fetch(
            "UPDATE jobs SET tenant_id = $2, labels = $3 WHERE id = $1 RETURNING 1", each, tenant, {"kind": "resnet"}
        )
    await world.scheduler.turn()

    assert policy.seen is not None
    kind = dict(zip(policy.seen.jobs.ids, policy.seen.jobs.control_curve.tolist(), strict=True))
    assert kind[JobId(same)] == kind[JobId(job)] != kind[JobId(namesake)]
    assert policy.seen.gangs[kind[JobId(job)]]
    assert not policy.seen.gangs[kind[JobId(namesake)]]
    other = as_caller(Identity(tenant_id="other", role=Role.USER, key_id="key-2"))
    async with client(world, Role.USER) as api:
        found = (await api.get(f"/v1/jobs/{namesake}/profile", headers=other)).json()
        own = (await api.get(f"/v1/jobs/{same}/profile")).json()
    assert (found["kind"], found["curves"]) == ("resnet", [])
    assert [each["job_id"] for each in found["measurements"]] == [namesake], "it is measured itself"
    assert len(own["curves"]) == 1


async def test_the_family_and_the_batch_come_from_the_spec_where_reports_do_not_say(
    world: World, policy: Profiler
) -> None:
    await settable(world, "n1")
    job, gang = await started(world, 2, family="language", global_batch=256)
    await world.scheduler.turn()
    for _ in LIMITS:
        await works(world, gang, {"n1": 2}, local_batch=None)
        await world.scheduler.turn()
    async with client(world, Role.USER) as api:
        (curve,) = (await api.get(f"/v1/jobs/{job}/profile")).json()["curves"]

    assert (curve["family"], curve["batch_known"]) == ("language", True)
    points = await world.fetch("SELECT DISTINCT local_batch FROM setting_points")
    assert [row["local_batch"] for row in points] == [128.0]


def test_an_unknown_batch_is_the_familys_usual_one_and_an_unknown_family_a_middling_one() -> None:
    def scales(family: str | None, local_batch: float) -> float:
        rows = [
            PointRow(1, 1, local_batch, value, step_time_s=0.1, power_w=200.0, family=family)
            for value in (200.0, 400.0)
        ]
        speed, _ = learn(rows, "A100", ControlKind.POWER_LIMIT, 8).table.at(np.array([1, 16]))
        return float(speed[1, -1] / speed[0, -1])

    assert scales("language", 0.0) == scales("language", FAMILIES["language"].batch)
    assert scales(None, 0.0) == scales(ANY_FAMILY, FAMILIES[ANY_FAMILY].batch)
    assert len({round(scales(family, 0.0), 6) for family in FAMILIES}) == len(FAMILIES), "a family makes a difference"
    named = get_args(get_args(JobSpec.model_fields["family"].annotation)[0])
    assert {*named, ANY_FAMILY} == set(FAMILIES)


async def test_a_measurement_is_locked_only_where_it_stands(world: World, policy: Profiler) -> None:
    """A scheduler that was paused must not step what another has stepped or ended, whatever else is under way."""
    await settable(world, "n1", "n2")
    _, one = await started(world, 2)
    _, other = await started(world, 2, kind="bert")
    await world.scheduler.turn()
    async with world.database.transaction() as connection:
        gangs = {found.allocation_id: found.position for found in await measurements.running(connection)}
        assert gangs == {one: 0, other: 0}
        assert await measurements.lock(connection, one, 0)
        assert not await measurements.lock(connection, one, 1)
        assert not await measurements.lock(connection, "job_gone.1", 0)
        await connection.execute(measurements.END, one, "done", "")
        assert not await measurements.lock(connection, one, 0)
        assert await measurements.lock(connection, other, 0)


async def test_what_is_under_way_has_its_gangs_controls_and_the_batch_of_its_job(
    world: World, policy: Profiler
) -> None:
    await settable(world, "n1", "n2")
    _, gang = await started(world, 4, global_batch=128)
    await world.scheduler.turn()
    await works(world, gang, {"n1": 2, "n2": 2})
    await slice_over(world)
    await world.scheduler.turn()

    async with world.database.connection() as connection:
        (found,) = await measurements.running(connection)

    assert found.spec_batch == 32
    assert (found.gang.id, found.gang.power_limit_w, found.gang.clock_mhz) == (gang, 357.0, None)
    assert (found.gang.job_id, found.gang.shares, found.gang.settings_refused) == (found.job_id, found.shares, {})
    assert found.position == 1


async def test_a_kind_that_cannot_be_fitted_is_stored_with_the_reason_and_not_tried_again(
    world: World, policy: Profiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise DomainError("the points do not belong together")

    await settable(world, "n1")
    await started(world, 2)
    await world.scheduler.turn()
    await works(world, await world.allocation((await world.fetch("SELECT id FROM jobs"))[0]["id"]), {"n1": 2})
    await slice_over(world)
    await world.scheduler.turn()
    await world.fetch("UPDATE setting_measurements SET state = 'cut' RETURNING 1")
    monkeypatch.setattr(learned, "learn", refuses)

    assert await learned.refit(world.database)
    assert not await learned.refit(world.database), "nothing is new since"

    (row,) = await world.fetch("SELECT * FROM setting_profiles")
    assert (row["kind"], row["gpu_model"], row["setting"]) == ("default/resnet", BOARD.name, "power_limit")
    assert (row["detail"], row["points"]) == ("the points do not belong together", 1)
    assert (row["gpus"], row["speed"], row["time_mape"]) == ([], [], None)
