"""A real Ray of two raylets, its bridge, and a grid that the test sets: held, started in its zone, stopped, resized."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from tests.support.environments import programs_of
from tests.support.lab import the_lab
from tests.support.ray import ZONES, RayLab, RaySite, a_ray_site

assert the_lab  # the fixture
pytestmark = [pytest.mark.usefixtures("the_lab"), pytest.mark.slow]

COUNTS = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
step = int((folder / "step").read_text()) if (folder / "step").exists() else 0
while not told and not (folder / "done").exists():
    step += 1
    with (folder / "steps").open("a") as file:
        file.write(json.dumps({"step": step, "gpus": int(os.environ["WATTSHIFT_GPUS"])}) + chr(10))
    time.sleep(0.1)
(folder / "step").write_text(str(step))
"""
TRAINS = """
import json, os, pathlib, sys, tempfile, time
from ray.train import Checkpoint, FailureConfig, RunConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from wattshift.ray import scaling_config

def loop(given):
    import ray, ray.train
    from ray.train.collective import broadcast_from_rank_zero
    folder, first = pathlib.Path(given["folder"]), ray.train.get_context().get_world_rank() == 0
    assert ray.get_runtime_context().get_node_id() in given["nodes"]
    step, last = 0, ray.train.get_checkpoint()
    if last:
        with last.as_directory() as saved:
            step = int(pathlib.Path(saved, "step").read_text())
    while not broadcast_from_rank_zero((folder / "done").exists()):
        step += 1
        with tempfile.TemporaryDirectory() as made:
            pathlib.Path(made, "step").write_text(str(step))
            ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(made) if first else None)
        if first:
            ray.train.get_all_reported_checkpoints()  # until then, two reports may be lost with the controller
            with (folder / "steps").open("a") as file:
                size = ray.train.get_context().get_world_size()
                file.write(json.dumps({"step": step, "gpus": size}) + chr(10))

given = {"folder": sys.argv[1], "nodes": json.loads(os.environ["WATTSHIFT_NODES"])}
once = RunConfig(name="run", storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=0))
DataParallelTrainer(loop, train_loop_config=given, scaling_config=scaling_config(), run_config=once).fit()
"""
HOLDS = """
import pathlib, sys, time, ray
ray.init()

@ray.remote(num_gpus=1)
class Held:
    def is_up(self):
        return True

held = Held.remote()
ray.get(held.is_up.remote())
while not (pathlib.Path(sys.argv[1]) / "over").exists():
    time.sleep(0.1)
"""


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[RayLab]:
    """A Ray of its own for each test, as one kills it; in the zones that it names."""
    programs = programs_of("ray", "ray[default,train]==2.60.0", variable="WATTSHIFT_RAY_ENVIRONMENT")
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # its sockets lie beneath it, and their names must be short
    made = RayLab(programs, folder, getattr(request, "param", ZONES))
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def site(lab: RayLab, postgres_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[RaySite]:
    """A control plane for it; its bridge is the test's to start."""
    async with a_ray_site(lab, postgres_url, redis_url, tmp_path) as made:
        yield made


def command(site: RaySite, folder: Path, text: str) -> list[str]:
    """Write a program; return the command that runs it with this folder."""
    (folder / "program.py").write_text(text)
    return [str(site.lab.programs / "python"), str(folder / "program.py"), str(folder)]


def steps(folder: Path) -> list[dict[str, int]]:
    """Return the steps that a program has made."""
    path = folder / "steps"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sizes(found: list[dict[str, int]]) -> list[int]:
    """Return the sizes of runs, one after the other."""
    return [gpus for gpus, _ in groupby(step["gpus"] for step in found)]


async def runs_on(site: RaySite, folder: Path, gpus: int) -> None:
    """Return once a program has made five steps on so many GPUs."""

    async def made() -> bool:
        last = steps(folder)[-5:]
        return len(last) == 5 and all(step["gpus"] == gpus for step in last)

    await site.until(made, f"it runs on {gpus}", 120)


async def test_a_job_waits_for_its_green_hour_and_other_jobs_are_left_alone(site: RaySite, tmp_path: Path) -> None:
    await site.plane.policy("wait-awhile")
    await site.steered()
    (tmp_path / "other").mkdir()
    site.lab.submit("other", *command(site, tmp_path / "other", HOLDS)[1:], wrapped=False)
    await site.until_state("other", "running")
    now_s = time.time()
    site.plane.grid.set([now_s - 3_600, now_s + 30, now_s + 3_600], [600, 10, 600], *ZONES.values())
    site.lab.submit("green", "--gpus", "1", "--time-limit", "600", "--", *command(site, tmp_path, COUNTS))
    waiting = await site.until_state("green", "queued")
    await site.until(lambda: asyncio.to_thread(lambda: "wattshift: waits:" in site.lab.logs("green")), "users are told")
    assert not steps(tmp_path)
    running = await site.until_state("green", "running", 120)
    assert time.time() >= now_s + 29
    assert (running["id"], running["generation"]) == (waiting["id"], 1)
    (group,) = [each for each in site.lab.groups() if each["name"] == "wattshift:green:1"]
    (bundle,) = group["bundles"]
    assert {name for name in bundle["unit_resources"] if name.startswith("zone:")} <= {"zone:DE", "zone:SE"}
    assert len(bundle["unit_resources"]) == 3, "a GPU, a CPU, and the zone that it was planned in"
    (tmp_path / "done").touch()
    await site.until_state("green", "succeeded")
    assert site.lab.job("green")["status"] == "SUCCEEDED"
    assert site.lab.job("other")["status"] == "RUNNING"


@pytest.mark.parametrize("lab", [dict.fromkeys(ZONES, "DE")], indirect=True, ids=["one-zone"])  # no gang is in two
@pytest.mark.parametrize(("program", "unsure"), [(COUNTS, 0), (TRAINS, 1)], ids=["a-command", "ray-train"])
async def test_an_elastic_job_grows_over_both_nodes_and_shrinks_again_by_the_policy(
    site: RaySite, tmp_path: Path, program: str, unsure: int
) -> None:
    await site.plane.policy("afs", resize_gain=0)
    await site.steered()
    mine, rival = tmp_path / "mine", tmp_path / "rival"
    for folder in (mine, rival):
        folder.mkdir()
    site.lab.submit("rival", "--gpus", "3", "--", *command(site, rival, COUNTS))
    await runs_on(site, rival, 3)
    site.lab.submit("elastic", "--gpus", "1-4", "--stoppable", "--", *command(site, mine, program))
    await runs_on(site, mine, 1)
    (rival / "done").touch()
    await runs_on(site, mine, 4)
    (rival / "done").unlink()
    site.lab.submit("again", "--gpus", "2", "--", *command(site, rival, COUNTS))
    await runs_on(site, mine, 2)
    (mine / "done").touch()  # while the other one runs: the policy has no room to give
    ended = await site.until_state("elastic", "succeeded", 120)
    assert (ended["generation"], ended["preemptions"]) == (3, 2)
    found = steps(mine)
    assert sizes(found) == [1, 4, 2]
    made = [each["step"] for each in found]
    assert made[0] == 1
    skipped = [after - before - 1 for before, after in pairwise(made)]
    assert set(skipped) <= set(range(unsure + 1)), f"not from its last checkpoint: {skipped}"
