"""Array tasks and dependent jobs: when each of them becomes visible to the policy.

Live, ``services.core.cycle.gates.withheld`` decides this anew in every round. Here it is updated incrementally: a job
is shown when what it waits for has ended, and a task of an array with a limit when one of the tasks shown has ended. A
task that has been shown stays visible while preempted, because it keeps its turn; the tasks of an array are submitted
together, so no task with a lower index arrives later. ``tests/simulator/test_gates.py`` compares the two.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from services.core.domain.errors import DomainError
from services.simulator.workload import Workload


class Turns:
    """Which jobs of a workload may be shown; rows are those of the workload."""

    def __init__(self, workload: Workload, runnable: Sequence[int]) -> None:
        """Prepare for the jobs in rows ``runnable``; other jobs are not waited for.

        Raises:
            DomainError: Jobs wait for each other in a circle.
        """
        gates = workload.gates
        self._array: Sequence[str] = () if gates is None else gates.array
        self._room = {} if gates is None else dict(gates.max_running)
        self._queues: dict[str, list[int]] = defaultdict(list)
        self._waits_for: dict[int, set[int]] = {}
        self._waited_for: dict[int, list[int]] = defaultdict(list)
        self._arrived: set[int] = set()
        if gates is not None and any(gates.after):
            self._read(workload, gates.after, runnable)
            self._check(len(workload))

    def _read(self, workload: Workload, after: Sequence[Sequence[str]], runnable: Sequence[int]) -> None:
        named: dict[str, list[int]] = defaultdict(list)
        for row in runnable:
            named[workload.ids[row]].append(row)
            if self._array[row]:
                named[self._array[row]].append(row)
        for row in runnable:
            needed = {each for name in after[row] for each in named.get(name, ())}
            if needed:
                self._waits_for[row] = needed
                for each in needed:
                    self._waited_for[each].append(row)

    def _check(self, jobs: int) -> None:
        left = {row: len(needed) for row, needed in self._waits_for.items()}
        done = [row for row in range(jobs) if row not in left]
        while done:
            for row in self._waited_for.get(done.pop(), ()):
                left[row] -= 1
                if not left[row]:
                    del left[row]
                    done.append(row)
        if left:
            raise DomainError(f"{len(left)} jobs of the workload wait for each other in a circle")

    def arrives(self, row: int) -> list[int]:
        """Record that a job is submitted; return the rows to show now: this one, or none."""
        if row in self._waits_for:
            self._arrived.add(row)
            return []
        return self._shown(row)

    def ended(self, row: int) -> list[int]:
        """Record that a job has ended; return the rows to show now."""
        shown: list[int] = []
        for dependent in self._waited_for.pop(row, ()):
            needed = self._waits_for[dependent]
            needed.discard(row)
            if not needed:
                del self._waits_for[dependent]
                if dependent in self._arrived:
                    shown += self._shown(dependent)
        if self._array and (array := self._array[row]) in self._room:
            self._room[array] += 1
            if queue := self._queues[array]:
                shown += self._shown(heapq.heappop(queue))
        return shown

    def _shown(self, row: int) -> list[int]:
        array = self._array[row] if self._array else ""
        if array in self._room:
            if self._room[array] <= 0:
                heapq.heappush(self._queues[array], row)
                return []
            self._room[array] -= 1
        return [row]
