"""A day of two accounts at speed in two real Slurms side by side: one alone, one steered to greener hours.

``SLURM_DAY_S=3600 ./test --live tests/integration/test_slurm_treaty.py -s`` plays the day in an hour, with 800 jobs; by
default in two minutes, with 60. As short as the day are the half-life of usage, the greener hours, patience, the pauses
between rounds, and the time for which Slurm remembers jobs. What became of the carbon is compared with the simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from services.core.domain.carbon import CarbonCurve, Signal
from services.engines.slurm.commands import Commands
from services.engines.slurm.reading import SlurmJob
from services.simulator.bundles import rows_of
from services.simulator.engine import simulate
from services.simulator.workload import ANY_MODEL, Behaviour, CarbonTrace, ClusterSpec, JobProfile, Workload
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
SPEED = 86_400 / DAY_S
JOBS = min(800, round(DAY_S / 2))
NODES, GPUS = 4, 32
PATIENCE_S = 8 * 3_600 / SPEED
LOAD = float(os.environ.get("SLURM_DAY_LOAD", "0.7"))
"""What the jobs of the day need, as a share of what there is."""
LOOK_S = min(max(DAY_S / 3_600, 0.5), 1.0)
USERS = {"nobody": "ml", "daemon": "bio"}
REMEMBERED_S = max(300 / SPEED, 30)


class Job(NamedTuple):
    """A job of the day: when it comes, whose it is, how many GPUs it asks for, and how long it takes, seconds."""

    at_s: float
    user: str
    gpus: int
    length_s: float

    @property
    def limit_min(self) -> int:
        """Its time limit, which Slurm has in whole minutes."""
        return math.ceil(self.length_s / 60) + 1


class Run(NamedTuple):
    """A run of a job as accounting has it; UTC seconds."""

    account: str
    gpus: int
    submit_s: float
    start_s: float
    end_s: float


@dataclass
class Day:
    """What became of a day of jobs.

    Attributes:
        began_s: When it began, UTC seconds.
        held_s: By job, how long it was held by us for anything but a greener hour.
        idle_gpu_s: By job, the GPU seconds that were free meanwhile, and into which it fits.
        idle_for_hours_gpu_s: Those that were free beside jobs that were held for a greener hour.
        held_for_hours: The jobs that were ever held for a greener hour.
    """

    began_s: float
    held_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    idle_gpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    idle_for_hours_gpu_s: float = 0.0
    held_for_hours: set[str] = field(default_factory=set)
    runs: list[Run] = field(default_factory=list)

    def share(self, account: str) -> float:
        """Return an account's share of the GPU time until the day was over."""
        spent = defaultdict[str, float](float)
        for run in self.runs:
            spent[run.account] += run.gpus * max(min(run.end_s, self.began_s + DAY_S) - run.start_s, 0)
        return spent[account] / sum(spent.values())

    def intensity(self) -> float:
        """Return the grid's mean intensity over the GPU time of all runs, gCO2/kWh."""
        return intensity_of([(run.start_s - self.began_s, run.end_s - self.began_s, run.gpus) for run in self.runs])

    def intensity_at_starts(self) -> float:
        """Return the grid's mean intensity when jobs began, gCO2/kWh."""
        times_s, values = grid_of(self.began_s, DAY_S / 24)
        return float(np.mean([values[max(np.searchsorted(times_s, run.start_s) - 1, 0)] for run in self.runs]))

    def mean_wait_s(self) -> float:
        """Return the mean time from submission to start, seconds."""
        return float(np.mean([run.start_s - run.submit_s for run in self.runs]))


@pytest.fixture
def labs() -> Iterator[list[SlurmLab]]:
    """Two Slurms with accounts, whose memory of usage is as long as the day."""
    half_life = f"0-00:{max(round(DAY_S / 60), 1)}:00" if DAY_S < 3_600 else f"0-{round(DAY_S / 3_600)}:00:00"
    extra = f"MinJobAge={REMEMBERED_S:.0f}"
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(slurm.a_slurm(NODES, extra, accounting=True, half_life=half_life)) for _ in range(2)]


@pytest.fixture
async def site(labs: list[SlurmLab], postgres_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    rounds = {"engine_new_jobs_s": max(5 / SPEED, 0.2), "round_interval_s": max(1_800 / SPEED, 2)}
    async with a_site(labs[1], postgres_url, redis_url, tmp_path, **rounds) as made:
        yield made


def grid_of(began_s: float, hour_s: float) -> tuple[list[float], list[float]]:
    """Return a day of 24 hours that are green at noon, and the night after it."""
    hours = range(48)
    return (
        [began_s + hour * hour_s for hour in hours],
        [300 + 200 * math.cos(2 * math.pi * hour / 24) for hour in hours],
    )


def intensity_of(runs: Iterable[tuple[float, float, float]]) -> float:
    """Return the grid's mean intensity over runs: seconds from the day's beginning to start and end, and GPUs."""
    times_s, values = map(np.array, grid_of(0, DAY_S / 24))
    until_s = np.append(times_s[1:], np.inf)
    spent_s = [
        gpus * np.clip(np.minimum(end_s, until_s) - np.maximum(start_s, times_s), 0, None)
        for start_s, end_s, gpus in runs
        if end_s < math.inf
    ]
    return float(np.average(values, weights=np.sum(spent_s, axis=0)))


def arrivals() -> list[Job]:
    """Return the jobs of the day."""
    rows = list(rows_of("green_day.csv"))
    rows = [rows[at * len(rows) // JOBS] for at in range(JOBS)] if len(rows) > JOBS else rows
    gpus = [(1, 2, 4, 8)[at % 4] for at in range(len(rows))]
    longest = np.array([min(float(row["duration_s"]), 6 * 3_600) for row in rows])
    scale = LOAD * GPUS * DAY_S / float(np.dot(longest, gpus))
    users = ["daemon" if at % 3 == 0 else "nobody" for at in range(len(rows))]
    return [
        Job(float(row["arrival_s"]) / SPEED, user, width, max(length * scale, 1.0))
        for row, user, width, length in zip(rows, users, gpus, longest, strict=True)
    ]


def simulated(policy: str, **parameters: float) -> float:
    """Return the grid's mean intensity over the same day, at its true speed, in simulation."""
    jobs, times_s = arrivals(), grid_of(0, 3_600)
    gpus, ones = np.array([job.gpus for job in jobs]), np.ones(len(jobs), dtype=np.int64)
    behaviour = Behaviour(np.array([1]), np.ones(1), np.full(1, 400.0))
    workload = Workload(
        ids=tuple(map(str, range(len(jobs)))),
        tenants=tuple(USERS[job.user] for job in jobs),
        submitted_s=np.array([job.at_s * SPEED for job in jobs]),
        work_s=np.array([job.length_s * SPEED for job in jobs]),
        requested_gpus=gpus,
        min_gpus=gpus,
        max_gpus=gpus,
        step_gpus=ones,
        profile=0 * ones,
        profiles=(JobProfile("sleep", {ANY_MODEL: behaviour}, checkpoint_s=0.0, restart_s=0.0),),
        predicted_work_s=np.array([60 * job.limit_min * SPEED for job in jobs]),
        preemptible=ones == 0,
    )
    curve = CarbonCurve(np.array(times_s[0]), np.array(times_s[1]), times_s[0][-1] + 3_600)
    trace = CarbonTrace("Z", Signal.AVERAGE_DIRECT, curve)
    cluster = ClusterSpec.parse(f"{NODES}x{GPUS // NODES}:H200")
    columns = simulate(policy, workload, cluster, trace, parameters=parameters).columns
    assert np.isfinite(columns.ended_s).all()
    return intensity_of(zip(columns.started_s / SPEED, columns.ended_s / SPEED, gpus, strict=True))


async def look(slurm: Commands, day: Day, before_s: float) -> float:
    """Look at Slurm; add what was idle beside held jobs since ``before_s``. Return when."""
    jobs, _ = await slurm.jobs()
    now_s = time.time()
    free = dict.fromkeys((f"gpu{at}" for at in range(1, NODES + 1)), GPUS // NODES)
    for job in jobs:
        for node, held in job.shares.items():
            free[node] -= len(held)
    waiting = [job for job in jobs if job.waits and job.is_held and job.eligible_s > now_s]
    day.held_for_hours |= {job.number for job in waiting if is_for_hours(job)}
    left = sum(free.values())
    for job in sorted(waiting, key=is_for_hours):
        idle = min(job.gpus, left) if job.gpus <= max(free.values()) else 0
        left -= idle
        if is_for_hours(job):
            day.idle_for_hours_gpu_s += idle * (now_s - before_s)
        else:
            day.held_s[job.number] += now_s - before_s
            day.idle_gpu_s[job.number] += idle * (now_s - before_s)
    return now_s


def is_for_hours(job: SlurmJob) -> bool:
    return "waits:greener_hours" in job.comment


def runs_of(lab: SlurmLab, since_s: float) -> list[Run]:
    """Return all runs that accounting has."""
    fields = ("Account", "AllocTRES", "Submit", "Start", "End", "State")
    wanted = ("-X", "-a", "-D", "-n", "-P", "-S", f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(since_s))}")
    found: list[Run] = []
    for line in lab.run("sacct", *wanted, f"--format={','.join(fields)}").splitlines():
        account, held, submit_s, start_s, end_s, state = line.split("|")
        if start_s.isdigit():
            assert state in ("COMPLETED", "RUNNING"), line
            gpus = int(held.partition("gres/gpu=")[2].partition(",")[0])
            found.append(
                Run(account, gpus, float(submit_s), float(start_s), float(end_s if end_s.isdigit() else "inf"))
            )
    return found


async def play(lab: SlurmLab, day: Day) -> None:
    """Submit the jobs of the day as they come, and wait for the last."""
    slurm = Commands(30)
    slurm._environment |= lab.environment | {"TZ": "UTC"}
    coming, seen_s, is_over = arrivals(), day.began_s, False
    while coming or await asyncio.to_thread(lab.run, "squeue", "-h", "-o", "%i"):
        while coming and coming[0].at_s <= time.time() - day.began_s:
            job = coming.pop(0)
            # A requeued job waits a minute or two in Slurm, however short the day is.
            options, script = (f"--time={job.limit_min}", "--no-requeue"), f"sleep {job.length_s:.1f}"
            await asyncio.to_thread(lab.sbatch, script, *options, gpus=job.gpus, user=job.user)
        seen_s = await look(slurm, day, seen_s)
        if not is_over and seen_s > day.began_s + DAY_S:
            is_over = True
            day.runs = runs_of(lab, day.began_s)
            print(f"\nWhen the day is over: {figures(day)}", flush=True)
        await asyncio.sleep(LOOK_S)
    day.runs = runs_of(lab, day.began_s)


def figures(day: Day) -> str:
    """Return what became of a day in words."""
    kept = sum(gpu_s for job, gpu_s in day.idle_gpu_s.items() if job in day.held_for_hours) / 3_600
    held = {job: held_s for job, held_s in day.held_s.items() if job not in day.held_for_hours}
    shares = ", ".join(f"{account} {day.share(account):.2%}" for account in USERS.values())
    ended = [run for run in day.runs if run.end_s < math.inf]
    return (
        f"{len(ended)} jobs have ended; idle beside held jobs that fit, of {GPUS * DAY_S / 3_600:.2f} GPU hours: "
        f"{sum(day.idle_gpu_s.values()) / 3_600 - kept:.3f} until the plan released these, {kept:.3f} until it held "
        f"them, {day.idle_for_hours_gpu_s / 3_600:.3f} for a greener hour; {len(held)} jobs held until released, "
        f"{np.mean(list(held.values()) or [0.0]):.1f} s each, {max(held.values(), default=0.0):.1f} s at most; "
        f"{len(day.held_for_hours)} held for a greener hour; GPU time within the day: {shares}; "
        f"grid {day.intensity():.1f} gCO2/kWh, {day.intensity_at_starts():.1f} when jobs began; "
        f"mean wait {day.mean_wait_s():.1f} s"
    )


async def test_a_day_alone_and_steered(labs: list[SlurmLab], site: Site) -> None:
    await site.steered(partitions="batch")
    began_s = time.time() + 5
    site.grid.set(*grid_of(began_s, DAY_S / 24))
    await site.policy("wait-awhile", window_s=PATIENCE_S)
    alone, steered = Day(began_s), Day(began_s)
    await asyncio.gather(play(labs[0], alone), play(site.lab, steered))

    expected = 1 - simulated("wait-awhile", window_s=PATIENCE_S * SPEED) / simulated("fifo")
    saved = 1 - steered.intensity() / alone.intensity()
    print(f"\nAlone: {figures(alone)}\nSteered: {figures(steered)}")
    print(f"Carbon saved: {saved:.2%}, simulated {expected:.2%}; load {os.getloadavg()}", flush=True)
    assert len(steered.runs) == len(alone.runs) == len(arrivals())
    assert not alone.idle_gpu_s
    assert steered.held_for_hours
    assert steered.intensity_at_starts() < alone.intensity_at_starts()
