"""Small made-up workloads and grids for tests and benchmarks of the simulator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from services.core.domain.carbon import CarbonCurve, Signal
from services.simulator.workload import ANY_MODEL, Behaviour, CarbonTrace, ForecastKind, JobProfile, Workload

START_S = 1_672_531_200.0
"""2023-01-01, UTC seconds."""
SIZES = np.array([1, 2, 4, 8])


def a_profile(
    name: str = "p", *, gpu_w: float = 250.0, scaling: float = 1.0, reference: int = 1, **fields: float
) -> JobProfile:
    """Return a kind of job that does ``(gpus / reference) ** scaling`` seconds of work per second."""
    behaviour = Behaviour(SIZES, (SIZES / reference) ** scaling, np.full(SIZES.size, gpu_w))
    return JobProfile(name, {ANY_MODEL: behaviour}, **fields)


def a_workload(
    jobs: Sequence[tuple[float, float, int]],
    profiles: Sequence[JobProfile] | None = None,
    *,
    profile: Sequence[int] | None = None,
    most: int | None = None,
) -> Workload:
    """Return jobs given as (arrival after ``START_S``, work in seconds, GPUs); ``most``: the widest gang of all."""
    n = len(jobs)
    low = np.array([gpus for _, _, gpus in jobs], dtype=np.int64)
    return Workload(
        ids=tuple(f"j{at:07}" for at in range(n)),
        tenants=("t",) * n,
        submitted_s=START_S + np.array([at for at, _, _ in jobs], dtype=np.float64),
        work_s=np.array([work for _, work, _ in jobs], dtype=np.float64),
        requested_gpus=low,
        min_gpus=low,
        max_gpus=low if most is None else np.maximum(low, most),
        step_gpus=np.ones(n, dtype=np.int64),
        profile=np.zeros(n, dtype=np.int64) if profile is None else np.array(profile, dtype=np.int64),
        profiles=tuple(profiles or (a_profile(restart_s=0.0, checkpoint_s=0.0),)),
    )


def a_trace(
    hourly: Sequence[float] = (300.0,) * 48, *, start_s: float = START_S, forecast: ForecastKind = ForecastKind.PERFECT
) -> CarbonTrace:
    """Return a grid by the hour, gCO2/kWh."""
    times = start_s + 3_600.0 * np.arange(len(hourly))
    values = np.array(hourly, dtype=np.float64)
    return CarbonTrace("XX", Signal.AVERAGE_DIRECT, CarbonCurve(times, values, float(times[-1]) + 3_600.0), forecast)


def a_wave(days: int) -> CarbonTrace:
    """Return days of a sine between 150 and 450 gCO2/kWh, from a day before ``START_S``."""
    hours = [300.0 + 150.0 * math.sin(2 * math.pi * hour / 24) for hour in range(24 * (days + 1))]
    return a_trace(hours, start_s=START_S - 86_400.0)


def a_year(jobs: int = 146_000, *, days: float = 365.0, gpus: int = 64, load: float = 0.8, seed: int = 1) -> Workload:
    """Return jobs at random moments, of log-normal lengths, six kinds and one to four GPUs, at this load."""
    random = np.random.default_rng(seed)
    arrivals = np.sort(random.uniform(0, days * 86_400.0, jobs))
    size = random.choice([1, 2, 4], jobs, p=[0.7, 0.2, 0.1])
    work = random.lognormal(7.0, 1.6, jobs)
    work *= load * gpus * days * 86_400.0 / float((work * size).sum())
    kinds = [a_profile(f"k{at}", gpu_w=150.0 + 30.0 * at, scaling=0.95 - 0.08 * at) for at in range(6)]
    kind = random.integers(0, 6, jobs)
    scalings = np.array([0.95 - 0.08 * at for at in range(6)])
    work *= size ** scalings[kind]
    rows = list(zip(arrivals.tolist(), np.maximum(work, 30.0).tolist(), size.tolist(), strict=True))
    return a_workload(rows, kinds, profile=kind.tolist(), most=8)
