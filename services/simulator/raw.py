"""Jobs as a trace file states them, before a recipe says how they behave, and the rows that were left out.

Formats fill a ``Collector``; it checks each job once, reports what it drops by line, and returns columns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.carbon import Signal
from services.core.domain.errors import DomainError

TOO_LARGE = 2.0**53  #: From here on, floats are not exact whole numbers
MOST_GPUS = 1 << 20  #: More than any gang has
LONGEST_RUN_S = 10 * 366 * 86_400.0
TWICE = ("row occurs twice and counts once", "rows occur twice and count once")
OPTIONAL = ("slice_sevenths", "ran_sevenths")  #: Columns that are None where all are 0
NUMBERS = ("submitted_s", "duration_s", "gpus", "batch_size", "energy_j", *OPTIONAL)
LINES_NAMED = 5  #: Lines named per reason; the others are only counted


class TraceFormatError(DomainError):
    """A file is not in the expected format, or holds nothing usable."""

    code = "invalid_trace"


@dataclass
class ReadReport:
    """The rows of a file; those kept, dropped and merged add up to the total.

    Attributes:
        source, format: The file's name, and the format it was read as.
    """

    source: str
    format: str
    rows: int = 0  #: Rows of data in the file: every line that is not empty, except the header
    kept: int = 0  #: Rows that became jobs (or hours)
    dropped: Counter[str] = field(default_factory=Counter[str])  #: Rows left out, by reason
    merged: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Rows merged into an earlier one, by the reason in the singular and the plural."""
    lines: dict[str, list[int]] = field(default_factory=dict[str, list[int]])  #: The first line numbers of each reason
    notes: list[str] = field(default_factory=list[str])  #: Interpretations of the data that a reader should know

    def drop(self, line: int, reason: str) -> None:
        self.dropped[reason] += 1
        self._name(line, reason)

    def merge(self, line: int, how: tuple[str, str]) -> None:
        self.merged[how] += 1
        self._name(line, how[0])

    def _name(self, line: int, reason: str) -> None:
        named = self.lines.setdefault(reason, [])
        if len(named) < LINES_NAMED:
            named.append(line)

    def _lines(self, reason: str, count: int) -> str:
        named = self.lines[reason]
        return f"(line {', '.join(map(str, named))}{', ...' if count > len(named) else ''})"

    def note(self, text: str) -> None:
        """Add a note, unless it is already there."""
        if text not in self.notes:
            self.notes.append(text)

    def sentences(self) -> tuple[str, ...]:
        """Return the report as lines for people."""
        said = [f"{self.source}: read as {self.format}; {self.kept} of {self.rows} rows kept"]
        for reason, count in sorted(self.dropped.items()):
            said.append(f"dropped {count}: {reason} {self._lines(reason, count)}")
        for how, count in sorted(self.merged.items()):
            said.append(f"{count} {how[count > 1]} {self._lines(how[0], count)}")
        return (*said, *self.notes)


@dataclass(frozen=True)
class RawJobs:
    """Jobs of a trace in order of submission; every column is (n_jobs,).

    Attributes:
        ids, tenants: Unique names; owners, empty if the file names none.
        array, after: The array of each job, and the jobs and arrays it waited for; () if the file does not say.
    """

    ids: tuple[str, ...]
    tenants: tuple[str, ...]
    submitted_s: Floats  #: UTC seconds if ``absolute``, otherwise seconds since the trace began
    duration_s: Floats  #: Run time of the job on ``gpus``, without waiting; NaN if the file does not say
    gpus: Ints  #: How many it ran on; 0 if the file does not say
    application: tuple[str, ...]  #: What it trained; empty if the file does not say
    batch_size: Ints  #: Of the whole gang, samples; 0 if the file does not say
    energy_j: Floats  #: Measured, for the whole job; NaN if the file does not say
    absolute: bool  #: Whether ``submitted_s`` are real dates
    report: ReadReport  #: What was left out
    array: tuple[str, ...] = ()
    max_running: Mapping[str, int] = field(default_factory=dict[str, int])  #: The limits of arrays
    after: tuple[tuple[str, ...], ...] = ()
    slice_sevenths: Ints | None = None
    """The size of the slice that each asks for, 0 for one that asks for GPUs; None: all ask for GPUs."""
    ran_sevenths: Ints | None = None
    """For such a job, the slice size that its duration and energy refer to; 7 stands for a whole GPU too."""

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Ints) -> RawJobs:
        """Return the jobs at these indices, in the order given."""
        columns = {each.name: getattr(self, each.name) for each in fields(self)}
        taken = {
            name: column[rows] if isinstance(column, np.ndarray) else tuple(column[row] for row in rows)
            for name, column in columns.items()
            if isinstance(column, np.ndarray | tuple) and len(column)
        }
        return replace(self, **taken)


@dataclass(frozen=True)
class RawJob:
    """One job; fields as the columns of ``RawJobs``."""

    id: str
    submitted_s: float
    duration_s: float = math.nan
    gpus: int = 0
    tenant: str = ""
    application: str = ""
    batch_size: int = 0
    energy_j: float = math.nan
    array: str = ""
    max_running: int = 0
    after: tuple[str, ...] = ()
    slice_sevenths: int = 0
    ran_sevenths: int = 0


class Collector:
    """Collects rows one by one, drops those that cannot be jobs, and returns the rest as columns.

    ``needs_duration`` is False for a format that does not state durations, because a recipe supplies them.
    """

    def __init__(self, report: ReadReport) -> None:
        self.report, self.drop = report, report.drop
        self.absolute, self.needs_duration = False, True
        self._jobs: list[RawJob] = []
        self._ids: Counter[str] = Counter()
        self._runs: set[tuple[str, ...]] = set()

    def again(self, line: int, *run: str) -> bool:
        """Merge the row and return True if this run, identified by its id and times, was seen before."""
        if run in self._runs:
            self.report.merge(line, TWICE)
            return True
        self._runs.add(run)
        return False

    def add(self, line: int, job: RawJob) -> None:
        """Keep the row, or drop it if it cannot be a job."""
        if not math.isfinite(job.submitted_s):
            return self.drop(line, "no time of submission")
        unknown = math.isnan(job.duration_s) and not self.needs_duration
        if not unknown and not (math.isfinite(job.duration_s) and job.duration_s > 0):
            return self.drop(line, "no duration above 0 s")
        if job.duration_s > LONGEST_RUN_S:
            return self.drop(line, "a run of more than ten years")
        if job.batch_size >= TOO_LARGE:
            return self.drop(line, "a number that is too large")
        if job.gpus > MOST_GPUS:
            return self.drop(line, f"more than {MOST_GPUS} GPUs")
        if job.gpus < 0:
            return self.drop(line, "a negative number of GPUs")
        if math.isinf(job.energy_j) or job.energy_j < 0:
            return self.drop(line, "an energy that cannot be")
        if job.id in self._ids:
            self.report.note("ids that occur again were given a suffix such as ~2")
        while job.id in self._ids:  # a file may have ids with such suffixes, too
            self._ids[job.id] += 1
            job = replace(job, id=f"{job.id}~{self._ids[job.id]}")
        self._ids[job.id] += 1
        self._jobs.append(job)
        return None

    def finish(self) -> RawJobs:
        """Return the jobs in order of submission, ties in file order; ``TraceFormatError`` if no row could be used."""
        jobs, report = self._jobs, self.report
        report.kept = len(jobs)
        if not jobs:
            raise TraceFormatError("no job can be used; " + "; ".join(report.sentences()))
        order = np.argsort([job.submitted_s for job in jobs], kind="stable")
        jobs = [jobs[row] for row in order]
        numbers: dict[str, Any] = {name: np.array([getattr(job, name) for job in jobs]) for name in NUMBERS}
        return RawJobs(
            ids=tuple(job.id for job in jobs),
            tenants=tuple(job.tenant for job in jobs),
            **{name: column for name, column in numbers.items() if name not in OPTIONAL or column.any()},
            application=tuple(job.application for job in jobs),
            absolute=self.absolute,
            report=report,
            array=tuple(job.array for job in jobs),
            max_running={job.array: job.max_running for job in jobs if job.array and job.max_running > 0},
            after=tuple(job.after for job in jobs),
        )


@dataclass(frozen=True)
class RawSeries:
    """A series as its file states it, in chronological order; (n,) UTC seconds and gCO2/kWh."""

    zone: str
    signal: Signal
    times_s: Floats
    intensity_gco2_per_kwh: Floats
    report: ReadReport
