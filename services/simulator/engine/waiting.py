"""Which jobs wait, and which of them may start, so that a round's cost does not grow with the queue.

In a round that stops no job, only jobs without devices are ranked. If a policy keeps waiting jobs in a fixed order
(``PolicyEntry.waits_by``), most of those can be skipped too. Jobs that ask for the same sizes on the same GPU models
are alike: with room for r GPUs and gangs of at least g, no more than ``floor(r / g)`` of them can start. The next one
may still block others if the policy does not backfill. So the first ``floor(r / g) + 1`` of each kind decide the round.
A policy that keeps its own queue (``PolicyEntry.keeps_queue``) gets only the jobs that are new in it; for one that
ranks ahead see ``standing``. ``tests/simulator/test_waiting.py`` compares this with rounds that rank all jobs.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from services.core.cycle.policy import StandingOrder
from services.core.domain.arrays import Ints
from services.core.domain.ids import JobId
from services.simulator.engine.live import FloatRow, IntRow, LiveJobs
from services.simulator.engine.standing import Standing

Key = tuple[float | str, ...]
Kind = tuple[int | bytes, ...]

VERY_FEW = 4
"""Fewer jobs are ranked sooner than sifted."""
FEW = 64
"""More jobs than this are found sooner by their phase."""
COLUMNS = {"submitted_s": FloatRow.SUBMITTED, "remaining_s": FloatRow.REMAINING}


class Waiting:
    """The live jobs without devices, and those that are stopping."""

    def __init__(
        self,
        live: LiveJobs,
        waits_by: tuple[str, ...],
        *,
        policy_keeps: bool = False,
        standing: Standing | None = None,
    ) -> None:
        """Order the jobs by these columns of the job table; without any, in no order.

        Args:
            policy_keeps: Whether the policy keeps the queue itself.
            standing: The order of a policy that ranks ahead.
        """
        self._standing = standing
        self._live = live
        self._new: list[JobId] | None = [] if policy_keeps else None
        self._columns = [COLUMNS[name] for name in waits_by]
        self._key: dict[JobId, Key] = {}
        self._kinds: dict[Kind, list[Key]] = {}
        self._sizes: dict[int, int] = {}
        self._stopping: dict[JobId, None] = {}
        self._returned: list[JobId] = []

    def add(self, slot: int) -> None:
        """Add a job that waits from now on."""
        job_id = self._live.ids[slot]
        size = self._live.ints.item(IntRow.MIN, slot)
        self._sizes[size] = self._sizes.get(size, 0) + 1
        self._key[job_id] = ()
        if self._new is not None:
            self._new.append(job_id)
        if self._columns:
            self._stand(job_id, slot)
        if self._standing is not None:
            self._standing.add(job_id)

    def follow(self, order: StandingOrder) -> None:
        """Follow the order of a new active ranking."""
        if self._standing is not None:
            self._standing.follow(order, self._key)

    def remove(self, slot: int) -> None:
        """Remove a job that starts."""
        job_id = self._live.ids[slot]
        del self._key[job_id]
        if self._standing is not None:
            self._standing.remove(job_id)
        size = self._live.ints.item(IntRow.MIN, slot)
        self._sizes[size] -= 1
        if not self._sizes[size]:
            del self._sizes[size]

    def stops(self, slot: int) -> None:
        """Record a job that is stopping and will wait again."""
        self._stopping[self._live.ids[slot]] = None

    def comes_back(self, slot: int) -> None:
        """Add a job that has stopped; the part of its key that depends on progress is right after the next refresh."""
        job_id = self._live.ids[slot]
        del self._stopping[job_id]
        self._returned.append(job_id)
        self.add(slot)

    def refreshed(self) -> None:
        """Move the jobs that came back to the places their figures now give them."""
        if self._columns:
            for job_id in self._returned:
                if job_id in self._key:
                    self._stand(job_id, self._live.slot[job_id])
        self._returned.clear()

    def may_start(self, free_gpus: int) -> bool:
        """Return whether the smallest gang of any waiting job fits this many devices."""
        return bool(self._sizes) and free_gpus >= min(self._sizes)

    def newly(self) -> Ints | None:
        """Return the slots of the jobs that began to wait since the last call, for a policy that keeps its queue."""
        if self._new is None:
            return None
        slots = np.array([self._live.slot[job_id] for job_id in self._new], dtype=np.int64)
        self._new.clear()
        return slots

    def contenders(self, free_gpus: int) -> Ints | None:
        """Return the slots of the jobs that a round without stops has to rank; None: all of them."""
        slot = self._live.slot
        stopping = [slot[job_id] for job_id in self._stopping]
        if self._new is not None:
            found: list[int] = []
        elif self._columns:
            gpus = self._live.ints[IntRow.GPUS]
            room = free_gpus + sum(int(gpus[at]) for at in stopping)
            found = [slot[job_id] for kind, heap in self._kinds.items() for job_id in self._first(heap, kind, room)]
        elif self._standing is not None and len(self._key) > VERY_FEW:
            gpus = self._live.ints[IntRow.GPUS]
            room = free_gpus + sum(int(gpus[at]) for at in stopping)
            found = [slot[job_id] for job_id in self._standing.first(room, self._stopping, self._key)]
        elif len(self._key) <= FEW:
            found = [slot[job_id] for job_id in self._key]
        else:
            return None
        return np.array(found + stopping, dtype=np.int64)

    def _first(self, heap: list[Key], kind: Kind, room: int) -> list[JobId]:
        """Return the first jobs of a kind, as many as can matter with this much room."""
        most = room // int(kind[0]) + 1
        kept: list[Key] = []
        while heap and len(kept) < most:
            key = heapq.heappop(heap)
            if self._key.get(JobId(str(key[-1]))) is key:
                kept.append(key)
        for key in kept:
            heapq.heappush(heap, key)
        return [JobId(str(key[-1])) for key in kept]

    def _stand(self, job_id: JobId, slot: int) -> None:
        live = self._live
        floats = live.floats
        figures = (float(floats[column, slot]) for column in self._columns)
        key = (
            -int(live.ints[IntRow.PRIORITY, slot]),
            *(math.inf if each != each else each for each in figures),
            job_id,
        )
        kind: Kind = (*live.ints[IntRow.MIN : IntRow.STEP + 1, slot].tolist(), live.eligible[slot].tobytes())
        self._key[job_id] = key
        heapq.heappush(self._kinds.setdefault(kind, []), key)
