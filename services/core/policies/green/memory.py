"""What GREEN remembers between rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from services.core.domain.arrays import Bools, Ints
from services.core.domain.ids import JobId
from services.core.policies.green.efficiency import BeforeGrowth


@dataclass(frozen=True)
class GreenMemory:
    """The last active round's ranking and what it decided; about the jobs that were live then and no others.

    Attributes:
        rank: Position of each job in the last active ranking, before users' priorities; the jobs are in that order.
        ahead: How many of those rank ahead of the lower queue; arrivals join behind them.
        gangs: The size each of those had or was to have, by rank.
        lower: Whether it has left the upper queue, by rank.
        counted_from: For a job that starved, its emissions (gCO2) and GPU seconds by then; only what came after counts.
        grown: For a job that has grown, what it was before its last step; kept only where the configuration asks.
        held: The jobs that wait for greener hours, whatever is free.
    """

    rank: Mapping[JobId, int] = field(default_factory=dict[JobId, int])
    ahead: int = 0
    gangs: tuple[int, ...] = ()
    lower: tuple[bool, ...] = ()
    counted_from: Mapping[JobId, tuple[float, float]] = field(default_factory=dict[JobId, tuple[float, float]])
    grown: Mapping[JobId, BeforeGrowth] = field(default_factory=dict[JobId, BeforeGrowth])
    held: frozenset[JobId] = frozenset()

    @cached_property
    def by_rank(self) -> tuple[Ints, Bools]:
        """``gangs`` and ``lower`` as columns, (n_ranked + 1,) each; what stands last, at -1, is a job not ranked."""
        return np.array((*self.gangs, 0), dtype=np.int64), np.array((*self.lower, False), dtype=np.bool_)


def dump_memory(memory: GreenMemory) -> dict[str, Any]:
    """Return the memory as JSON values: one row per job, in rank order."""
    rows = [list(row) for row in zip(memory.rank, memory.gangs, memory.lower, strict=True)]
    counted = {job_id: list(amounts) for job_id, amounts in memory.counted_from.items()}
    grown = {job_id: list(step) for job_id, step in memory.grown.items()}
    return {
        "ranking": rows,
        "ahead": memory.ahead,
        "counted_from": counted,
        "grown": grown,
        "held": sorted(memory.held),
    }


def load_memory(stored: dict[str, Any]) -> GreenMemory:
    """Return the memory that ``dump_memory`` wrote; what is missing is empty."""
    rows = [(JobId(job_id), int(gang), bool(lower)) for job_id, gang, lower in stored.get("ranking", [])]
    return GreenMemory(
        rank={job_id: at for at, (job_id, _, _) in enumerate(rows)},
        ahead=int(stored.get("ahead", 0)),
        gangs=tuple(gang for _, gang, _ in rows),
        lower=tuple(lower for _, _, lower in rows),
        counted_from={
            JobId(job_id): (float(carbon), float(gpu_s))
            for job_id, (carbon, gpu_s) in stored.get("counted_from", {}).items()
        },
        grown={
            JobId(job_id): BeforeGrowth(int(gpus), *map(float, rest))
            for job_id, (gpus, *rest) in stored.get("grown", {}).items()
        },
        held=frozenset(map(JobId, stored.get("held", ()))),
    )
