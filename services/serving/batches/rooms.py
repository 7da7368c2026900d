"""How many lines may be under way at a place: as many as interactive traffic leaves free, found by trying."""

FIRST, LEAST = 4.0, 1.0
FREE_SHARE = 0.5
"""Of a place's capacity, taken to be free until the first refusal says otherwise."""
USUAL_LINE_S = 10.0
NEW_SHARE = 0.1
LONGEST_PAUSE_S = 60.0


class Room:
    """What one place has free for the lines of a model: more after each answer, half after a refusal."""

    def __init__(self, capacity: int, line_s: float | None = None) -> None:
        self.capacity = capacity  #: Requests that its servers take at once
        self.in_flight = 0  #: Lines that are under way there
        self.line_s = line_s or USUAL_LINE_S  #: How long a line takes, seconds
        self._most = FIRST
        self._was_refused = False
        self._not_before_s = 0.0

    def free(self, now_s: float) -> int:
        """Return how many more lines may be sent now."""
        return 0 if now_s < self._not_before_s else max(0, int(min(self._most, self.capacity)) - self.in_flight)

    @property
    def lines_per_s(self) -> float:
        """How many lines the place is expected to answer in a second, if it is given as many as fit."""
        most = self._most if self._was_refused else max(self._most, FREE_SHARE * self.capacity)
        return min(most, self.capacity) / max(self.line_s, 1e-3)

    def answered(self, took_s: float) -> None:
        """Note an answer: one more line may be under way, as long as none was refused for each."""
        self._most = min(self._most + (1.0 / self._most if self._was_refused else 1.0), max(self.capacity, LEAST))
        self.line_s += NEW_SHARE * (took_s - self.line_s)

    def refused(self, now_s: float, retry_after_s: float) -> None:
        """Note a refusal; those of one moment count once."""
        if now_s >= self._not_before_s:
            self._was_refused = True
            self._most = max(LEAST, min(self._most, float(self.in_flight)) / 2)
            self._not_before_s = now_s + min(max(retry_after_s, 1.0), LONGEST_PAUSE_S)
