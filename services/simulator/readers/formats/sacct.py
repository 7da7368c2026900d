"""A Slurm site's own history: ``sacct --allusers --parsable2 --format=JobID,User,Submit,Start,End,State,ElapsedRaw,
AllocTRES,ReqTRES`` (more columns do not hurt; ``--duplicates`` shows requeued runs one by one).

The duration is ``ElapsedRaw``, else ``End`` - ``Start``; GPUs are ``gres/gpu`` of ``AllocTRES``, else of ``ReqTRES``.
A job on one MIG slice (``gres/gpu:a100_2g.10gb=1``) asks for such a slice; jobs on several slices are left out.
Slurm prints local time: run it with ``SLURM_TIME_FORMAT=%FT%T%z`` so that the zone is stated; without one, UTC.
Job steps, jobs without a GPU, and jobs that wait or still run are left out; failed, cancelled and timed out jobs held
their GPUs for real and stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from services.simulator.raw import Collector, RawJob
from services.simulator.readers.text import Row, header_of, number, table, utc_s

COLUMNS = ("JobID", "Submit", "State")
ABSENT = {"", "Unknown", "None", "N/A"}
UNFINISHED = ("PENDING", "RUNNING", "REQUEUED", "SUSPENDED", "CONFIGURING", "COMPLETING")


class Sacct:
    """Slurm's accounting."""

    name = "sacct"

    def matches(self, head: Sequence[str]) -> bool:
        """Whether the header has this format's columns."""
        return set(COLUMNS) <= set(header_of(head, "|"))

    def read(self, lines: Iterable[str], jobs: Collector) -> None:
        """Read every job allocation that held a GPU and ended."""
        jobs.absolute = True
        for line, row in table(lines, COLUMNS, jobs.report, "|"):
            if not re.search(r"([+-]\d\d:?\d\d|Z)$", row["Submit"]):
                jobs.report.note("times without a zone are assumed to be in UTC")
            reason = _not_a_job(row)
            if reason:
                jobs.drop(line, reason)
                continue
            try:
                duration_s = _duration_s(row)
                submitted_s = utc_s(row["Submit"], "Submit")
            except ValueError as error:
                jobs.drop(line, str(error))
                continue
            sizes = slices_of(row)
            if len(sizes) > 1:
                jobs.drop(line, "several slices")
                continue
            size = sizes[0] if sizes else 0
            gpus = 1 if sizes else gpus_of(row)
            user = row.get("User", "")
            jobs.add(
                line,
                RawJob(row["JobID"], submitted_s, duration_s, gpus, user, slice_sevenths=size, ran_sevenths=size),
            )


def _not_a_job(row: Row) -> str:
    state = row["State"].split(" ")[0]
    if "." in row["JobID"]:
        return "a step of a job"
    if state in UNFINISHED:
        return f"not ended ({state.lower()})"
    return "" if gpus_of(row) else "no GPU"


def gpus_of(row: Row) -> int:
    """Return the GPUs of a row: ``gres/gpu=n``, or the sum of the typed ones where that is not there."""
    for column in ("AllocTRES", "ReqTRES"):
        entries = row.get(column, "")
        plain = re.search(r"(?:^|,)gres/gpu=(\d+)", entries)
        if plain is not None:
            return int(plain[1])
        typed = re.findall(r"(?:^|,)gres/gpu:[^=,]+=(\d+)", entries)
        if typed:
            return sum(map(int, typed))
    return 0


def slices_of(row: Row) -> list[int]:
    """Return the MIG slices of a row, in sevenths; empty for whole GPUs."""
    for column in ("AllocTRES", "ReqTRES"):
        found = re.findall(r"(?:^|,)gres/gpu:(?:[^=,]*_)?([12347])g\.\d+gb[^=,]*=(\d+)", row.get(column, ""))
        if found:
            return [int(size) for size, count in found for _ in range(int(count))]
    return []


def _duration_s(row: Row) -> float:
    if row.get("ElapsedRaw", "") not in ABSENT:
        return number(row["ElapsedRaw"], "ElapsedRaw")
    start, end = row.get("Start", ""), row.get("End", "")
    return math.nan if start in ABSENT or end in ABSENT else utc_s(end, "End") - utc_s(start, "Start")
