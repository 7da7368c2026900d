"""The plan's order of released jobs, by nice values. Slurm's formula goes on: jobs change places in it. Pure."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.engines.slurm.reading import SlurmJob

_SLACK = 10
"""Priorities are rounded, and those of a group grow old together: nice values off by less are left."""
_MOST = 2**31 - 4  #: Slurm takes no others


@dataclass(frozen=True, slots=True)
class Priority:
    """A waiting job's priority with its nice value, and whether somebody has set it: then no formula counts."""

    value: int
    nice: int
    is_set: bool


def nice_values(
    order: Sequence[str], jobs: Mapping[str, SlurmJob], priorities: Mapping[str, Priority], within: str
) -> dict[str, int]:
    """Return the nice values, by job number, at which jobs of a group start in ``order``, first those named first.

    The first job of a group gets the highest of the priorities that its jobs have without us, and so on, so that
    nobody else's job is passed by more of them than before. Tasks of arrays, jobs in several partitions, and those
    whose priority somebody has set keep their own.

    Args:
        jobs, priorities: By our names, and by numbers.
        within: Of what the jobs of one group are, as in ``SlurmSettings.order``.
    """
    groups: dict[tuple[str, ...], list[SlurmJob]] = {}
    for job in (jobs[name] for name in order if name in jobs):
        priority = priorities.get(job.number)
        if priority and not priority.is_set and "_" not in job.number and "," not in job.partition:
            kin = {"user": (job.account, job.user), "account": (job.account,)}.get(within, ())
            groups.setdefault((job.partition, job.qos, *kin), []).append(job)
    return {number: nice for group in groups.values() for number, nice in _of_group(group, priorities).items()}


def _of_group(jobs: Sequence[SlurmJob], priorities: Mapping[str, Priority]) -> dict[str, int]:
    now = [priorities[job.number] for job in jobs]
    own = [each.value + each.nice - job.own_nice for job, each in zip(jobs, now, strict=True)]
    nices: list[int] = []
    above = max(own) + 1
    for job, value, place in zip(jobs, own, sorted(own, reverse=True), strict=True):
        above = min(place, above - 1)
        nices.append(max(min(job.own_nice + value - above, _MOST), -_MOST))
    in_order = all(first.value > second.value for first, second in itertools.pairwise(now))
    if in_order and all(abs(nice - each.nice) <= _SLACK for nice, each in zip(nices, now, strict=True)):
        nices = [each.nice for each in now]
    return {job.number: nice for job, nice in zip(jobs, nices, strict=True)}
