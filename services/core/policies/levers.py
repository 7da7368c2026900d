"""Which lever did what for one job: grams saved and minutes added, against the same job without that lever.

How a job does its remaining work is described by its draw, its speed and the hours in which it runs. Each lever that a
policy used is removed on its own, with the others unchanged:

=============== =======================================================================================================
lever           without it
=============== =======================================================================================================
``width``       the smallest gang that the job may have
``batch``       the user's own batch, at the same size and draw
``power_limit`` the default power limit
``hours``       the same run, from now on without a pause
``order``       jobs wait in order of submission; the delay is the work ahead divided by the cluster's GPUs
``sleep``       the GPUs that it does not use yet stay awake until it starts
``zone``        the same run on the mean of the GPUs that it may use, wherever they are; only where there are several
=============== =======================================================================================================

The effects of several levers do not add up to their combined effect. A figure is None if something it needs is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np

from services.core.cycle.snapshot import Snapshot
from services.core.domain.carbon import CarbonCurve
from services.core.domain.ids import JobId
from services.core.domain.units import S_PER_HOUR

MINUTE_S = 60.0
DAY_S = 86_400.0


class Lever(StrEnum):
    """What a policy can change for a job. The values are public API."""

    WIDTH = "width"
    BATCH = "batch"
    POWER_LIMIT = "power_limit"
    HOURS = "hours"
    ORDER = "order"
    SLEEP = "sleep"
    ZONE = "zone"


@dataclass(frozen=True)
class Effect:
    """What one lever changes for a job."""

    lever: Lever  #: Which lever
    carbon_saved_gco2: float | None
    """How much less is emitted than without it; negative: more; None: unknown. Without PUE."""
    minutes_added: float | None  #: How much later the job ends; negative: earlier; None: unknown
    detail: str  #: For a user: what it is compared with, or why a figure is unknown


Runs = tuple[tuple[float, float], ...]  #: When a job runs: begins and ends, UTC seconds, ascending


@dataclass(frozen=True)
class Way:
    """How a job does its remaining work."""

    watts: float  #: Draw while it runs, including hosts
    runs: Runs  #: When it runs

    @property
    def end_s(self) -> float:
        return self.runs[-1][1]

    @property
    def busy_s(self) -> float:
        return sum(end_s - begin_s for begin_s, end_s in self.runs)

    def slower(self, factor: float, watts: float) -> Way:
        """Return the same work taking ``factor`` times as long, at another draw; only the end of its runs changes."""
        more_s = self.busy_s * (factor - 1.0)
        runs = list(self.runs)
        while more_s < 0 and len(runs) > 1 and runs[-1][1] - runs[-1][0] <= -more_s:
            more_s += runs[-1][1] - runs[-1][0]
            runs.pop()
        runs[-1] = (runs[-1][0], runs[-1][1] + more_s)
        return Way(watts, tuple(runs))

    def later(self, by_s: float) -> Way:
        """Return the same runs, shifted by ``by_s`` seconds."""
        return replace(self, runs=tuple((begin_s + by_s, end_s + by_s) for begin_s, end_s in self.runs))

    def at_once(self, now_s: float) -> Way:
        """Return the same, starting now and without pauses."""
        return replace(self, runs=((now_s, now_s + self.busy_s),))


def carbon_g(curve: CarbonCurve, way: Way) -> float:
    """Return the emissions of a way, gCO2; beyond the forecast, at the mean of its last day."""
    return way.watts / 1000.0 * sum(_intensity_h(curve, *run) for run in way.runs)


def _intensity_h(curve: CarbonCurve, begin_s: float, end_s: float) -> float:
    """Return the integral of the intensity, gCO2/kWh times hours."""
    known_s = min(max(curve.end_s, begin_s), end_s)
    within = curve.mean(begin_s, known_s) * (known_s - begin_s) if known_s > begin_s else 0.0
    last = curve.mean(max(curve.start_s, curve.end_s - DAY_S), curve.end_s)
    return (within + last * (end_s - known_s)) / S_PER_HOUR


def compared(lever: Lever, curve: CarbonCurve, chosen: Way, without: Way, detail: str) -> Effect:
    """Return what a lever changes, comparing the chosen way with the same without the lever."""
    saved = carbon_g(curve, without) - carbon_g(curve, chosen)
    return Effect(lever, saved, (chosen.end_s - without.end_s) / MINUTE_S, detail)


def unknown(lever: Lever, detail: str) -> Effect:
    return Effect(lever, None, None, detail)


def nothing(lever: Lever, detail: str) -> Effect:
    """Return the effect of a lever that is not used for the job."""
    return Effect(lever, 0.0, 0.0, detail)


@runtime_checkable
class ExplainsLevers(Protocol):
    """A policy that can tell what each of its levers does for a job."""

    def levers(self, snapshot: Snapshot, memory: Any, job_id: JobId) -> tuple[Effect, ...]:
        """Return what each lever does for a waiting or running job; ``memory``: after the cluster's last round."""
        ...


@dataclass(frozen=True)
class SizeRecord:
    """The ledger's record of a job's gangs of one size: work done, in the job's unit, energy and time."""

    gpus: int
    progress: float
    energy_j: float
    duration_s: float


def width_in_ledger(records: Sequence[SizeRecord], smallest: int, gco2_per_j: float) -> Effect:
    """Return what its widths did for a finished job, against its smallest gang measured, given its gCO2 per joule."""
    done = [each for each in records if each.progress > 0]
    base = next((each for each in done if each.gpus == smallest and each.energy_j > 0 and each.duration_s > 0), None)
    if done and all(each.gpus == smallest for each in done):
        return nothing(Lever.WIDTH, "It always had its smallest gang.")
    if base is None:
        return unknown(Lever.WIDTH, "It was not measured with its smallest gang.")
    progress = np.array([each.progress for each in done])
    energy_j = progress.sum() * base.energy_j / base.progress - sum(each.energy_j for each in done)
    time_s = sum(each.duration_s for each in done) - progress.sum() * base.duration_s / base.progress
    detail = f"Against {smallest} GPUs throughout, at the energy and time per work measured with them."
    return Effect(Lever.WIDTH, float(energy_j) * gco2_per_j, float(time_s) / MINUTE_S, detail)


@dataclass(frozen=True)
class LimitRecord:
    """A period during which a gang's GPUs had a power limit."""

    gpus: int  #: Size of the gang
    duration_s: float  #: Length of the period
    speed: float  #: Speed under the limit relative to the default, as measured for its kind
    power_w: float  #: Draw of one GPU under the limit
    default_w: float  #: Draw of one GPU at the default


def limits_in_ledger(records: Sequence[LimitRecord], host_w: float, gco2_per_j: float) -> Effect:
    """Return what power limits did for a finished job, as measured for its kind.

    Args:
        host_w: Draw of the host per GPU.
        gco2_per_j: What it emitted per joule.
    """
    saved_j = sum(
        each.gpus * each.duration_s * ((each.default_w + host_w) * each.speed - (each.power_w + host_w))
        for each in records
    )
    added_s = sum(each.duration_s * (1.0 - each.speed) for each in records)
    detail = "Against the default power limit, at the speed and draw measured of its kind under each that it had."
    return Effect(Lever.POWER_LIMIT, saved_j * gco2_per_j, added_s / MINUTE_S, detail)


@dataclass(frozen=True)
class BatchRecord:
    """A gang that ran with a batch other than the user's base batch."""

    duration_s: float  #: How long it ran
    energy_j: float  #: The energy it used
    gain: float  #: Its goodput relative to the base batch on the same number of GPUs


def batches_in_ledger(records: Sequence[BatchRecord], gco2_per_j: float) -> Effect:
    """Return what chosen batches did for a finished job, given its gCO2 per joule."""
    saved_j = sum(each.energy_j * (each.gain - 1.0) for each in records)
    added_s = sum(each.duration_s * (1.0 - each.gain) for each in records)
    detail = "Against the base batch on the same gangs, by the step times measured of its kind; at the same draw."
    return Effect(Lever.BATCH, saved_j * gco2_per_j, added_s / MINUTE_S, detail)
