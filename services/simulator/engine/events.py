"""What will happen, in order of ``(time_s, kind, sequence)``."""

from __future__ import annotations

import heapq
import math

RELEASE, COMPLETE, RECOVER, FAIL, POWER_DOWN, WAKE, STEP, STAGE = range(8)

Event = tuple[float, int, int, int, int]
"""When (UTC seconds), what, a number that orders equals, whom it is about, and which generation of it."""


class Events:
    """The queue of what will happen."""

    def __init__(self) -> None:
        self._heap: list[Event] = []
        self._sequence = 0

    @property
    def next_s(self) -> float:
        """When the next one happens; inf for never."""
        return self._heap[0][0] if self._heap else math.inf

    def push(self, time_s: float, kind: int, subject: int, generation: int = 0) -> None:
        """Let something happen."""
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, kind, self._sequence, subject, generation))

    def pop(self, now_s: float) -> Event | None:
        """Return what happens next, if that is not after ``now_s``."""
        return heapq.heappop(self._heap) if self._heap and self._heap[0][0] <= now_s else None
