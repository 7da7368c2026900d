"""A day of two accounts at speed, in a real Slurm: once alone, once steered to greener hours.

``SLURM_DAY_S=3600 ./test --live tests/integration/test_slurm_treaty.py -s`` plays the day in an hour, with 800 jobs; by
default in two minutes, with 60. The half-life of usage, the greener hours and patience are as short as the day is.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from services.engines.slurm.commands import Commands
from services.engines.slurm.reading import SlurmJob
from services.simulator.bundles import rows_of
from tests.integration.test_slurm_day import jobs_of
from tests.support import slurm
from tests.support.lab import the_lab
from tests.support.slurm import SlurmLab
from tests.support.slurm_bridge import Site, a_site

assert the_lab  # the fixture
pytestmark = [
    pytest.mark.usefixtures("the_lab"),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
    pytest.mark.xdist_group("slurm_treaty"),
    pytest.mark.timeout(10 * float(os.environ.get("SLURM_DAY_S", "120")) + 600),
]
DAY_S = float(os.environ.get("SLURM_DAY_S", "120"))
JOBS = min(800, round(DAY_S / 2))
NODES, GPUS = 4, 32
PATIENCE_S = DAY_S / 3
"""Eight hours of the day."""
LOAD = 0.9
"""What the jobs of the day need, as a share of what there is."""
USERS = {"nobody": "ml", "daemon": "bio"}


@dataclass
class Day:
    """What became of a day of jobs.

    Attributes:
        idle_gpu_s: GPU seconds that were free while a job that fits there was held by us, by why it was held.
        held_s: By job, how long it was held for anything but a greener hour.
        gpu_s: GPU seconds by account, until the day was over.
    """

    idle_gpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    held_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    intensities: list[float] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)


@pytest.fixture
def lab() -> Iterator[SlurmLab]:
    """A Slurm with accounts, whose memory of usage is as long as the day."""
    half_life = f"0-00:{max(round(DAY_S / 60), 1)}:00" if DAY_S < 3_600 else f"0-{round(DAY_S / 3_600)}:00:00"
    with slurm.a_slurm(NODES, "MinJobAge=36000", accounting=True, half_life=half_life) as made:
        yield made


@pytest.fixture
async def site(lab: SlurmLab, postgres_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with a_site(lab, postgres_url, redis_url, tmp_path, engine_new_jobs_s=1, round_interval_s=2) as made:
        yield made


def grid_of(began_s: float) -> tuple[list[float], list[float]]:
    """Return a day of 24 hours that are green at noon, and the night after it."""
    hours = range(36)
    return (
        [began_s + hour * DAY_S / 24 for hour in hours],
        [300 + 200 * math.cos(2 * math.pi * hour / 24) for hour in hours],
    )


def arrivals() -> list[tuple[float, str, int, float]]:
    """Return when each job comes, whose it is, how many GPUs it asks for, and how long it takes, seconds."""
    rows = list(rows_of("green_day.csv"))
    rows = [rows[at * len(rows) // JOBS] for at in range(JOBS)] if len(rows) > JOBS else rows
    gpus = [(1, 2, 4, 8)[at % 4] for at in range(len(rows))]
    longest = np.array([min(float(row["duration_s"]), 6 * 3_600) for row in rows])
    scale = LOAD * GPUS * DAY_S / float(np.dot(longest, gpus))
    users = ["daemon" if at % 3 == 0 else "nobody" for at in range(len(rows))]
    return [
        (float(row["arrival_s"]) * DAY_S / 86_400, user, width, max(length * scale, 1.0))
        for row, user, width, length in zip(rows, users, gpus, longest, strict=True)
    ]


async def look(lab: SlurmLab, slurm: Commands, day: Day, before_s: float) -> float:
    """Look at Slurm; add what was idle beside held jobs since ``before_s``. Return when."""
    jobs, _ = await slurm.jobs()
    now_s = time.time()
    free = dict.fromkeys((f"gpu{at}" for at in range(1, NODES + 1)), GPUS // NODES)
    for job in jobs:
        for node, held in job.shares.items():
            free[node] -= len(held)
    waiting = [job for job in jobs if job.waits and job.is_held and job.eligible_s > now_s]
    left = sum(free.values())
    for reason, found in (("other", [each for each in waiting if not is_for_hours(each)]), ("greener hours", waiting)):
        fits = [job for job in found if job.gpus <= max(free.values())]
        idle = min(left, sum(job.gpus for job in fits if is_for_hours(job) == (reason != "other")))
        day.idle_gpu_s[reason] += idle * (now_s - before_s)
        left -= idle
        for job in found if reason == "other" else ():
            day.held_s[job.number] += now_s - before_s
    return now_s


def is_for_hours(job: SlurmJob) -> bool:
    return "waits:greener_hours" in job.comment


async def play(lab: SlurmLab) -> tuple[Day, float]:
    """Submit the jobs of the day as they come, and wait for the last; return what became of them, and the start."""
    day, began_s, numbers = Day(), time.time(), list[str]()
    slurm = Commands(30)
    slurm._environment |= lab.environment | {"TZ": "UTC"}
    coming = arrivals()
    seen_s = began_s
    while True:
        now_s = time.time()
        while coming and coming[0][0] <= now_s - began_s:
            _, user, gpus, length_s = coming.pop(0)
            minutes = math.ceil(length_s / 60) + 1
            options = (f"--time={minutes}", "--requeue")
            numbers.append(await asyncio.to_thread(lab.sbatch, f"sleep {length_s:.1f}", *options, gpus=gpus, user=user))
        seen_s = await look(lab, slurm, day, seen_s)
        if not coming and not await asyncio.to_thread(lab.run, "squeue", "-h", "-o", "%i"):
            break
        await asyncio.sleep(0.5)
    known = jobs_of(lab)
    times_s, values = grid_of(began_s)
    for number in numbers:
        job = known[number]
        assert job["JobState"] == "COMPLETED", job
        start_s, end_s = float(job["StartTime"]), float(job["EndTime"])
        gpus = int(job["TRES"].partition("gres/gpu=")[2].partition(",")[0])
        day.gpu_s[job["Account"]] += gpus * max(min(end_s, began_s + DAY_S) - start_s, 0)
        day.intensities.append(values[max(np.searchsorted(times_s, start_s) - 1, 0)])
        day.pauses_s.append(start_s - float(job["SubmitTime"]))
    return day, began_s


async def test_a_day_alone_and_steered(site: Site) -> None:
    alone, _ = await play(site.lab)
    site.lab.run("sacctmgr", "-i", "modify", "account", "bio,ml", "set", "rawusage=0")
    await asyncio.sleep(2)
    await site.steered(partitions="batch")
    site.grid.set(*grid_of(time.time()))
    await site.policy("wait-awhile", window_s=PATIENCE_S)
    steered, _ = await play(site.lab)

    def share(day: Day) -> str:
        return f"{day.gpu_s['bio'] / sum(day.gpu_s.values()):.1%} bio"

    other, hours = (steered.idle_gpu_s[name] / 3_600 for name in ("other", "greener hours"))
    held = list(steered.held_s.values()) or [0.0]
    print(
        f"\n{len(alone.intensities)} jobs, a day of {DAY_S:.0f} s, {GPUS * DAY_S / 3_600:.2f} GPU hours.",
        f"Idle beside jobs of ours that fit: {other:.3f} GPU hours while these waited for a plan,",
        f"{hours:.3f} for a greener hour. Held for a plan: {len(steered.held_s)} jobs, {np.mean(held):.1f} s each,",
        f"{max(held):.1f} s at most. GPU time within the day: {share(alone)} alone, {share(steered)} steered.",
        f"Grid at the start: {np.mean(alone.intensities):.0f} g/kWh alone, {np.mean(steered.intensities):.0f} steered.",
        f"Mean wait: {np.mean(alone.pauses_s):.0f} s alone, {np.mean(steered.pauses_s):.0f} s steered",
    )
    assert len(steered.intensities) == len(alone.intensities)
    assert np.mean(steered.intensities) < np.mean(alone.intensities)
