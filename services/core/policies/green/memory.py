"""What GREEN remembers between rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.ids import JobId
from services.core.policies.green.efficiency import BeforeGrowth


class ByRank(NamedTuple):
    """Columns of (n_ranked + 1,) each; what stands last, at -1, is a job that was not ranked."""

    gangs: Ints
    lower: Bools
    held: Bools


@dataclass(frozen=True, eq=False)
class GreenMemory:
    """The last active round's ranking and what it decided; about the jobs that were live then and no others.

    Columns are (n_ranked,) by rank. A round makes no object per job, because thousands may wait.

    Attributes:
        jobs: The jobs of the round's table.
        order: The ranking before users' priorities, as indices of ``jobs``.
        ahead: How many of those rank ahead of the lower queue; arrivals join behind them.
        gangs: The size each of those had or was to have.
        lower: Whether it has left the upper queue.
        held: Whether it waits for greener hours, whatever is free; None: no job does.
        counted_from: (2, n_ranked) of a job that starved, its emissions (gCO2) and GPU seconds by then, as only what
            came after counts; 0 for others; None: no job has starved.
        grown: For a job that has grown, what it was before its last step; kept only where the configuration asks.
    """

    jobs: tuple[JobId, ...] = ()
    order: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    ahead: int = 0
    gangs: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    lower: Bools = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    held: Bools | None = None
    counted_from: Floats | None = None
    grown: Mapping[JobId, BeforeGrowth] = field(default_factory=dict[JobId, BeforeGrowth])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GreenMemory) and dump_memory(self) == dump_memory(other)

    @cached_property
    def index(self) -> Mapping[JobId, int]:
        """Index of each job in the round's table."""
        return dict(zip(self.jobs, range(len(self.jobs)), strict=True))

    @cached_property
    def place(self) -> Ints:
        """The rank of each job of the table, and last, at -1, of a later job: -1. (n_jobs + 1,)."""
        place = np.full(len(self.jobs) + 1, -1)
        place[self.order] = np.arange(self.order.size)
        return place

    @cached_property
    def rank(self) -> Mapping[JobId, int]:
        """Position of each job in the ranking; the jobs are in that order."""
        ids = map(self.jobs.__getitem__, self.order.tolist())
        return dict(zip(ids, range(self.order.size), strict=True))

    @cached_property
    def by_rank(self) -> ByRank:
        """The columns, for those that were not ranked, too."""
        held = np.zeros(self.order.size, dtype=np.bool_) if self.held is None else self.held
        return ByRank(np.append(self.gangs, 0), np.append(self.lower, False), np.append(held, False))


def dump_memory(memory: GreenMemory) -> dict[str, Any]:
    """Return the memory as JSON values: one row per job, in rank order."""
    ids = list(memory.rank)
    rows = [list(row) for row in zip(ids, memory.gangs.tolist(), memory.lower.tolist(), strict=True)]
    counted: list[list[float]] = [] if memory.counted_from is None else memory.counted_from.T.tolist()
    return {
        "ranking": rows,
        "ahead": memory.ahead,
        "counted_from": {job_id: amounts for job_id, amounts in zip(ids, counted, strict=False) if any(amounts)},
        "grown": {job_id: list(step) for job_id, step in memory.grown.items()},
        "held": [] if memory.held is None else sorted(compress(ids, memory.held.tolist())),
    }


def load_memory(stored: dict[str, Any]) -> GreenMemory:
    """Return the memory that ``dump_memory`` wrote; what is missing is empty."""
    rows = [(JobId(job_id), int(gang), bool(lower)) for job_id, gang, lower in stored.get("ranking", [])]
    ids = tuple(job_id for job_id, _, _ in rows)
    counted, held = stored.get("counted_from", {}), frozenset(stored.get("held", ()))
    return GreenMemory(
        jobs=ids,
        order=np.arange(len(ids)),
        ahead=int(stored.get("ahead", 0)),
        gangs=np.array([gang for _, gang, _ in rows], dtype=np.int64),
        lower=np.array([lower for _, _, lower in rows], dtype=np.bool_),
        held=np.array([job_id in held for job_id in ids], dtype=np.bool_) if held else None,
        counted_from=np.array([counted.get(job_id, (0.0, 0.0)) for job_id in ids]).T if counted and ids else None,
        grown={
            JobId(job_id): BeforeGrowth(int(gpus), *map(float, rest))
            for job_id, (gpus, *rest) in stored.get("grown", {}).items()
        },
    )
