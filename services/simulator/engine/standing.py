"""Which waiting jobs a passive round starts under a policy whose passive rounds follow the last active ranking.

Such a policy (``cycle.policy.RanksAhead``) fills free GPUs in one fixed order until its next active round. To find what
it would start, that order is walked only as far as there is room: jobs skipped because they are too wide for the room
are kept by size, and none is looked at twice. So a round's cost does not grow with the queue.

This holds on a cluster with one GPU model that all jobs may use, without node failures and without user priorities;
``tests/simulator/test_waiting.py`` compares it with rounds that rank all jobs.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from services.core.cycle.policy import StandingOrder
from services.core.cycle.sizes import possible_size
from services.core.domain.ids import JobId
from services.simulator.engine.live import FloatRow, IntRow, LiveJobs

Key = tuple[int, float, float, str, int]
"""Queue, key, submission (UTC seconds) and id: what ``StandingOrder`` goes by; then the gang that the job waits for."""

FEW = 256
"""So many jobs are sorted at first: rarely are more of them walked past before the next active round."""


class Standing:
    """The waiting jobs in the order of the last active ranking, as far as that has been walked."""

    def __init__(self, live: LiveJobs, total_gpus: int, order: StandingOrder) -> None:
        self._live = live
        self._total_gpus = total_gpus
        self.follow(order, ())

    def follow(self, order: StandingOrder, waits: Iterable[JobId]) -> None:
        """Follow a new order from now on.

        Args:
            waits: All waiting jobs.
        """
        self._order = order
        self._walk = order.walk(FEW)
        self._found: Key | None = None
        self._by_size: dict[int, list[Key]] = {}
        self._keys: dict[JobId, Key] = {}
        if len(order.jobs) < self._live.count:
            for job_id in waits:
                if self._before(job_id) < 0:
                    self.add(job_id)

    def add(self, job_id: JobId) -> None:
        """Add a job that waits from now on."""
        key = self._key(job_id)
        if key is not None:
            self._keep(key)

    def remove(self, job_id: JobId) -> None:
        """Remove a job that starts."""
        self._keys.pop(job_id, None)

    def first(self, room: int, stopping: Iterable[JobId], waits: Collection[JobId]) -> list[JobId]:
        """Return the waiting jobs that get some of this room, best first.

        Args:
            room: Devices that are free or being released.
            stopping: The jobs that are stopping: each claims what it will hold when it comes back.
            waits: All waiting jobs.
        """
        claims = sorted(key for key in map(self._key, stopping) if key is not None)
        granted: list[Key] = []
        while room:
            heap = self._next_heap(room)
            best = heap[0] if heap else None
            if claims and (best is None or claims[0] < best):
                best, heap = claims[0], None
            if self._walk_on(best, waits):
                continue
            if best is None:
                break
            if heap is None:
                claims.pop(0)
            else:
                granted.append(heapq.heappop(heap))
            if best[4] <= room:
                room -= best[4]
        for key in granted:
            heapq.heappush(self._by_size[key[4]], key)
        return [JobId(key[3]) for key in granted]

    def _next_heap(self, room: int) -> list[Key] | None:
        """Return the heap, among those of sizes that fit, whose first job comes first."""
        found: list[Key] | None = None
        for size, heap in self._by_size.items():
            if size > room:
                continue
            while heap and self._keys.get(JobId(heap[0][3])) is not heap[0]:
                heapq.heappop(heap)
            if heap and (found is None or heap[0] < found[0]):
                found = heap
        return found

    def _walk_on(self, best: Key | None, waits: Collection[JobId]) -> bool:
        """Advance to the next waiting job that comes before ``best``, and keep it; return whether there is one."""
        found = self._found
        while found is None or found[3] not in waits or found[3] in self._keys:
            job = next(self._walk, None)
            if job is None:
                self._found = None
                return False
            job_id = self._order.jobs[job]
            found = self._key(job_id) if job_id in waits and job_id not in self._keys else None
        self._found = found
        if best is not None and best < found:
            return False
        self._keep(found)
        return True

    def _keep(self, key: Key) -> None:
        self._keys[JobId(key[3])] = key
        heapq.heappush(self._by_size.setdefault(key[4], []), key)

    def _before(self, job_id: JobId) -> int:
        return self._live.ints.item(IntRow.BEFORE, self._live.slot[job_id])

    def _key(self, job_id: JobId) -> Key | None:
        """Return a job's key; None if the ranking leaves it out."""
        live, order = self._live, self._order
        slot = live.slot[job_id]
        before, gpus = live.ints.item(IntRow.BEFORE, slot), live.ints.item(IntRow.MIN, slot)
        if order.left_out.item(before):
            return None
        wanted = order.gangs.item(before)
        if wanted > gpus:
            most, step = live.ints.item(IntRow.MAX, slot), live.ints.item(IntRow.STEP, slot)
            gpus = possible_size(wanted, gpus, most, step, self._total_gpus)
        submitted_s = live.floats.item(FloatRow.SUBMITTED, slot)
        return order.queue.item(before), order.key.item(before), submitted_s, job_id, gpus
