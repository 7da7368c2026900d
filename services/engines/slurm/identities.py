"""Which Slurm job is which: slurmctld may lose a job that it had accepted, and give its number to another.

A job's name is ``NUMBER@SUBMITTED`` (of an array's task ``ARRAY_TASK@SUBMITTED``), from when it was first seen; it is
written into the job's admin comment, which survives a requeue, while the submission time does not. In a dry run nothing
is written, and memory has to suffice.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from services.contracts.engines import EngineJob
from services.engines.slurm.reading import SlurmJob
from services.kit.bridges.talk import unknown_job

_NAME = re.compile(r"(\d+(?:_\d+)?)@(\d+)")


@dataclass
class _Known:
    name: str
    submit_s: int
    restarts: int
    user: str


class Identities:
    """Names of jobs, and what is remembered to recognise jobs without one."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def named(self, jobs: Iterable[SlurmJob]) -> list[tuple[SlurmJob, str]]:
        """Return jobs with their names, which are unique."""
        found: dict[str, SlurmJob] = {}
        known: dict[str, _Known] = {}
        for job in jobs:
            name = self._name(job)
            known[job.number] = _Known(name, job.submit_s, job.restarts, job.user)
            if name not in found or found[name].submit_s < job.submit_s:
                found[name] = job
        self._known = known
        return [(job, name) for name, job in found.items()]

    def _name(self, job: SlurmJob) -> str:
        fresh = f"{job.number}@{job.submit_s}"
        if (tag := _NAME.fullmatch(job.tag)) and tag[1] == job.number:
            return job.tag
        known = self._known.get(job.number)
        if known is None:
            return fresh
        is_same = known.submit_s == job.submit_s or (job.restarts > known.restarts and job.user == known.user)
        return known.name if is_same else fresh

    @staticmethod
    def key_of(name: str) -> tuple[str, int] | None:
        """Return the number and the submission time that a name was made of."""
        found = _NAME.fullmatch(name)
        return (found[1], int(found[2])) if found else None

    @staticmethod
    def unknown(name: str, key: tuple[str, int]) -> EngineJob:
        """Return what can be said of a job that this process has never seen."""
        return unknown_job(name, number=key[0], submitted_at=datetime.fromtimestamp(key[1], UTC))
