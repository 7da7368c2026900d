"""Footprints and the ledger's own checks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.contracts.jobs import JobFootprint
from services.contracts.schema import Instant, Message
from services.core.domain.jobs import JobState
from services.core.domain.signal import Signal


class FootprintLine(Message):
    """Energy and emissions of one group; the group `idle` is what nobody's job used."""

    group: str
    footprint: JobFootprint
    jobs: int


class FootprintReport(Message):
    """The ledger over a period."""

    start_at: Instant | None
    end_at: Instant | None
    group_by: Literal["job", "project", "tenant", "node"]
    lines: list[FootprintLine]
    idle: JobFootprint
    total: JobFootprint
    metered_gpu_energy_j: float = Field(
        description="By the devices' own counters; `total.gpu_energy_j` must agree to 0.1 %."
    )
    next_cursor: str | None = None


class IntensityUse(Message):
    """Energy a job used under one intensity."""

    start_at: Instant
    end_at: Instant
    energy_j: float
    intensity_gco2_per_kwh: float
    carbon_gco2: float
    estimated: bool = Field(description="Whether energy or intensity was estimated.")


class JobFootprintReport(Message):
    """A job's footprint with the intensities behind it."""

    job_id: str
    footprint: JobFootprint
    zone: str | None
    signal: Signal | None
    pue: float | None
    intervals: list[IntensityUse]
    next_cursor: str | None = None


class PastJob(Message):
    """A job as it ran, in the columns of the simulator's own format (`wattshift`)."""

    job_id: str
    tenant: str
    project: str
    state: JobState
    submitted_at: Instant
    started_at: Instant | None = Field(description="When it first held GPUs.")
    ended_at: Instant | None
    gpus: int | None = Field(description="GPUs it held, the last gang's if it was resized.")
    run_s: float | None = Field(description="Seconds it held GPUs; null until it has ended.")
    gpu_s: float | None = Field(description="Seconds times GPUs, over all its gangs; null until it has ended.")
    energy_j: float | None = Field(description="Of its GPUs and its share of the hosts, as far as it was measured.")


class PastJobs(Message):
    """One page of past jobs, in order of submission."""

    items: list[PastJob]
    next_cursor: str | None = None


class Invariant(Message):
    """One thing that must hold of the live system."""

    name: str
    holds: bool
    detail: str


class InvariantReport(Message):
    """The live system held against its own rules."""

    holds: bool
    invariants: list[Invariant]
