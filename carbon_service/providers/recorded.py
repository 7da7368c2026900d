"""Recordings of real grids, replayed: this provider needs neither a network nor a key."""

import csv
import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from carbon_service.providers.entry import ProviderEntry, ProviderSettings
from carbon_service.providers.protocol import DAY_S, Feed, ForecastIssue, Point, Series, instant_s
from carbon_service.replay import Replay
from services.core.domain.carbon import Signal

STEP_S = 3600.0
_DACF = "recorded 2021: DACF (Maji, Sitaraman, Shenoy, 2022), Apache-2.0"
_NESO = "recorded 2021: National Energy System Operator (NESO), CC BY 4.0"
ZONES = {
    "DE": ("Germany", _DACF),
    "GB": ("Great Britain", _NESO),
    "SE": ("Sweden", _DACF),
    "US-CAL-CISO": ("California (CAISO)", _DACF),
    "US-MIDA-PJM": ("Mid-Atlantic (PJM)", _DACF),
}


@dataclass(frozen=True)
class Recording:
    """The intensities of one grid."""

    times_s: NDArray[np.float64]
    """(n,) when each interval began, UTC seconds; it lasted until the next, the last one for an hour."""
    measured: NDArray[np.float64]  #: (n,) gCO2/kWh
    forecast: NDArray[np.float64] | None  #: (n,) the day-ahead forecast, gCO2/kWh; ``None`` if there was none

    @property
    def length_s(self) -> float:
        """The length of the recording in whole days, so that a replay that starts over keeps the hour of the day."""
        return float(self.times_s[-1] - self.times_s[0]) + STEP_S

    def within(self, start_s: float, end_s: float) -> Iterator[tuple[float, float, int]]:
        """Yield start, end and row of the intervals that begin in ``[start_s, end_s)`` of the endless repetition."""
        first_s = float(self.times_s[0])
        lap = int((start_s - first_s) // self.length_s)
        while (offset_s := lap * self.length_s) + first_s < end_s:
            low, high = np.searchsorted(self.times_s, (start_s - offset_s, end_s - offset_s))
            ends = np.append(self.times_s[1:], first_s + self.length_s)
            for row in range(int(low), int(high)):
                yield float(self.times_s[row]) + offset_s, float(ends[row]) + offset_s, row
            lap += 1

    def wrapped_s(self, grid_s: float) -> float:
        """Return the recorded instant that corresponds to an instant of the endless repetition."""
        first_s = float(self.times_s[0])
        return first_s + (grid_s - first_s) % self.length_s


@cache
def load(zone: str) -> Recording:
    """Return the bundled recording of ``zone``; ``KeyError`` if there is none."""
    if zone not in ZONES:
        raise KeyError(zone)
    packed = resources.files("carbon_service.recordings").joinpath(f"{zone}.csv.gz").read_bytes()
    rows = list(csv.DictReader(gzip.decompress(packed).decode().splitlines()))
    forecasts = [row["forecast"] for row in rows]
    return Recording(
        times_s=np.array([instant_s(row["time"]) for row in rows], dtype=np.float64),
        measured=np.array([row["intensity"] for row in rows], dtype=np.float64),
        forecast=np.array(forecasts, dtype=np.float64) if all(forecasts) else None,
    )


class Recorded:
    """Average direct intensity of the bundled zones, published at the replay's speed.

    A day's forecast is published as that day of the grid begins (00:00 UTC), never before: nothing is known early.
    """

    name = "recorded"
    signals = (Signal.AVERAGE_DIRECT,)

    def __init__(self, replay: Replay, now_s: Callable[[], float]) -> None:
        self._replay, self._now_s = replay, now_s

    def feed(self, zone: str) -> Feed | None:
        """Return the feed of the recording of ``zone``; all lengths are at the replay's speed."""
        if zone not in ZONES:
            return None
        name, attribution = ZONES[zone]
        speed = self._replay.speed
        step_s = STEP_S / speed
        poll_interval_s = min(max(step_s / 2, 5.0), 300.0)
        return Feed(
            zone_name=name,
            attribution=attribution,
            step_s=step_s,
            max_age_s=2 * step_s,
            poll_interval_s=poll_interval_s,
            history_s=float("inf"),
            ahead_s=2 * poll_interval_s + step_s,
            time_scale=speed,
            forecast_interval_s=None if load(zone).forecast is None else poll_interval_s,
            forecast_max_age_s=DAY_S / speed,
        )

    def grid_s(self, zone: str, time_s: float) -> float:
        """Return the recorded instant that is replayed at ``time_s``."""
        return load(zone).wrapped_s(self._replay.grid_at(time_s))

    async def latest(self, zone: str, signal: Signal) -> Series:
        """Return the interval being replayed now."""
        recording, now_s = load(zone), self._now_s()
        grid_s = self._replay.grid_at(now_s)
        past = self._points(recording.measured, recording, grid_s - 2 * STEP_S, grid_s)
        return Series(tuple(point for point in past if point.start_s <= now_s < point.end_s)[-1:])

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        """Return the intervals of the range, in real time."""
        recording, replay = load(zone), self._replay
        # A margin of a microsecond of real time: instants are rounded to it.
        slack_s = 1e-6 * replay.speed
        first_s, last_s = replay.grid_at(start_s) - slack_s, replay.grid_at(end_s) + slack_s
        found = self._points(recording.measured, recording, first_s, last_s)
        return Series(tuple(point for point in found if start_s <= point.start_s < end_s))

    async def forecast(self, zone: str, signal: Signal, horizon_s: float) -> tuple[ForecastIssue, ...]:
        """Return today's forecast, and those of the days that begin within ``ahead_s``; days are the grid's."""
        recording, feed, now_s = load(zone), self.feed(zone), self._now_s()
        if recording.forecast is None or feed is None:
            return ()
        day_s = self._replay.grid_at(now_s) // DAY_S * DAY_S
        issues: list[ForecastIssue] = []
        while self._replay.real_at(day_s) <= now_s + feed.ahead_s:
            points = self._points(recording.forecast, recording, day_s, day_s + DAY_S)
            issues.append(ForecastIssue(self._replay.real_at(day_s), tuple(points)))
            day_s += DAY_S
        return tuple(issues)

    def _points(
        self, values: NDArray[np.float64], recording: Recording, start_s: float, end_s: float
    ) -> Iterator[Point]:
        for begins_s, ends_s, row in recording.within(start_s, end_s):
            yield Point(self._replay.real_at(begins_s), self._replay.real_at(ends_s), float(values[row]))


ENTRY = ProviderEntry("recorded", ProviderSettings, lambda _, context: Recorded(context.replay, context.now_s))
