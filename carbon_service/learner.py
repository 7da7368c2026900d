"""Learns to forecast each source from its own stored history, and stores the forecast and its backtest.

A source is learned again with every hour of its grid, but not more often than ``LEAST_INTERVAL_S``, so that its model
is never older than its data; a replay whose days pass faster than that uses persistence. Of several replicas, the one
that holds the lock learns, and the others read its forecast from the store. A crash loses at most the forecast in
progress; the previous one stays in use until the next.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise

import numpy as np

from carbon_service.curve import Kind, Step
from carbon_service.providers.protocol import DAY_S, Feed, Point
from carbon_service.replay import Replay
from carbon_service.repository import LearnedForecast, Repository
from carbon_service.zones import Source
from services.core.domain.arrays import Floats
from services.core.domain.carbon import Signal
from services.core.domain.errors import DomainError
from services.kit.apart import Apart
from services.kit.logging import Log
from services.kit.repeating import repeat
from services.learning.carbon import HORIZON_H, Backtest, forecast
from services.learning.carbon_blend import learn, steps_of
from services.learning.carbon_history import history_of, within_hours

log = Log(__name__)

GRID_HOUR_S = 3600.0
LEAST_INTERVAL_S = 30.0
"""Shortest time between two forecasts of a source, real seconds: a fast replay has an hour every few seconds."""
LONGEST_INTERVAL_S = 3600.0
LOOK_INTERVAL_S = 5.0
"""How often to look for sources that are due: the first history arrives soon after the start."""
MOST_POINTS = 110_000  #: A year of five-minute values, twelve of hourly ones


class Learner:
    """Learns sources one after another. ``turn`` learns those that are due; ``run`` repeats it until cancelled."""

    def __init__(self, repository: Repository, sources: Sequence[Source], now_s: Callable[[], float]) -> None:
        self._repository, self._sources, self._now_s = repository, sources, now_s

    async def run(self) -> None:
        """Learn until cancelled; errors are logged, and the last forecast stays in use until the next."""
        await repeat(self.turn, LOOK_INTERVAL_S, failed="forecast.turn_failed", traceback=True)

    async def turn(self) -> int:
        """Learn every source whose forecast is older than its interval; return how many were learned.

        The result is 0 while another replica learns.
        """
        learned = 0
        async with self._repository.learning() as is_ours, Apart() as apart:
            for source in self._sources if is_ours else ():
                if source.feed.day_s < LEAST_INTERVAL_S:
                    continue
                known = await self._repository.learned(source.key, self._now_s())
                if known is None or self._now_s() - known.generated_s >= interval_s(source.feed):
                    try:
                        learned += await self._learn(source, apart)
                    except Exception:  # what is wrong with one source takes no forecast from the others
                        log.exception("forecast.not_learned", zone=source.key.zone, signal=source.key.signal)
        return learned

    async def _learn(self, source: Source, apart: Apart) -> bool:
        now_s, feed, key = self._now_s(), source.feed, source.key
        expected = await self._repository.expected(key)
        found = await self._repository.points(key, 0.0, now_s + 1e-6, limit=MOST_POINTS, begins_by_s=now_s, newest=True)
        clock = Replay(now_s, source.provider.grid_s(key.zone, now_s), feed.time_scale)
        try:
            made = await apart.call(predicted, found, feed, clock, key.signal, expected)
        except DomainError as error:
            log.info("forecast.not_learned", zone=key.zone, signal=key.signal, reason=str(error))
            return False
        await self._repository.save_learned(key, made)
        return True


def interval_s(feed: Feed) -> float:
    """Return the time from one forecast of a source to the next, in real seconds."""
    return min(max(GRID_HOUR_S / feed.time_scale, LEAST_INTERVAL_S), LONGEST_INTERVAL_S)


def predicted(
    points: Sequence[Point],
    feed: Feed,
    clock: Replay,
    signal: Signal,
    expected: Mapping[float, Mapping[str, float]] = {},
) -> LearnedForecast:
    """Return the learned forecast of a source, in steps of its own length where that is shorter than an hour.

    The pretrained model has learned from averages: of a marginal signal it is believed only after a backtest.

    Args:
        clock: The grid's clock against the real one at the present instant, also of a grid that is live.
        expected: What wind and sun were expected to generate the day before, by the beginnings of hours.

    Raises:
        DomainError: Nothing is known, or nothing of the last week.
    """
    # Values that were published at another speed of a replay do not lie where this clock would put them.
    usual = [point for point in points if abs(point.end_s - point.start_s - feed.step_s) <= 0.01 * feed.step_s]
    if not usual:
        raise DomainError("nothing is known")
    times_s = np.array([_grid_s(clock, point.start_s) for point in usual], dtype=np.float64)
    values = np.array([point.gco2_per_kwh for point in usual], dtype=np.float64)
    step_s = float(round(feed.step_s * feed.time_scale))
    times_s, first = np.unique(times_s, return_index=True)
    values = values[first]
    made = forecast(
        history_of(times_s, values, times_s[-1] + step_s, step_s=step_s, expected=_columns(expected, clock))
    )
    method, backtest = made.method, None if made.backtest is None else asdict(made.backtest)
    if signal is Signal.MARGINAL and method == "pretrained" and made.backtest is None:
        method = "persistence"
    if method != "ridge" and step_s < GRID_HOUR_S:
        try:
            return _blended(times_s, values, step_s, clock, made.note, made.backtest)
        except DomainError as error:
            log.info("forecast.not_blended", reason=str(error))
    ahead: list[Step] = []
    if method != "persistence":
        shape = within_hours(times_s, values, made.start_s, step_s)
        length_s = GRID_HOUR_S / shape.shape[1]
        for hour, value in enumerate(made.values):
            begins_s = made.start_s + GRID_HOUR_S * hour
            p10, p90 = (None if each is None else float(each[hour]) for each in (made.p10, made.p90))
            for at, change in enumerate(shape[int(begins_s % DAY_S // GRID_HOUR_S)]):
                start_s, end_s = (clock.real_at(float(begins_s + length_s * step)) for step in (at, at + 1))
                low, high = (None if each is None else each + float(change) for each in (p10, p90))
                ahead.append(Step(start_s, end_s, float(value + change), Kind.LEARNED, True, low, high))
    return LearnedForecast(clock.real_s, method, made.note, tuple(ahead), backtest)


def _grid_s(clock: Replay, real_s: float) -> float:
    """Return the grid's time at a real time, to the second, because replayed instants are rounded."""
    return float(round(clock.grid_at(real_s)))


def _columns(expected: Mapping[float, Mapping[str, float]], clock: Replay) -> tuple[Floats, Floats] | None:
    """Return when each hour begins on the grid's clock, (hours,), and the MW of each source in it, (hours, sources)."""
    if not expected:
        return None
    sources = sorted({source for mix in expected.values() for source in mix})
    columns = [[mix.get(source, np.nan) for source in sources] for mix in expected.values()]
    return np.array([_grid_s(clock, hour_s) for hour_s in expected]), np.array(columns, dtype=np.float64)


def _blended(
    times_s: Floats, values: Floats, step_s: float, clock: Replay, note: str, rivals: Backtest | None
) -> LearnedForecast:
    """Return the forecast of a source with short steps whose history is too short to learn the other methods.

    Raises:
        DomainError: It is too short for this one too, or persistence or a rival of ``rivals`` was better.
    """
    series = steps_of(times_s, values, step_s)
    hour, end_s = round(GRID_HOUR_S / step_s), float(times_s[-1]) + step_s
    blend = learn(series, HORIZON_H, hour)
    if not blend.is_better:
        raise DomainError("persistence had the smaller error in the backtest")
    if rivals is not None and np.mean(rivals.mae["pretrained"]) < blend.mae["blend"].mean():
        raise DomainError("the pretrained model had the smaller error in the backtest")
    made = [map(float, figures) for figures in zip(*blend.at(series, round(DAY_S / step_s)), strict=True)]
    edges_s = [clock.real_at(end_s + at * step_s) for at in range(len(made) + 1)]
    ahead = [
        Step(*span, value, Kind.LEARNED, True, p10, p90)
        for span, (value, p10, p90) in zip(pairwise(edges_s), made, strict=True)
    ]
    began_s = end_s - len(series) * step_s
    backtest = {
        "first_s": began_s + step_s * float(blend.origins[0]),
        "last_s": began_s + step_s * float(blend.origins[-1]),
        "forecasts": len(blend.origins),
        "mae": {method: each.reshape(-1, 24 * hour).mean(axis=1).tolist() for method, each in blend.mae.items()},
        "coverage": blend.coverage,
        "greenest_regret": blend.greenest_regret,
    }
    return LearnedForecast(clock.real_s, "blend", note, tuple(ahead), backtest)
