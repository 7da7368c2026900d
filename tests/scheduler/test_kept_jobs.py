"""What is kept of live jobs between rounds equals what is read in full, whatever happens in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from services.scheduler.repository import kept_jobs, snapshots
from services.scheduler.repository.kept_jobs import JobRows, KeptJobs
from services.scheduler.repository.snapshots import JobRow
from tests.scheduler.world import World

Change = Callable[[World, random.Random, list[str]], Any]


async def _both(world: World, kept: KeptJobs, of_gated: Sequence[str] | None = None) -> tuple[JobRows, list[JobRow]]:
    async with world.database.transaction("repeatable_read", readonly=True) as connection:
        return await kept.fetch(connection, of_gated), await snapshots.jobs(connection, of_gated)


def _assert_same(kept: JobRows, full: list[JobRow]) -> None:
    assert [*kept] == full
    afresh = JobRows(full).columns
    for name, column in kept.columns.items():
        assert column.dtype == afresh[name].dtype, name
        if column.dtype == np.object_:
            assert column.tolist() == afresh[name].tolist(), name
        else:
            np.testing.assert_array_equal(column, afresh[name], name)
    kinds = kept.kinds("state", "allocation_state", "memory_gib")  # is taken over to the next rows from here on
    assert [kinds.values[at] for at in kinds.of] == [(row.state, row.allocation_state, row.memory_gib) for row in full]


SINGLE = {
    "hold": "UPDATE jobs SET state = 'held' WHERE id = $1",
    "release": "UPDATE jobs SET state = 'queued', queued_at = now() WHERE id = $1",
    "end": "UPDATE jobs SET state = 'succeeded', ended_at = now() WHERE id = $1",
    "ask to cancel": "UPDATE jobs SET cancel_requested = NOT cancel_requested WHERE id = $1",
    "say why": "UPDATE jobs SET reason = coalesce(reason, '') || '.', expected_start_at = now() WHERE id = $1",
    "specify": """UPDATE jobs SET spec = spec || '{"priority": 7, "image": "i"}' WHERE id = $1""",
    "gate": "UPDATE jobs SET gated = NOT gated WHERE id = $1",
    "predict": """INSERT INTO job_predictions (job_id, group_version, group_id, user_id, gpu_s, predicted_at, seen)
        VALUES ($1, 1, 1, 1, random(), now(), true)
        ON CONFLICT (job_id) DO UPDATE SET gpu_s = random(), spread_gpu_s = random()""",
    "forget the prediction": "UPDATE job_predictions SET predicted_at = NULL WHERE job_id = $1",
    "progress": """INSERT INTO job_progress (job_id, done) VALUES ($1, 1)
        ON CONFLICT (job_id) DO UPDATE SET done = job_progress.done + 1, noise_scale = 3""",
    "use energy": """INSERT INTO job_footprints (job_id, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s)
        VALUES ($1, 1, 1, 0, 1, 1)
        ON CONFLICT (job_id) DO UPDATE SET energy_j = job_footprints.energy_j + 1""",
    "start": """INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port, started_at)
        SELECT id || '.' || (1 + (SELECT count(*) FROM allocations WHERE job_id = $1)), id,
               1 + (SELECT count(*) FROM allocations WHERE job_id = $1), 'running', 1, '[]', 29500, now()
          FROM jobs WHERE id = $1 AND NOT EXISTS (SELECT FROM allocations WHERE job_id = $1 AND state <> 'ended')""",
    "stop": "UPDATE allocations SET state = 'stopping' WHERE job_id = $1 AND state <> 'ended'",
    "be over": "UPDATE allocations SET state = 'ended' WHERE job_id = $1",
}
ALL = {
    "rewrite": "VACUUM FULL jobs",
    "freeze": "VACUUM FREEZE jobs, job_progress",
    "roll back": "DO $$ BEGIN UPDATE jobs SET reason = 'x'; RAISE 'no'; EXCEPTION WHEN OTHERS THEN NULL; END $$",
    "over budget": """INSERT INTO budgets (id, tenant_id, project, quantity, amount, action, exceeded)
        VALUES ('b', 'default', 'default', 'carbon_kg', 1, 'hold', true)
        ON CONFLICT (id) DO UPDATE SET exceeded = true""",
    "within budget": "UPDATE budgets SET exceeded = false",
}


async def _change(world: World, dice: random.Random, ids: list[str]) -> str:
    """Do one thing to the jobs at random, and return what it was."""
    what = dice.choice(["submit", "submit", *SINGLE, *SINGLE, *SINGLE, *ALL, "within budget", "within budget"])
    if what == "submit":
        ids.append(await world.job(dice.randint(1, 2), labels={"kind": "k"}))
    elif what in SINGLE:
        await world.fetch(SINGLE[what], dice.choice(ids))
    else:
        await world.fetch(ALL[what])
    return what


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_kept_equals_what_is_read_in_full_after_whatever_happens(
    world: World, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_jobs, "CHANGED_SHARE", 1.0)
    await world.fetch("INSERT INTO tenants (id, limits) VALUES ('default', '{}') ON CONFLICT DO NOTHING")
    dice, kept, ids = random.Random(seed), KeptJobs(few=0), list[str]()
    for _ in range(12):
        ids.append(await world.job())
    taken_over = 0
    for step in range(60):
        done = [await _change(world, dice, ids) for _ in range(dice.choice((0, 1, 1, 3)))]
        of_gated = dice.choice((None, None, ids[::2]))
        if dice.random() < 0.05:
            kept.forget()
        rows, full = await _both(world, kept, of_gated)
        try:
            _assert_same(rows, full)
        except AssertionError as error:
            raise AssertionError(f"step {step}, after {done}") from error
        taken_over += len(full) - kept.read_again
    assert taken_over > 50


async def test_only_what_changed_is_read_again(world: World) -> None:
    ids = [await world.job() for _ in range(10)]
    kept = KeptJobs(few=0)
    first, _ = await _both(world, kept)
    assert kept.read_again == 10

    again, _ = await _both(world, kept)
    assert (kept.read_again, again) == (0, first)

    await world.fetch(SINGLE["say why"], ids[3])
    rows, full = await _both(world, kept)
    assert kept.read_again == 1
    _assert_same(rows, full)
    assert first[3].reason is None, "what an earlier round saw stays as it was"

    kept.forget()
    await _both(world, kept)
    assert kept.read_again == 10


async def test_another_start_of_the_server_and_a_long_time_end_what_is_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(10):
        await world.job()
    kept = KeptJobs(few=0)
    await _both(world, kept)
    monkeypatch.setattr(kept_jobs, "_SERVER", "SELECT 'another start'")
    await _both(world, kept)
    assert kept.read_again == 10

    await _both(world, kept)
    assert kept.read_again == 0
    monkeypatch.setattr(kept_jobs, "FULL_EVERY_S", 0.0)
    await _both(world, kept)
    assert kept.read_again == 10


async def test_where_much_has_changed_or_there_is_little_all_is_read_in_one_piece(world: World) -> None:
    ids = [await world.job() for _ in range(10)]
    kept = KeptJobs(few=0)
    await _both(world, kept)
    for job_id in ids[:5]:
        await world.fetch(SINGLE["say why"], job_id)
    _assert_same(*await _both(world, kept))
    assert kept.read_again == 10

    small = KeptJobs(few=11)
    for _ in range(2):
        _assert_same(*await _both(world, small))
        assert small.read_again == 10


async def test_ids_of_several_lengths_are_read_in_full(world: World) -> None:
    ids = [await world.job() for _ in range(4)]
    await world.fetch("UPDATE jobs SET id = 'job_1' WHERE id = $1", ids[0])
    kept = KeptJobs(few=0)
    for _ in range(2):
        _assert_same(*await _both(world, kept))
        assert kept.read_again == 4


async def test_a_failed_turn_and_a_lost_leadership_keep_nothing(world: World) -> None:
    rows = world.scheduler._kept
    rows._few = 0
    await world.node("n1")
    for _ in range(4):
        await world.job(8)
    await world.scheduler.turn()
    await world.scheduler.turn()
    assert rows._known is not None

    async def fails() -> None:
        raise TimeoutError

    await world.scheduler._guarded(fails)
    assert rows._known is None
