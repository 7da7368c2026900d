"""The result of a simulation: report figures, per job and over time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.core.accounting.completion import completion_times, jain_index
from services.core.domain.arrays import Floats, Ints


@dataclass(frozen=True)
class JobColumns:
    """Every job of the workload, in its order; every column is (n_jobs,), NaN for what did not happen.

    Attributes:
        submitted_s, started_s, ended_s: Submission, first start and end, UTC seconds.
    """

    ids: tuple[str, ...]  #: As in the workload
    submitted_s: Floats
    started_s: Floats
    ended_s: Floats
    gpu_s: Floats
    """GPU seconds held, restarts included; a slice counts as one GPU, and a GPU shared by two jobs as one for each."""
    energy_j: Floats  #: Of the job's GPUs and its share of their hosts
    carbon_gco2: Floats  #: Emissions of that energy, at the intensity in force
    preemptions: Ints  #: Stops by the scheduler
    failures: Ints  #: Stops by lost nodes
    last_gpus: Ints  #: The size of its last gang; 0 if it never ran
    profile: Ints  #: Index of its kind
    predicted_work_s: Floats  #: Its work as predicted at submission; NaN if there was no prediction

    @property
    def jct_s(self) -> Floats:
        """Time from submission to end, seconds; NaN for jobs that did not end."""
        return self.ended_s - self.submitted_s


@dataclass(frozen=True)
class Series:
    """The cluster at every active round, just before it; every column is (n_rounds,).

    Attributes:
        running_high, running_low: Jobs holding GPUs whose kind draws at least, or less than, the median power.
    """

    times_s: Floats  #: UTC seconds
    power_w: Floats  #: Mean power of the whole cluster since the previous row
    idle_power_w: Floats  #: The idle part of it
    intensity_gco2_per_kwh: Floats  #: The intensity in force
    carbon_gco2: Floats  #: Of the whole cluster, cumulative
    energy_j: Floats  #: Of the whole cluster, cumulative
    held_gpus: Floats  #: Devices held by jobs, slices included
    queued: Floats  #: Jobs waiting
    running_high: Floats
    running_low: Floats


@dataclass(frozen=True)
class SimulationResult:
    """A run's figures. Energy and carbon are the whole cluster's, idle devices included.

    Attributes:
        avg_jct_s, p50_jct_s, p99_jct_s: Over completed jobs; NaN without any.
        energy_kwh, carbon_kg: Totals; ``idle_energy_kwh``, ``idle_carbon_kg`` are the idle part.
        preemptions, failures: Stops by the scheduler, and by lost nodes.
        above_limit_share, above_limit_kwh: Share of the time during which the cluster exceeded its policy's limit,
            and the energy in excess of it.
    """

    policy: str  #: Its name
    parameters: dict[str, Any]  #: Those of its parameters that were set
    zone: str
    signal: str
    jobs: int  #: Number of jobs; ``completed`` of them ended
    completed: int
    unrunnable: int  #: Those that fit on no nodes of this cluster that take work, or not into their tenant's quota
    avg_jct_s: float
    p50_jct_s: float
    p99_jct_s: float
    makespan_s: float  #: First submission to last end
    energy_kwh: float
    carbon_kg: float
    idle_energy_kwh: float
    idle_carbon_kg: float
    peak_power_w: float  #: Highest draw at any moment
    preemptions: int
    failures: int
    lost_gpu_hours: float  #: Work that stops and lost nodes undid: what was done since a job last saved it
    rounds: int  #: Number of rounds, ``active_rounds`` of them by the clock
    active_rounds: int
    gpu_hours: float
    utilisation: float
    beyond_trace_s: float  #: How long the run outlasted the carbon trace, whose last day was then repeated
    above_limit_share: float
    above_limit_kwh: float
    above_limit_most: float  #: The largest excess as a share of the limit
    above_limit_of_error: float  #: The largest ratio of the excess to the models' stated error; NaN if they stated none
    columns: JobColumns = field(repr=False)
    series: Series = field(repr=False)
    slices: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """Use of the slices by name, such as ``2g``: how many there are, the jobs that ended on them, how long jobs held
    them and the energy of those jobs, their share of the host included."""
    tenants: Mapping[str, float] = field(default_factory=dict[str, float])
    """GPU time of each tenant while it had jobs waiting, relative to its weighted share; empty if fewer than two ever
    waited."""
    jain: float = float("nan")  #: Jain's fairness index of those; NaN without any
    zones: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    """What nodes used in each zone, if there are several: GPUs, kWh, kg, and the checkpoints that moved there."""
    orders: tuple[Mapping[str, float], ...] = ()
    """What came of each order of the grid; see ``orders.Orders.figures``."""
    currency: str | None = None  #: That of the amounts of money; None: prices are not known
    money: float = float("nan")  #: For the cluster's energy, by the hour
    demand_money: float = float("nan")  #: For the highest hour of each month
    wall_s: float = float("nan")  #: Set by the caller; the engine has no clock

    def summary(self) -> dict[str, Any]:
        """Return every scalar figure as a JSON value, None where there is none."""
        figures = {name: value for name, value in self.__dict__.items() if name not in ("columns", "series")}
        figures["orders"] = [{name: None if each != each else each for name, each in o.items()} for o in self.orders]
        return {name: None if value != value else value for name, value in figures.items()}


def result_of(
    columns: JobColumns,
    series: Series,
    tenants: Mapping[str, float],
    *,
    devices: int,
    shared_s: float,
    **figures: Any,
) -> SimulationResult:
    """Return a run's figures: those that follow from its jobs, and the others as given.

    Args:
        tenants: GPU time of each tenant that waited; fewer than two say nothing of fairness.
        devices: Of the cluster; ``shared_s``: how long jobs shared some.
    """
    ended = np.isfinite(columns.ended_s)
    times = completion_times(columns.submitted_s[ended], columns.ended_s[ended])
    makespan = float(columns.ended_s[ended].max() - columns.submitted_s.min()) if times.jobs else float("nan")
    gpu_s = float(columns.gpu_s.sum())
    served = tenants if len(tenants) > 1 else {}
    return SimulationResult(
        jobs=len(columns.ids),
        completed=times.jobs,
        avg_jct_s=times.mean_s,
        p50_jct_s=float(np.median(columns.jct_s[ended])) if times.jobs else float("nan"),
        p99_jct_s=times.p99_s,
        makespan_s=makespan,
        preemptions=int(columns.preemptions.sum()),
        failures=int(columns.failures.sum()),
        gpu_hours=gpu_s / 3_600.0,
        utilisation=(gpu_s - shared_s) / (devices * makespan) if times.jobs else 0.0,
        columns=columns,
        series=series,
        tenants=served,
        jain=jain_index(served.values()),
        **figures,
    )
