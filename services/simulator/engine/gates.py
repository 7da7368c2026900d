"""Array tasks and dependent jobs: when each of them becomes visible to the policy.

Live, ``services.core.cycle.gates.withheld`` decides this anew in every round. Here it is updated incrementally: a job
is shown when what it waits for has ended, and a task of an array with a limit when one of the tasks shown has ended. A
task that has been shown stays visible while preempted, because it keeps its turn; the tasks of an array are submitted
together, so no task with a lower index arrives later. ``tests/simulator/test_gates.py`` compares the two.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence

from services.core.domain.errors import DomainError
from services.simulator.workload import Workload


class Turns:
    """Which jobs of a workload may be shown; rows are those of the workload."""

    def __init__(self, workload: Workload, runnable: Sequence[int]) -> None:
        """Prepare for jobs in rows ``runnable``, waiting for no others; ``DomainError`` if they wait in a circle."""
        gates = workload.gates
        assert gates is not None
        self._ids, self._array, self._room = workload.ids, gates.array, dict(gates.max_running)
        self._queues: dict[str, list[int]] = defaultdict(list)
        self._arrived: set[int] = set()
        self._open = Counter(name for row in runnable for name in self._names(row))  # jobs that have not ended, by name
        self._waits: dict[int, int] = {}  # for how many names each job still waits
        self._dependents: dict[str, list[int]] = defaultdict(list)
        for row in runnable:
            if needed := [name for name in dict.fromkeys(gates.after[row]) if name in self._open]:
                self._waits[row] = len(needed)
                for name in needed:
                    self._dependents[name].append(row)
        self._check(runnable)

    def _names(self, row: int) -> tuple[str, ...]:
        """Return what others may wait for: a job, and its array."""
        array = self._array[row]
        return (self._ids[row], array) if array else (self._ids[row],)

    def _check(self, runnable: Sequence[int]) -> None:
        is_open, waits = self._open.copy(), self._waits.copy()
        done = [row for row in runnable if row not in waits]
        while done:
            done += self._freed(done.pop(), is_open, waits)
        if waits:
            raise DomainError(f"{len(waits)} jobs of the workload wait for each other in a circle")

    def _freed(self, row: int, is_open: Counter[str], waits: dict[int, int]) -> list[int]:
        """Count a job as ended; return the jobs that now wait for nothing."""
        freed: list[int] = []
        for name in self._names(row):
            is_open[name] -= 1
            for each in self._dependents.get(name, ()) if not is_open[name] else ():
                waits[each] -= 1
                if not waits[each]:
                    del waits[each]
                    freed.append(each)
        return sorted(freed)

    def arrives(self, row: int) -> list[int]:
        """Record that a job is submitted; return the rows to show now: this one, or none."""
        if row in self._waits:
            self._arrived.add(row)
            return []
        return self._shown(row)

    def ended(self, row: int) -> list[int]:
        """Record that a job has ended; return the rows to show now."""
        freed = self._freed(row, self._open, self._waits)
        shown = [each for dependent in freed if dependent in self._arrived for each in self._shown(dependent)]
        if (array := self._array[row]) in self._room:
            self._room[array] += 1
            if queue := self._queues[array]:
                shown += self._shown(heapq.heappop(queue))
        return shown

    def _shown(self, row: int) -> list[int]:
        if (array := self._array[row]) in self._room:
            if self._room[array] <= 0:
                heapq.heappush(self._queues[array], row)
                return []
            self._room[array] -= 1
        return [row]
