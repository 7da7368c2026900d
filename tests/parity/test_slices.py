"""Jobs on slices: live rounds replayed through the simulator's path, and simulations that go on from the live state."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import orjson
import pytest

from lab.recording import plan_to_json
from lab.replay import replay
from services.core.cycle import run_cycle as rounds
from services.core.cycle.plan import Start
from services.core.domain.mig import FIRST_SLICE_INDEX, MEMORY_SLOTS
from services.kit.http import ServiceClient, new_session
from services.scheduler.explaining.explanations import Explanations
from services.scheduler.planning.dry_run import LiveView
from services.scheduler.power.hooks import NoHook
from services.simulator.live import live_document, parameters_of, read_live
from tests.scheduler.test_slices import a_node, on_slice, register, where
from tests.scheduler.world import World, a_world
from tests.support.servers import fresh_database

HOUR_S = 3_600.0


async def live_file(world: World, folder: Path) -> Path:
    """Return a file with the live state, as the scheduler gives it to the what-if service."""
    await world.scheduler.prepare()
    carbon = world.scheduler._carbon
    view = LiveView(world.database, world.settings, carbon, NoHook())
    async with new_session() as session:
        nobody = ServiceClient(session, "http://127.0.0.1:1", "The simulator")
        state = await Explanations(world.database, view, carbon, nobody).live_state()
    path = folder / "live"
    path.write_text(state.model_dump_json())
    return path


def simulated(path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """Return what becomes of the jobs, and on which GPU, from which memory slot on, each got a slice at once."""
    run = read_live(path)
    at_once: dict[str, tuple[int, int]] = {}

    def noting(policy: Any, snapshot: Any, memory: Any) -> Any:
        result = rounds.run_cycle(policy, snapshot, memory)
        for action in result.plan.actions:
            if isinstance(action, Start) and snapshot.now_s == run.state.at_s:
                at_once[action.job_id] = divmod(action.placement.shares[0].devices[0] - FIRST_SLICE_INDEX, MEMORY_SLOTS)
        return result

    with patch("services.simulator.engine.simulation.run_under_orders", noting):
        document = live_document(run, parameters_of(run, {"fifo": {}}), lambda *_: None)
    (outcome,) = document["policies"]
    columns = zip(*(outcome["jobs"][name] for name in ("starts_at_s", "ends_at_s", "carbon_gco2")), strict=True)
    return dict(zip(document["job_ids"], columns, strict=True)), at_once


async def test_a_live_round_with_slices_replays_to_the_same_plan(
    postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    url = fresh_database(postgres_url)
    async with a_world(url, redis_url, policy="las", record_dir=tmp_path, round_interval_s=1e-6) as world:
        await a_node(world, gpus=3, gpu0=[3, 2, 1], gpu2=[2, 2])
        for size in ("2g", "3g", "2g", "2g", "7g", "2g"):
            await on_slice(world, size)
            await world.job(1)
            await world.scheduler.turn()

    records = [orjson.loads(path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    assert any(record["snapshot"]["slice_jobs"] for record in records)
    for record in records:
        assert plan_to_json(replay(record)) == record["plan"]
        moves = [each for each in record["plan"] if each["action"] != "hold"]
        assert plan_to_json(replay(record, reasons=False)) == moves


async def test_a_simulation_of_the_present_queue_gives_the_slices_that_the_next_round_gives(
    postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    """On slices that somebody placed by hand, beside one that runs, with more jobs than slices."""
    async with a_world(fresh_database(postgres_url), redis_url) as world:
        await a_node(world, gpus=3, gpu1=[2, 2, 3], gpu2=[1, 2])
        runs = await on_slice(world, "2g", time_limit_s=2 * HOUR_S)
        await world.scheduler.turn()
        await world.report(await world.allocation(runs), "running")
        await world.scheduler.turn()
        waiting = [await on_slice(world, size, time_limit_s=HOUR_S, priority=at % 2) for at, size in
                   enumerate(["2g", "3g", "2g", "2g", "1g", "3g", "4g"])]  # fmt: skip
        train = await world.job(1, time_limit_s=HOUR_S)

        becomes, at_once = simulated(await live_file(world, tmp_path))
        await world.scheduler.turn()
        live = {job: await where(world, job) for job in (*waiting, train)}

    got = {job: place for job, place in live.items() if isinstance(place, list)}
    at_gpu = {job: divmod(device - FIRST_SLICE_INDEX, MEMORY_SLOTS) for job, (device,) in got.items() if job != train}
    # GPU 0 is whole, so that the others have the same numbers in the simulation, where GPUs that are cut come last.
    assert {job: place for job, place in at_once.items() if job != train} == at_gpu
    assert set(at_once) == set(got)
    assert len(at_gpu) == 4
    began_s, end_s, carbon = becomes[runs]
    assert end_s - began_s == pytest.approx(2 * HOUR_S, abs=30)
    assert carbon > 0
    late = [becomes[job] for job in waiting if job not in got]
    assert sum(starts is None for starts, *_ in late) == 1, "there is no 4g"
    assert all(starts > began_s for starts, *_ in late if starts is not None)


async def test_slices_of_a_fleet_and_of_instances_are_not_in_a_simulation(
    postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    async with a_world(fresh_database(postgres_url), redis_url) as world:
        await a_node(world, gpus=2, gpu0=[2, 2])
        await on_slice(world, "2g", service={})
        await world.scheduler.turn()
        first, second = [await on_slice(world, "2g", time_limit_s=HOUR_S) for _ in range(2)]

        becomes, at_once = simulated(await live_file(world, tmp_path))

        assert set(becomes) == {first, second}
        assert set(at_once) == {first}
        assert becomes[second][0] == pytest.approx(becomes[first][1], abs=1)

        await register(world, "n0", 2, {})
        assert simulated(await live_file(world, tmp_path))[0][first] == (None, None, None)
