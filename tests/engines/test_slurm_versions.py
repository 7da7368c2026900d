"""Slurm 23.02 to 25.11, by the fields and types that their sources publish: each is read as 22.05 is."""

from __future__ import annotations

import gzip
from pathlib import Path

import orjson
import pytest

from services.engines.slurm.commands import Commands
from services.engines.slurm.reading import read_jobs, read_nodes
from services.engines.slurm.rest import VERSIONS
from tests.engines import slurm_answers
from tests.engines.slurm_answers import FLAGS, JOBS, NODES, RELEASES, STATUS, Json
from tests.engines.test_slurm_lies import Told, a_bridge, lies

assert lies  # the fixture
ANSWERS: Json = orjson.loads(gzip.decompress(slurm_answers.FILE.read_bytes()))


def of_22_05() -> Json:
    """Return the same jobs as 22.05 writes them."""
    found: list[Json] = []
    for row in JOBS:
        status = STATUS.get(row["job_id"], 0) << 8
        states = ",".join([*FLAGS.get(row["job_id"], []), row["job_state"]])
        tres = {name: value.replace("gres/", "gres:") for name, value in row.items() if name.startswith("tres_per")}
        found.append(row | tres | {"exit_code": status, "job_state": states})
    return {"jobs": found}


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_says_the_same_of_jobs_and_nodes(release: str) -> None:
    jobs, nodes = read_jobs(ANSWERS[release]["jobs"]), read_nodes(ANSWERS[release]["nodes"])
    assert (jobs.unread, nodes.unread) == ({}, {})
    assert list(jobs) == list(read_jobs(of_22_05()))
    assert list(nodes) == list(read_nodes({"nodes": NODES}))
    two, waits = jobs[:2]
    assert (two.gpus, dict(two.shares), two.tag) == (4, {"gpu1": (0, 1), "gpu2": (3, 5)}, "1@1700000000")
    assert (waits.is_held, waits.own_begin_s, waits.priority, waits.time_limit_s) == (True, 1_700_000_600, 777, 3_600)


@pytest.mark.parametrize("release", RELEASES)
async def test_the_bridge_takes_all_of_it_and_tells_the_control_plane(lies: Path, release: str) -> None:
    """Since 23.02 ``sinfo --json`` has groups of nodes; nodes are then asked of ``scontrol``, and of it alone."""
    (lies / "squeue").write_bytes(orjson.dumps(ANSWERS[release]["jobs"]))
    (lies / "sinfo").write_bytes(orjson.dumps({"sinfo": [{"nodes": {"nodes": ["gpu1"]}}], "errors": []}))
    (lies / "scontrol").write_bytes(orjson.dumps(ANSWERS[release]["nodes"]))
    told = Told()
    bridge = a_bridge(told)
    for _ in range(3):
        await bridge.look()

    assert told.problems == []
    assert [(node.name, node.gpus, node.gpu_model) for node in told.nodes] == [
        ("gpu1", 8, "h200"),
        ("gpu2", 8, "h200"),
        ("gpu3", 4, "a100"),
        ("gpu3.t4", 4, "t4"),
    ]
    jobs = {job.number: job for job in told.jobs.values()}
    tasks = {f"3_{task}" for task in range(1, 10)}
    assert set(jobs) == {"1", "2", *tasks, "5", "6", "7", "8", "9", "10", "12"}
    alone = {number: job.why_not for number, job in jobs.items() if job.why_not}
    assert (set(alone), alone["9"]) == ({"7", "8", "9"}, "it is interactive")
    assert (jobs["6"].blocked, jobs["2"].blocked, jobs["10"].exit_code) == ("QOSMaxGRESPerUser: its QOS", "", 3)
    calls = (lies / "calls").read_text().splitlines()
    assert [calls.count(each) for each in ("sinfo --json", "scontrol show nodes --json")] == [1, 3]


async def test_the_release_is_what_the_answer_says(lies: Path) -> None:
    for release in RELEASES:
        (lies / "squeue").write_bytes(orjson.dumps(ANSWERS[release]["jobs"]))
        _, version = await Commands(timeout_s=5).jobs()
        assert version.startswith(f"{release}.1")
    assert max(RELEASES.values()) == VERSIONS[-1]
