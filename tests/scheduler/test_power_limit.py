"""A power limit, live: what counts as drawn, and how a cluster comes under it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from services.contracts.identity import Role
from services.contracts.jobs import JobSpec
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.ids import JobId
from services.core.profiles.boards import board_of
from services.scheduler.planning.dry_run import draft_row
from services.scheduler.planning.snapshot import load
from tests.scheduler.test_api import client
from tests.scheduler.test_device_controls import active_round, set_of
from tests.scheduler.world import World

MODEL = "A100-SXM4-80GB"
VALUES, SPEED, DRAWN_W = [200.0, 300.0, 400.0], [0.8, 0.95, 1.0], [190.0, 280.0, 350.0]
IDLE_W, HOST_W = 60.0, 200.0


async def cluster(world: World, host_w: float = 0.0, gpus: int = 4) -> None:
    """One node whose devices take power limits, whose meter tells what its host draws, and a kind that is known."""
    await world.node("n1", gpus, model=MODEL)
    await world.fetch(
        "UPDATE nodes SET devices = (SELECT jsonb_agg(d || jsonb_build_object('can_set_power_limit', true, "
        "'power_limit_w', 400, 'lowest_limit_w', 100)) FROM jsonb_array_elements(devices) d), readings = $1 "
        "RETURNING 1",
        [{"index": index, "power_w": IDLE_W, "utilization": 0.0} for index in range(gpus)],
    )
    await world.fetch(
        "INSERT INTO energy_usages (node_id, boot_id, sequence, owner, start_at, end_at, gpus, gpu_energy_j, "
        "cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue, "
        "carbon_gco2) SELECT 'n1', 'b', n, '', now() - make_interval(secs => 20 - 10 * n), "
        "now() - make_interval(secs => 10 - 10 * n), 4, 0, 4 * $1::float8, 6 * $1::float8, 'counter', 'Z', 'average', "
        "300, false, 1, 0 FROM generate_series(0, 1) n RETURNING 1",
        host_w,
    )
    await world.fetch(
        "INSERT INTO setting_profiles (kind, gpu_model, setting, gpus, settings, speed, power_w, measured_gpus, "
        "points) VALUES ('default/k', $1, 'power_limit', '[1, 2, 4]', $2, $3, $4, '[2]', 3) RETURNING 1",
        MODEL,
        VALUES,
        [[gpus * each for each in SPEED] for gpus in (1, 2, 4)],
        [[gpus * each for each in DRAWN_W] for gpus in (1, 2, 4)],
    )


async def limited(world: World, **parameters: Any) -> None:
    async with client(world, Role.OPERATOR) as api:
        body = {"name": "powerflow", "parameters": {"migration": False, **parameters}}
        assert (await api.put("/v1/policies/active", json=body)).status_code == 200


async def running(world: World, gpus: int = 2) -> str:
    """Return the gang of a job of the known kind."""
    job = await world.job(gpus)
    await world.fetch("""UPDATE jobs SET labels = '{"kind": "k"}' WHERE id = $1 RETURNING 1""", job)
    await world.scheduler.turn()
    gang = await world.allocation(job)
    await world.report(gang, "running")
    await world.scheduler.turn()
    return gang


async def seen(world: World) -> Snapshot:
    outlooks = await world.scheduler._carbon.outlooks([], time.time())
    return (await load(world.database, Trigger.PASSIVE, outlooks, world.settings, at_rest=True)).snapshot


async def test_what_a_user_asked_for_is_seen_of_a_stored_job_and_of_one_that_is_only_asked_about(world: World) -> None:
    await world.scheduler.turn()
    await cluster(world)
    asks = {"min": 1, "max": 4, "asked": 3}
    jobs = [await world.job(gpus=asks), await world.job(2, 4)]
    shown = (await seen(world)).jobs
    assert [shown.asked_gpus[shown.index[JobId(job)]] for job in jobs] == [3, 2]
    spec = JobSpec.model_validate({"name": "a", "command": ["true"], "gpus": asks})
    assert draft_row(spec, "default", 0.0).asked_gpus == 3


async def test_hosts_count_in_what_is_drawn_in_what_idles_and_in_what_gangs_draw(world: World) -> None:
    await world.scheduler.turn()
    await cluster(world, HOST_W)
    await limited(world)
    await running(world)
    snapshot = await seen(world)

    assert snapshot.measured_w == pytest.approx(4 * IDLE_W + HOST_W)
    assert snapshot.idle_w == pytest.approx([IDLE_W + HOST_W / 4])
    assert snapshot.host_w == pytest.approx([HOST_W / 4])
    row = snapshot.jobs.control_curve[0]
    table = snapshot.gangs[row][0]
    assert table.power_w[1] == pytest.approx([2 * each + HOST_W / 2 for each in DRAWN_W])
    assert snapshot.speed_curves[snapshot.jobs.speed_curve[0]][:4] == pytest.approx([1, 2, 3, 4]), "for afs"

    await world.node("n2", 2, model=MODEL)
    await world.fetch("""UPDATE nodes SET readings = '[{"index": 0, "power_w": 999}]' WHERE id = 'n2' RETURNING 1""")
    await world.fetch("INSERT INTO node_power (node_id, state) VALUES ('n2', 'off') RETURNING 1")
    slept = await seen(world)
    assert slept.measured_w == pytest.approx(snapshot.measured_w + world.settings.node_standby_w), "not as last heard"
    assert slept.idle_w == pytest.approx(snapshot.idle_w)

    await world.fetch("UPDATE nodes SET readings = '[]' RETURNING 1")
    unheard = await seen(world)
    assert unheard.measured_w != unheard.measured_w, "no heartbeat: unknown"
    assert unheard.idle_w == pytest.approx([board_of(MODEL).idle_w + HOST_W / 4]), "the board's own idle draw"


async def test_a_limit_that_the_gpus_alone_would_keep_is_kept_with_the_hosts(world: World) -> None:
    await world.scheduler.turn()
    await cluster(world, HOST_W)
    gpus_w = 2 * DRAWN_W[-1] + 2 * IDLE_W
    await limited(world, power_limit_w=gpus_w + 10.0)
    gang = await running(world)
    assert (await set_of(world, gang))[0] == 200.0

    await limited(world, power_limit_w=gpus_w + HOST_W + 10.0)
    await world.scheduler.turn()
    assert (await set_of(world, gang))[0] is None


async def test_a_curve_that_falls_is_met_before_it_does(world: World) -> None:
    await world.scheduler.turn()
    await cluster(world)
    now_s = time.time()
    high_w, low_w = 2 * DRAWN_W[-1] + 2 * IDLE_W + 10.0, 2 * DRAWN_W[0] + 2 * IDLE_W + 10.0
    await limited(world, power_limit_curve=[[now_s - 60, high_w], [now_s + 3 * 3_600, low_w]])
    gang = await running(world)
    assert (await set_of(world, gang))[0] is None, "the fall is beyond the next active round"

    await limited(world, power_limit_curve=[[now_s - 60, high_w], [now_s + 1_800, low_w]])
    await active_round(world)
    assert (await set_of(world, gang))[0] == 200.0, "half an hour ahead: the next active round would be too late"


async def test_eta_takes_effect_with_the_next_round(world: World) -> None:
    await world.scheduler.turn()
    await cluster(world, gpus=2)
    await limited(world, eta=1.0)
    gang = await running(world)
    assert (await set_of(world, gang))[0] is None

    await limited(world, eta=0.6)  # 0.6 of 2 x 350 W
    await world.scheduler.turn()
    assert (await set_of(world, gang))[0] == 200.0
    await limited(world, eta=0.5)  # less than the lowest limit draws
    await world.scheduler.turn()
    (row,) = await world.fetch("SELECT state FROM allocations WHERE id = $1", gang)
    assert row["state"] == "stopping"
