"""A day of jobs at speed, in a real Slurm: 791 arrivals of one day over California's recorded grid, in five minutes."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from services.simulator.bundles import rows_of
from tests.support import slurm
from tests.support.lab import the_lab
from tests.support.slurm import SlurmLab
from tests.support.slurm_bridge import ZONE, Site, a_site

assert the_lab  # the fixture
pytestmark = [
    pytest.mark.usefixtures("the_lab"),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
    pytest.mark.xdist_group("slurm_day"),
    pytest.mark.slow,
]
ENDED = re.compile(r"_job_complete: JobId=(\d+) WEXITSTATUS 0")
DAY_S = 300.0
SPEED = 86_400 / DAY_S
LONGEST_S = 10.0
WINDOW_S = 100.0
"""How much later a job may end: eight hours of the replayed day."""


@dataclass
class Submitted:
    """A job of the day; ``steered``: it is not somebody else's."""

    number: str
    steered: bool
    at_s: float


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    """A Slurm of four nodes that remembers all jobs of the day."""
    with slurm.a_slurm(nodes=4, extra="MinJobAge=3600") as made:
        yield made


@pytest.fixture
async def site(lab: SlurmLab, postgres_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    """A control plane whose grid is a recorded day, from midnight in California on."""
    replay = {"CARBON_REPLAY_SPEED": str(SPEED), "CARBON_REPLAY_START": "2021-08-01T07:00:00Z"}
    async with a_site(lab, postgres_url, redis_url, tmp_path, replay=replay) as made:
        yield made


async def submit_day(site: Site, ran: Path) -> list[Submitted]:
    """Submit the day's jobs as they come; each writes a line when it is done. Every fourth is somebody else's."""
    began_s, found = time.time(), list[Submitted]()
    for at, row in enumerate(rows_of("green_day.csv")):
        await asyncio.sleep(began_s + float(row["arrival_s"]) / SPEED - time.time())
        sleep_s = min(float(row["duration_s"]) / 1_000, LONGEST_S)
        script, options, user = (
            f"sleep {sleep_s:.1f} && echo $SLURM_JOB_ID >> {ran}",
            ["--time=1", "--requeue"],
            "nobody",
        )
        if at % 4 == 0:
            options, user = [*options, "--comment=ours" if at % 8 else "--comment=wattshift:off"], "daemon"
            options += ["--partition=private"] if at % 8 else []
        number = await asyncio.to_thread(site.lab.sbatch, script, *options, user=user)
        found.append(Submitted(number, at % 4 != 0, time.time()))
    return found


def jobs_of(lab: SlurmLab) -> dict[str, dict[str, str]]:
    """Return what Slurm says of all jobs."""
    lines = lab.run("scontrol", "-o", "show", "jobs").splitlines()
    found = [{name: value for name, _, value in (part.partition("=") for part in line.split())} for line in lines]
    return {job["JobId"]: job for job in found}


async def test_a_day_of_jobs_ends_once_each_and_those_that_may_wait_run_in_greener_hours(site: Site) -> None:
    ran = site.lab.folder / "run" / "ran"
    ran.touch()
    ran.chmod(0o666)
    await site.policy("wait-awhile", window_s=WINDOW_S)
    await site.steered(leave_partitions="private")
    began_s = time.time()
    day = await submit_day(site, ran)
    steered = {job.number: job for job in day if job.steered}

    async def all_over() -> bool:
        states = Counter((await asyncio.to_thread(site.lab.run, "squeue", "-h", "-o", "%T")).split())
        known = await site.rows("SELECT count(*) FROM jobs WHERE ended_at IS NULL")
        return not states and known[0][0] == 0

    await site.until(all_over, "all jobs are over", 400)

    in_slurm = jobs_of(site.lab)
    assert Counter(in_slurm[job.number]["JobState"] for job in day) == {"COMPLETED": len(day)}
    log = (site.lab.folder / "log" / "ctld.log").read_text()
    assert Counter(ENDED.findall(log)) == {job.number: 1 for job in day}
    # A script that is through, which slurmctld has not heard yet, may be requeued as any that runs.
    lines = Counter(ran.read_text().split())
    assert lines.keys() == {job.number for job in day}
    again = [number for number, count in lines.items() if count > 1]
    assert all(in_slurm[number]["Restarts"] != "0" for number in again)

    rows = await site.rows("SELECT split_part(external_id, '@', 1) AS number, state FROM jobs")
    ours = Counter((row["number"], row["state"]) for row in rows)
    assert {pair: count for pair, count in ours.items() if pair[0] in steered} == {
        (number, "succeeded"): 1 for number in steered
    }
    assert all(count == 1 and state == "succeeded" for (_, state), count in ours.items())
    ends = await site.rows("SELECT job_id FROM job_events WHERE type IN ('job.succeeded', 'job.failed') ")
    assert max(Counter(row[0] for row in ends).values()) == 1
    assert await site.rows("SELECT 1 FROM device_claims") == []

    others = [in_slurm[job.number] for job in day if not job.steered]
    assert {job.get("AdminComment") for job in others} == {None}
    assert {job["Comment"] for job in others} == {"ours", "wattshift:off"}
    assert {job["Restarts"] for job in others} == {"0"}

    past = await site.carbon.past(ZONE, "average_direct", began_s, time.time())
    assert past
    starts = {job.number: float(in_slurm[job.number]["StartTime"]) for job in day}
    at_submission, at_start = (
        np.mean([past.mean(when, when + 2) or np.nan for when in times])
        for times in ([job.at_s for job in steered.values()], [starts[number] for number in steered])
    )
    requeued = sum(in_slurm[number]["Restarts"] != "0" for number in steered)
    moved = sum(starts[job.number] > job.at_s + 20 for job in steered.values())
    print(
        f"{len(day)} jobs, {len(steered)} of them steered, in {time.time() - began_s:.0f} s; {requeued} requeued, "
        f"{len(again)} of them when their script was through; {moved} begun more than "
        f"20 s after submission, at {at_start:.0f} gCO2/kWh on average; at submission it was {at_submission:.0f}"
    )
    assert moved > len(steered) / 4
    assert at_start < 0.95 * at_submission
