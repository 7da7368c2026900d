"""The lengths of jobs are predicted: once, from the model in force, and shown to those whose jobs they are."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from services.contracts.identity import Role
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.profiles.recurrence import GROUP_VERSION, Runs, job_group
from services.learning.length_table import LengthTable
from services.scheduler.learning.predicting import Predicting, remaining_s
from services.scheduler.planning.snapshot import load
from services.scheduler.repository.snapshots import SpecRow
from tests.scheduler.test_api import client
from tests.scheduler.world import World

EVALUATION = {
    name: {"jobs": 2, "seen": 1.0, "exact": 1.0, "within_tenth": 1.0, "mean_error": 0.0}
    for name in ("new", "last", "user_median")
}


def spec_of(command: str) -> dict[str, Any]:
    """Return the part of ``World.job``'s spec that its group comes from."""
    return {"name": "a", "command": [command], "gpus": {"min": 1}}


async def put_in_force(
    world: World, gpu_s: float, *, name: str = "length_1", version: int = GROUP_VERSION, content: bytes | None = None
) -> None:
    """Have a model say that jobs with the command ``true`` come to ``gpu_s``."""
    group, user = job_group("default", spec_of("true"))
    history = Runs(np.full(3, group), np.full(3, user), np.array([gpu_s - 1, gpu_s, gpu_s + 1]))
    content = LengthTable.of(history).to_bytes() if content is None else content
    await world.fetch("UPDATE length_models SET is_active = false RETURNING 1")
    await world.fetch(
        "INSERT INTO length_models (id, through_at, group_version, jobs, groups, evaluation, is_active, content) "
        "VALUES ($1, $2, $3, 3, 1, $4, true, $5) RETURNING 1",
        *(name, datetime.now(UTC), version, EVALUATION, content),
    )


async def prediction_of(world: World, job_id: str) -> Any:
    (row,) = await world.fetch("SELECT * FROM job_predictions WHERE job_id = $1", job_id)
    return row


async def seen_by_policies(world: World, predicting: Predicting | None = None) -> Snapshot:
    outlooks = await world.scheduler._carbon.outlooks([], 0.0)
    loaded = await load(world.database, Trigger.PASSIVE, outlooks, world.settings, predicting=predicting)
    return loaded.snapshot


async def remaining(world: World, job_id: str) -> float:
    """Return what policies see of a job."""
    snapshot = await seen_by_policies(world)
    return float(snapshot.jobs.remaining_s[snapshot.jobs.index[job_id]])


async def test_without_a_model_every_group_is_new(world: World) -> None:
    job_id = await world.job()
    await world.scheduler.turn()

    row = await prediction_of(world, job_id)

    assert (row["gpu_s"], row["seen"], row["model_id"]) == (0.0, False, None)
    assert await remaining(world, job_id) == 0.0


async def test_a_known_group_is_predicted_once(world: World) -> None:
    await put_in_force(world, 120.0)
    job_id = await world.job(2, command=["true"])
    await world.scheduler.turn()
    first = await prediction_of(world, job_id)
    await put_in_force(world, 400.0, name="length_2")
    second_id = await world.job(2, command=["true"])
    await world.scheduler.turn()

    assert await prediction_of(world, job_id) == first, "a newer model changes nothing for a job that was predicted"
    assert (first["model_id"], first["seen"], first["examples"]) == ("length_1", True, 3)
    assert first["gpu_s"] == pytest.approx(120.0, abs=1)
    assert (first["low_gpu_s"], first["median_gpu_s"], first["high_gpu_s"]) == (119.0, 120.0, 121.0)
    assert (await prediction_of(world, second_id))["gpu_s"] == pytest.approx(400.0, abs=1)
    assert await remaining(world, job_id) == pytest.approx(first["gpu_s"] / 2), "on its two GPUs"


async def test_policies_see_how_far_a_prediction_may_be_off(world: World) -> None:
    """Before it is stored as after; of a new group nothing is known."""
    await world.scheduler.turn()
    await put_in_force(world, 120.0)
    job_id, _ = await world.job(2, command=["true"]), await world.job(command=["new"])
    predicting = Predicting(world.database)
    await predicting.refresh()
    before = (await seen_by_policies(world, predicting)).length_spreads
    await world.scheduler.turn()

    row = await prediction_of(world, job_id)
    assert row["spread_gpu_s"] > 0
    assert before == {job_id: pytest.approx(row["spread_gpu_s"] / row["gpu_s"])}
    assert (await seen_by_policies(world)).length_spreads == before


@pytest.mark.parametrize("fault", [{"content": b"nonsense"}, {"version": GROUP_VERSION + 1}])
async def test_a_model_that_cannot_be_used_stops_no_round(world: World, fault: dict[str, Any]) -> None:
    await world.node("n1")
    await put_in_force(world, 120.0, **fault)

    job_id = await world.running(command=["true"])

    row = await prediction_of(world, job_id)
    assert (row["gpu_s"], row["seen"], row["model_id"]) == (0.0, False, None)


async def test_an_unreadable_model_leaves_the_last_one_in_service(world: World) -> None:
    await put_in_force(world, 120.0)
    await world.job(command=["true"])
    await world.scheduler.turn()
    await put_in_force(world, 0.0, name="length_2", content=b"nonsense")
    job_id = await world.job(command=["true"])
    await world.scheduler.turn()

    row = await prediction_of(world, job_id)
    assert (row["model_id"], row["seen"]) == ("length_1", True)


async def test_two_schedulers_predict_a_job_once(world: World) -> None:
    job_id = await world.job(command=["true"])
    others = [Predicting(world.database), Predicting(world.database)]
    rows = [SpecRow(job_id, "default", spec_of("true"))]
    await others[0].keep(others[0].predict(rows))
    await put_in_force(world, 120.0)
    await others[1].refresh()
    await others[1].keep(others[1].predict(rows))

    assert (await prediction_of(world, job_id))["model_id"] is None


def test_what_remains() -> None:
    nan = np.nan
    left = remaining_s(
        *(np.array(each) for each in ([100.0, 100, 100, nan], [nan, 0.25, nan, nan], [0.0, 90, 130, 0], [4.0, 5, 1, 1]))
    )
    np.testing.assert_array_equal(left, [25.0, 15.0, 0.0, nan])


@pytest.mark.usefixtures("the_lab")
async def test_a_shorter_job_goes_first_live(world: World) -> None:
    await world.node("n1", 1)
    await put_in_force(world, 120.0)
    await world.scheduler.prepare()
    await world.fetch("UPDATE scheduler_state SET policy = 'sjf' RETURNING 1")
    known, new = await world.job(command=["true"]), await world.job(command=["other"])

    await world.scheduler.turn()

    assert [await world.state(job_id) for job_id in (known, new)] == ["queued", "starting"]


async def test_what_was_predicted_is_shown_with_what_came(world: World) -> None:
    await world.node("n1")
    await put_in_force(world, 120.0)
    job_id = await world.running(2, command=["true"])
    async with client(world, Role.USER) as api:
        before = (await api.get(f"/v1/predictions/{job_id}")).json()
        await world.fetch("UPDATE allocations SET running_at = now() - interval '50 seconds' RETURNING 1")
        await world.exits(job_id)
        after = (await api.get(f"/v1/predictions/{job_id}")).json()

    assert (before["model_id"], before["group_seen"], before["examples"]) == ("length_1", True, 3)
    assert before["duration_s"] == pytest.approx(60.0, abs=0.5)
    assert (before["actual_gpu_s"], before["error_gpu_s"]) == (None, None)
    assert after["actual_gpu_s"] == pytest.approx(100.0, abs=4)
    assert after["error_gpu_s"] == pytest.approx(after["gpu_s"] - after["actual_gpu_s"])


async def test_reported_work_counts_without_what_was_repeated(world: World) -> None:
    await world.node("n1")
    job_id = await world.running(2)
    await world.fetch("INSERT INTO job_progress (job_id, done) VALUES ($1, 100) RETURNING 1", job_id)
    await world.fetch(
        "INSERT INTO job_profiles (job_id, gpus, progress, energy_j, gpu_energy_j, duration_s) "
        "VALUES ($1, 2, 60, 0, 0, 30) RETURNING 1",
        job_id,
    )
    await world.exits(job_id)
    async with client(world) as api:
        found = (await api.get(f"/v1/predictions/{job_id}")).json()

    assert found["actual_gpu_s"] == pytest.approx(100.0), "100 units, of which 60 took 30 s on two GPUs"


async def test_whom_predictions_are_shown_to(world: World) -> None:
    await world.node("n1")
    held = await world.job()
    async with client(world, Role.USER) as api:
        early = await api.get(f"/v1/predictions/{held}")
        await world.scheduler.turn()
        await world.fetch("UPDATE jobs SET tenant_id = 'other' RETURNING 1")
        answers = [await api.get(f"/v1/predictions/{each}") for each in (held, "job_none")]
        models = await api.get("/v1/predictions/models")
    async with client(world) as api:
        seen = await api.get(f"/v1/predictions/{held}")
        await put_in_force(world, 120.0)
        versions = (await api.get("/v1/predictions/models")).json()["items"]

    assert (early.status_code, early.json()["code"]) == (409, "conflict")
    assert [answer.status_code for answer in answers] == [404, 404]
    assert models.status_code == 403
    assert seen.status_code == 200
    assert [(each["id"], each["active"], each["evaluation"]["new"]["exact"]) for each in versions] == [
        ("length_1", True, 1.0)
    ]
