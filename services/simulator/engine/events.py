"""Future events, ordered by ``(time_s, kind, sequence)``."""

import heapq
import math

RELEASE, COMPLETE, RECOVER, FAIL, POWER_DOWN, WAKE, STEP, STAGE, SAVE = range(9)

Event = tuple[float, int, int, int, int]
"""Time (UTC seconds), kind, a number that orders equals, the subject, and its generation."""


class Events:
    """The queue of future events."""

    def __init__(self) -> None:
        self._heap: list[Event] = []
        self._sequence = 0

    @property
    def next_s(self) -> float:
        """The time of the next event; inf if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def push(self, time_s: float, kind: int, subject: int, generation: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, kind, self._sequence, subject, generation))

    def pop(self, now_s: float) -> Event | None:
        """Return the next event if it is due by ``now_s``."""
        return heapq.heappop(self._heap) if self._heap and self._heap[0][0] <= now_s else None
