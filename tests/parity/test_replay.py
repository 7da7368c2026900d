"""Rounds that a live scheduler recorded, replayed through the simulator's path."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from services.core.cycle.recording import plan_to_json
from services.simulator.engine.replay import replay
from tests.scheduler.world import a_world
from tests.support.servers import fresh_database


@pytest.mark.parametrize("policy", ["fifo", "gaia", "green", "las", "srtf"])
async def test_a_live_round_replays_to_the_same_plan(
    postgres_url: str, redis_url: str, tmp_path: Path, policy: str
) -> None:
    url = fresh_database(postgres_url)
    async with a_world(url, redis_url, policy=policy, record_dir=tmp_path, round_interval_s=1e-6) as world:
        await world.node("n1", 4)
        for size in (1, 2, 4):
            await world.running(size) if size < 4 else await world.job(size)
            await world.scheduler.turn()

    records = [orjson.loads(path.read_bytes()) for path in sorted(tmp_path.iterdir())]

    assert len(records) >= 3
    assert any(each["action"] == "start" for record in records for each in record["plan"])
    for record in records:
        assert plan_to_json(replay(record)) == record["plan"]
        moves = [each for each in record["plan"] if each["action"] != "hold"]
        assert plan_to_json(replay(record, reasons=False)) == moves
