"""How a replay's grid clock runs against the real one."""

from dataclasses import dataclass
from datetime import UTC, datetime

RECORDED_YEAR = 2021
DEFAULT_START = datetime(2021, 8, 1, tzinfo=UTC)
LAST_S = datetime(9000, 1, 1, tzinfo=UTC).timestamp()


@dataclass(frozen=True)
class Replay:
    """At the real instant ``real_s`` the grid's clock shows ``grid_s``; it runs at ``speed`` grid seconds per second.

    The grid's clock never jumps: a recording that ends starts over, which is up to the recording itself.
    """

    real_s: float
    grid_s: float
    speed: float
    requested_start_s: float | None = None
    """The start that was requested when this replay began; ``None`` for the default."""

    def grid_at(self, real_s: float) -> float:
        """Return what the grid's clock shows at a real instant."""
        return self.grid_s + (real_s - self.real_s) * self.speed

    def real_at(self, grid_s: float) -> float:
        """Return the real instant at which the grid's clock shows ``grid_s``, to the microsecond Postgres keeps."""
        return round(self.real_s + (grid_s - self.grid_s) / self.speed, 6)


def next_replay(known: Replay | None, speed: float, requested_start_s: float | None, now_s: float) -> Replay:
    """Return the replay to continue with.

    It is the known one if it matches the settings. If only the speed differs, the grid's clock continues from its
    present time. Otherwise the replay starts again: at the requested start; by default in the present season and at the
    present hour at speed 1, and at ``DEFAULT_START`` at other speeds.
    """
    if known and known.requested_start_s == requested_start_s:
        if known.speed == speed:
            return known
        reached_s = known.grid_at(now_s)
        if (requested_start_s is not None or speed != 1) and reached_s < LAST_S:
            return Replay(now_s, reached_s, speed, requested_start_s)
    if requested_start_s is not None:
        start_s = requested_start_s
    elif speed == 1:
        start_s = _same_season(now_s)
    else:
        start_s = DEFAULT_START.timestamp()
    return Replay(now_s, start_s, speed, requested_start_s)


def _same_season(now_s: float) -> float:
    now = datetime.fromtimestamp(now_s, UTC)
    leap_day = (now.month, now.day) == (2, 29)
    return now.replace(year=RECORDED_YEAR, day=28 if leap_day else now.day).timestamp()
