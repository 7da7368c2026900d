"""slurmctld and the bridge killed with -9 at random moments: whatever Slurm forgets, each job ends once for us."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.support import slurm
from tests.support.lab import the_lab
from tests.support.slurm_bridge import Site

assert the_lab  # the fixture
pytestmark = [
    pytest.mark.usefixtures("the_lab"),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
    pytest.mark.xdist_group("slurm_crashes"),
    pytest.mark.slow,
]
KEPT = ("Comment", "AdminComment", "Priority", "StartTime", "SubmitTime", "Restarts", "JobState")
ENDS = ("job.succeeded", "job.failed", "job.cancelled")


def a_shared_file(site: Site) -> Path:
    """Return an empty file that jobs of all users may write to."""
    ran = site.lab.folder / "run" / f"ran-{len(list((site.lab.folder / 'run').iterdir()))}"
    ran.touch()
    ran.chmod(0o666)
    return ran


async def test_a_job_that_has_ended_and_waits_again_after_a_crash_does_not_run_twice(
    site: Site, tmp_path: Path
) -> None:
    """slurmctld saves its state some seconds after a change: killed before that, it knows no end."""
    ran = a_shared_file(site)
    await site.steered()
    number = site.lab.sbatch(f"sleep 1; echo ran >> {ran}", "--requeue")

    async def is_over() -> bool:
        return (await site.job(number)).get("state") == "succeeded"

    await site.until(is_over, "it has run")
    ended = await site.job(number)
    site.lab.kill_controller()
    site.lab.start_controller()
    was = site.lab.state(number)

    async def is_over_in_slurm() -> bool:
        return site.lab.state(number) in ("COMPLETED", "CANCELLED")

    await site.until(is_over_in_slurm, f"it is over there, too; it was {was} after the crash")
    await asyncio.sleep(3)
    assert await site.job(number) == ended
    assert len(await site.rows("SELECT 1 FROM jobs")) == 1
    assert ran.read_text() == "ran\n"
    counted = await site.rows("SELECT count FROM engine_days WHERE what = 'deviation_rolled_back'")
    assert len(counted) == int(was in ("PENDING", "RUNNING"))


async def test_every_job_ends_once_whatever_is_killed_at_any_moment(site: Site) -> None:
    chance = random.Random(4)
    ran = a_shared_file(site)
    await site.policy("sjf")
    await site.steered(leave_partitions="private")
    theirs = site.lab.sbatch("sleep 900", "--partition=private", user="daemon")
    opted_out = site.lab.sbatch("sleep 900", "--comment=wattshift:off", "--hold", user="daemon")
    await site.until_states(**{f"_{theirs}": "RUNNING"})
    before = [{name: site.lab.job(number).get(name) for name in KEPT} for number in (theirs, opted_out)]
    await asyncio.sleep(6)  # until slurmctld has saved them

    for step in range(32):
        script = f"sleep {chance.choice((0, 1, 2, 4))}; echo j{step} >> {ran}"
        options = [f"--job-name=j{step}", "--time=1", "--requeue"]
        await asyncio.to_thread(site.lab.sbatch, script, *options, gpus=chance.choice((1, 2, 4, 7)))
        await asyncio.sleep(chance.uniform(0, 1.5))
        if step % 4 == 3:
            await _kill(site, chance)
    await _until_all_is_over(site)

    jobs = await site.rows("SELECT id, name, state, external_id FROM jobs WHERE name ~ '^j[0-9]+$'")
    again = await site.rows("SELECT count FROM engine_days WHERE what = 'deviation_ran_again'")
    by_name = Counter(row["name"] for row in jobs)
    assert sum(by_name.values()) - len(by_name) == (again[0][0] if again else 0)
    assert len([row for row in jobs if "#" not in row["external_id"]]) == len(by_name)
    in_slurm = site.lab.run("squeue", "-h", "--states=all", "-o", "%j").split()
    assert by_name.keys() >= {name for name in in_slurm if name.startswith("j")}
    for row in jobs:
        events = await site.rows("SELECT type FROM job_events WHERE job_id = $1 ORDER BY sequence", row["id"])
        told = [event["type"] for event in events if event["type"] != "job.deviation"]
        assert [each for each in told if each in ENDS] == told[-1:], (row, told)
    assert {row["name"] for row in jobs if row["state"] == "succeeded"} <= set(ran.read_text().split())
    assert before == [{name: site.lab.job(number).get(name) for name in KEPT} for number in (theirs, opted_out)]


async def _kill(site: Site, chance: random.Random) -> None:
    """Kill one of the two, or both, and start them again after a while."""
    victims = chance.choice((("slurmctld",), ("bridge",), ("slurmctld", "bridge")))
    if "slurmctld" in victims:
        site.lab.kill_controller()
    if "bridge" in victims:
        site.kill_bridge()
    await asyncio.sleep(chance.uniform(0, 2))
    if "slurmctld" in victims:
        await asyncio.to_thread(site.lab.start_controller)
    if "bridge" in victims:
        site.start_bridge(leave_partitions="private")


async def _until_all_is_over(site: Site) -> None:
    """Return once no job is left; one whose end Slurm has forgotten runs there until its time limit.

    Where a launch failed, Slurm drains the node and holds the job until an operator has looked: here, that is the test.
    """

    async def is_all_over() -> bool:
        try:
            queue = await asyncio.to_thread(site.lab.run, "squeue", "-h", "-u", "nobody", "-o", "%i %r")
            if await asyncio.to_thread(site.lab.run, "sinfo", "-h", "-t", "drain,down", "-o", "%N"):
                await asyncio.to_thread(site.lab.run, "scontrol", "update", "nodename=gpu[1-2]", "state=resume")
            for line in queue.splitlines():
                if "launch failed requeued held" in line:
                    await asyncio.to_thread(site.lab.run, "scontrol", "release", line.split()[0])
        except (RuntimeError, subprocess.SubprocessError):
            return False
        live = await site.rows("SELECT 1 FROM jobs WHERE ended_at IS NULL AND name ~ '^j[0-9]+$'")
        return not queue and not live

    await site.until(is_all_over, "all jobs are over, in Slurm and here", 240)
