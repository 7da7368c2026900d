"""Footprints, past jobs and the checks of the ledger."""

from __future__ import annotations

from pydantic import Field

from services.contracts.jobs import JobFootprint
from services.contracts.queries import GroupBy
from services.contracts.schema import Instant, Message
from services.core.domain.jobs import JobState
from services.core.domain.signal import Signal


class FootprintLine(Message):
    """Energy and emissions of one group. The group `idle` is energy that no job used."""

    group: str
    footprint: JobFootprint
    jobs: int


class FootprintReport(Message):
    """The sums of the ledger over a period."""

    start_at: Instant | None
    end_at: Instant | None
    group_by: GroupBy
    lines: list[FootprintLine]
    idle: JobFootprint
    total: JobFootprint
    metered_gpu_energy_j: float = Field(
        description="Total by the devices' own counters; `total.gpu_energy_j` must agree with it to 0.1 %."
    )
    next_cursor: str | None = None


class IntensityUse(Message):
    """Energy that a job used while one intensity applied."""

    start_at: Instant
    end_at: Instant
    energy_j: float
    intensity_gco2_per_kwh: float
    carbon_gco2: float
    estimated: bool = Field(description="Whether energy or intensity was estimated.")


class JobFootprintReport(Message):
    """A job's footprint with the intensities used to compute it."""

    job_id: str
    footprint: JobFootprint
    zone: str | None
    signal: Signal | None
    pue: float | None
    intervals: list[IntensityUse]
    next_cursor: str | None = None


class PastJob(Message):
    """A past job, in the columns of the simulator's own format (`wattshift`)."""

    job_id: str
    tenant: str
    project: str
    state: JobState
    submitted_at: Instant
    started_at: Instant | None = Field(description="When the job first held GPUs.")
    ended_at: Instant | None
    gpus: int | None = Field(description="GPUs that the job held; those of the last gang if it was resized.")
    run_s: float | None = Field(description="Seconds during which the job held GPUs; null until it has ended.")
    gpu_s: float | None = Field(description="GPU seconds over all its gangs; null until it has ended.")
    energy_j: float | None = Field(description="Energy of its GPUs and its share of the hosts, as far as measured.")


class PastJobs(Message):
    """One page of past jobs, in order of submission."""

    items: list[PastJob]
    next_cursor: str | None = None


class Invariant(Message):
    """A rule that the live system must satisfy."""

    name: str
    holds: bool
    detail: str


class InvariantReport(Message):
    """The result of checking that the live system is consistent."""

    holds: bool
    invariants: list[Invariant]
