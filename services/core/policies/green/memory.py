"""What GREEN remembers between rounds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from services.core.cycle.sorting import order_by
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.ids import JobId
from services.core.policies.green.efficiency import BeforeGrowth

STARVING, AHEAD, ARRIVED, BEHIND = range(4)
"""The parts of a ranking, best first: jobs that starve, the upper queue, jobs that came since, the lower queue."""


class ByJob(NamedTuple):
    """Columns of (n_jobs + 1,) each; the last entry, at -1, is for jobs that were not ranked."""

    queue: Ints
    key: Floats
    gangs: Ints
    lower: Bools
    held: Bools


@dataclass(frozen=True, eq=False)
class GreenMemory:
    """The last active round's ranking and what it decided, for the jobs that were live then and no others.

    Columns are (n_jobs,), as the round's table. A round neither makes an object per job nor sorts all jobs completely,
    because thousands may wait; anything that requires this is a property here, computed on demand.
    """

    jobs: tuple[JobId, ...] = ()  #: The jobs of the round's table
    queue: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Where each job stands in the ranking before users' priorities: ``STARVING``, ``AHEAD`` or ``BEHIND``."""
    key: Floats = field(default_factory=lambda: np.empty(0))  #: What orders it within that queue, smallest first
    submitted_s: Floats = field(default_factory=lambda: np.empty(0))
    """What orders it if ``key`` ties; then the id does."""
    gangs: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))  #: The size each job had or was to have
    lower: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))  #: Whether it has left the upper queue
    held: Bools | None = None  #: Whether it waits for greener hours, whatever is free; None: no job does
    counted_from: Floats | None = None
    """(2, n_jobs) for a job that has starved, its emissions (gCO2) and GPU seconds by then, since only what came after
    counts; 0 for others; None: no job has starved."""
    grown: Mapping[JobId, BeforeGrowth] = field(default_factory=dict[JobId, BeforeGrowth])
    """For a job that has grown, its state before its last step; kept only if the configuration asks for it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GreenMemory) and dump_memory(self) == dump_memory(other)

    @cached_property
    def index(self) -> Mapping[JobId, int]:
        return dict(zip(self.jobs, range(len(self.jobs)), strict=True))

    @property
    def ahead(self) -> int:
        """How many jobs rank ahead of the lower queue; new arrivals join behind them."""
        return int(np.count_nonzero(self.queue < ARRIVED))

    @cached_property
    def order(self) -> Ints:
        """The whole ranking, as indices of ``jobs``: (n_jobs,)."""
        return order_by(self.jobs, self.queue, self.key, self.submitted_s)

    @cached_property
    def by_job(self) -> ByJob:
        """The columns, with an entry for jobs that were not ranked."""
        held = np.zeros(len(self.jobs), dtype=np.bool_) if self.held is None else self.held
        return ByJob(
            np.append(self.queue, ARRIVED),
            np.append(self.key, 0.0),
            np.append(self.gangs, 0),
            np.append(self.lower, False),
            np.append(held, False),
        )


def dump_memory(memory: GreenMemory) -> dict[str, Any]:
    order = memory.order
    ids = list(map(memory.jobs.__getitem__, order.tolist()))
    rows = list(map(list, zip(ids, memory.gangs[order].tolist(), memory.lower[order].tolist(), strict=True)))
    counted: list[list[float]] = [] if memory.counted_from is None else memory.counted_from.T[order].tolist()
    return {
        "ranking": rows,
        "ahead": memory.ahead,
        "counted_from": {job_id: amounts for job_id, amounts in zip(ids, counted, strict=False) if any(amounts)},
        "grown": {job_id: list(step) for job_id, step in memory.grown.items()},
        "held": [] if memory.held is None else sorted(compress(ids, memory.held[order].tolist())),
    }


def load_memory(stored: dict[str, Any]) -> GreenMemory:
    """Return the memory that ``dump_memory`` wrote; missing parts are empty. Its columns are in rank order."""
    rows = [(JobId(job_id), int(gang), bool(lower)) for job_id, gang, lower in stored.get("ranking", [])]
    ids = tuple(job_id for job_id, _, _ in rows)
    counted, held = stored.get("counted_from", {}), frozenset(stored.get("held", ()))
    rank = np.arange(len(ids))
    return GreenMemory(
        jobs=ids,
        queue=np.where(rank < int(stored.get("ahead", 0)), AHEAD, BEHIND),
        key=rank.astype(np.float64),
        submitted_s=np.zeros(len(ids)),
        gangs=np.array([gang for _, gang, _ in rows], dtype=np.int64),
        lower=np.array([lower for _, _, lower in rows], dtype=np.bool_),
        held=np.array([job_id in held for job_id in ids], dtype=np.bool_) if held else None,
        counted_from=np.array([counted.get(job_id, (0.0, 0.0)) for job_id in ids]).T if counted and ids else None,
        grown={
            JobId(job_id): BeforeGrowth(int(gpus), *map(float, rest))
            for job_id, (gpus, *rest) in stored.get("grown", {}).items()
        },
    )
