"""A Slurm site's own history: ``sacct --allusers --parsable2 --format=JobID,User,Submit,Start,End,State,ElapsedRaw,
AllocTRES,ReqTRES`` (extra columns do no harm; ``--duplicates`` lists requeued runs separately).

The duration is ``ElapsedRaw``, else ``End`` - ``Start``; GPUs are ``gres/gpu`` of ``AllocTRES``, else of ``ReqTRES``. A
job on one MIG slice (``gres/gpu:a100_2g.10gb=1``) asks for such a slice; jobs on several slices, on a slice beside
whole GPUs, or on a part of a card that is divided into quarters (A30) are left out, as are those that hold only a share
of a GPU (``gres/shard``, ``gres/mps``). The parts of a heterogeneous job (``801+0``, ``801+1``) that hold GPUs are one
gang. Slurm prints local time: run it with ``SLURM_TIME_FORMAT=%FT%T%z`` so that the zone is stated, or with ``%s`` for
seconds; times without a zone are taken as UTC. Job steps, jobs without a GPU, and jobs that have not ended are left
out; all others are kept whatever their state (requeued, preempted, failed, cancelled or timed out), because they really
held their GPUs. The same JobID with another Start is another run.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from services.simulator.raw import Collector, RawJob
from services.simulator.readers.text import NO_ZONE, Row, date_s, has_zone, header_of, number, table

COLUMNS = ("JobID", "Submit", "State")
TRES = ("AllocTRES", "ReqTRES")
ABSENT = {"", "Unknown", "None", "N/A"}
UNFINISHED = ("PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING")
"""What tells that a job has not ended where there is no column ``End``."""
PARTS = (
    "row is a further part of a heterogeneous job and counts with the first",
    "rows are further parts of heterogeneous jobs and count with the first",
)
BESIDE = (
    "job held a share of a GPU besides its own, which does not count",
    "jobs held shares of GPUs besides their own, which do not count",
)
NO_TRES = "no column tells GPUs: export AllocTRES, or at least ReqTRES"
UNCOUNTED = "no job has gres/gpu: Slurm counts GPUs only with AccountingStorageTRES=gres/gpu in slurm.conf"

_PLAIN = re.compile(r"(?:^|,)gres/gpu=(\d{1,15})(?:,|$)")
_TYPED = re.compile(r"(?:^|,)gres/gpu:([^=,]+)=(\d{1,15})(?=,|$)")
_SHARE = re.compile(r"gres/(shard|mps)\b")
_SLICE = re.compile(r"(?:.*[_-])?(([12347])g\.\d+gb)(?:[^a-z0-9].*)?")
_OF_QUARTERS = {"1g.6gb": 0, "2g.12gb": 0, "4g.24gb": 7, "2g.48gb": 0, "4g.96gb": 7}
"""Sevenths of the slices of cards with quarters, A30 and RTX PRO 6000; 0 for those that no number of sevenths is."""


class Sacct:
    """Slurm's accounting."""

    name = "sacct"

    def matches(self, head: Sequence[str]) -> bool:
        return set(COLUMNS) <= set(header_of(head))

    def read(self, lines: Iterable[str], jobs: Collector) -> None:
        """Read every job allocation that held a GPU and ended."""
        jobs.absolute = True
        found: list[tuple[int, RawJob]] = []
        gangs: dict[tuple[str, str, str], int] = {}
        has_gpus, has_tres, shares = False, False, 0
        for line, row in table(lines, COLUMNS, jobs.report, named=True):
            if not has_zone(row["Submit"]):
                jobs.report.note(NO_ZONE)
            has_gpus, has_tres = has_gpus or gpus_of(row) > 0, has_tres or not row.keys().isdisjoint(TRES)
            try:
                job = _job(row)
            except ValueError as error:
                jobs.drop(line, str(error))
                continue
            start, end = row.get("Start", ""), row.get("End", "")
            if start and end and jobs.again(line, job.id, row["Submit"], start, end):
                continue
            shares += _SHARE.search(row.get(TRES[0], "")) is not None
            whole, plus, _ = job.id.rpartition("+")
            if plus and start and not job.slice_sevenths and job.duration_s > 0:
                at = gangs.setdefault((whole, row["Submit"], start), len(found))
                if at < len(found):
                    first, part = found[at]
                    found[at] = first, _joined(part, job, whole)
                    jobs.report.merge(line, PARTS)
                    continue
            found.append((line, job))
        if jobs.report.rows and not has_gpus:
            jobs.report.note(UNCOUNTED if has_tres else NO_TRES)
        if shares:
            jobs.report.note(f"{shares} {BESIDE[shares > 1]}")
        for line, job in found:
            jobs.add(line, job)


def _job(row: Row) -> RawJob:
    state = row["State"].split(" ")[0]
    gpus, sizes = gpus_of(row), slices_of(row)
    if "." in row["JobID"]:
        raise ValueError("a step of a job")
    if row["End"] in ABSENT if "End" in row else state in UNFINISHED:
        raise ValueError(f"not ended ({state.lower()})")
    if not gpus:
        raise ValueError("a share of a GPU" if any(_SHARE.search(row.get(each, "")) for each in TRES) else "no GPU")
    if len(sizes) > 1:
        raise ValueError("several slices")
    if sizes and gpus > len(sizes):
        raise ValueError("a slice beside whole GPUs")
    if 0 in sizes:
        raise ValueError("a part of a card that has quarters")
    size = sizes[0] if sizes else 0
    submitted_s, user = date_s(row["Submit"], "Submit"), row.get("User", "")
    return RawJob(row["JobID"], submitted_s, _duration_s(row), gpus, user, slice_sevenths=size, ran_sevenths=size)


def _joined(first: RawJob, part: RawJob, name: str) -> RawJob:
    """Return two parts that started together as one gang; its length preserves their GPU time."""
    gpus = first.gpus + part.gpus
    duration_s = (first.gpus * first.duration_s + part.gpus * part.duration_s) / gpus
    return replace(first, id=name, gpus=gpus, duration_s=duration_s)


def _entries(row: Row) -> str:
    """Return the trackable resources that a row was allocated, or those it requested if only these include GPUs."""
    return next((found for column in TRES if "gres/gpu" in (found := row.get(column, ""))), "")


def gpus_of(row: Row) -> int:
    """Return the GPUs of a row: ``gres/gpu=n``, or the sum of the typed entries if that is missing."""
    entries = _entries(row)
    plain = _PLAIN.search(entries)
    return int(plain[1] if plain else 0) or sum(int(count) for _, count in _TYPED.findall(entries))


def slices_of(row: Row) -> list[int]:
    """Return the MIG slices of a row, in sevenths; empty for whole GPUs, 0 for a part of a card that has quarters."""
    found: list[int] = []
    for kind, count in _TYPED.findall(_entries(row)):
        if (cut := _SLICE.fullmatch(kind.lower())) is not None:
            found += [_OF_QUARTERS.get(cut[1], int(cut[2]))] * min(int(count), 8)
    return found


def _duration_s(row: Row) -> float:
    if row.get("ElapsedRaw", "") not in ABSENT:
        return number(row["ElapsedRaw"], "ElapsedRaw")
    start, end = row.get("Start", ""), row.get("End", "")
    return math.nan if start in ABSENT or end in ABSENT else date_s(end, "End") - date_s(start, "Start")
