"""Rounds that a live scheduler recorded, replayed through the simulator's path."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from lab.recording import plan_to_json
from lab.replay import replay
from tests.scheduler.world import a_world
from tests.support.servers import fresh_database


@pytest.mark.parametrize("policy", ["fifo", "green", "joint", "las"])
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


async def test_a_live_round_places_by_layout_and_replays(postgres_url: str, redis_url: str, tmp_path: Path) -> None:
    stages = [{"replicas": 2, "tensor_parallel": 2, "parameter_bytes": 1e9, "tensor_bytes": 1e8}]
    url = fresh_database(postgres_url)
    options = {"policy": "fifo", "placement": "heavy-edge", "inter_gbps": 25.0}
    async with a_world(url, redis_url, record_dir=tmp_path, round_interval_s=1e-6, **options) as world:
        for name, gpus in (("n1", 1), ("n2", 3), ("n3", 2)):
            await world.node(name, gpus)
        job = await world.job(4, layout={"stages": stages})
        await world.job(4, layout={"stages": [{"replicas": 3, "expert_parallel": 2}]})  # of older rules: counts as none
        await world.scheduler.turn()
        (row,) = await world.fetch("SELECT shares FROM allocations WHERE job_id = $1", job)

    assert {share["node_id"]: len(share["devices"]) for share in row["shares"]} == {"n2": 2, "n3": 2}
    records = [orjson.loads(path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    assert [record["snapshot"]["network"]["inter_bytes_per_s"] for record in records] == [25e9 / 8] * len(records)
    for record in records:
        assert plan_to_json(replay(record)) == record["plan"]
