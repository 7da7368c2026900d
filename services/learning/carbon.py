"""Carbon intensity up to days ahead, learned from a grid's own past.

One ridge regression predicts all hours ahead at once from what was known at the forecast time: the last two weeks of
intensity, as differences from the last week's mean, the shares of carbon-free and renewable energy and the day-ahead
forecasts of wind and sun if given, the weekday and the season. What wind and sun change in general is told first, by
one slope a source (``services.learning.carbon_weather``). It learns from moments at the forecast's own hour of day and
the hours next to it, so that no hour of the day needs its own term, and it predicts how the grid departs from what the
pretrained model (``services.learning.carbon_start``) says. Its penalty counts in moments, so that a short history
departs little from that and a long one as it must. Moments with gaps around them get less weight. Internally,
intensities are square roots, unless some are negative (marginal signals): errors grow with the level.

Its penalty, and whether it is used at all, are decided by a backtest on the last fifth of the history, learned from
what came before. The baseline to beat is persistence, which repeats the last 24 hours. If the history is too short for
that, the pretrained model is used alone, unless persistence was better; with less than a day, persistence.

The quantiles are of errors at held-out moments of the whole history (cross-conformal), so that they cover every season
in it, and in units of the grid's recent variability, so that they widen when the grid becomes more variable.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError
from services.learning.carbon_history import DAY_H, HOUR_S, History
from services.learning.carbon_intervals import QUANTILES, Intervals, MeasuredGrid, inside, outside
from services.learning.carbon_start import quantiles, started
from services.learning.carbon_weather import from_day_to_day, slopes, unusual
from services.learning.one_thread import one_thread

Method = Literal["ridge", "pretrained", "persistence"]

HORIZON_H, LONGEST_H = 96, 168
LAG_DAYS = 14
OFFSETS_H = (-1, 0, 1)  #: Moments to learn from lie so far from the forecast's hour of day
PENALTIES = (4.0, 20.0, 100.0, 500.0, 2500.0)  #: Of the ridge: how many moments of the mean size weigh as much
CONSTANT = 3.0  #: Weight of the constant among the features, which is penalised like them
LEAST_TRAINING_DAYS, LEAST_BACKTEST_DAYS = 14, 7
BACKTEST_SHARE, MOST_BACKTEST_DAYS = 0.2, 180
LEAST_KNOWN = 0.5  #: Of the hours around a moment that is learned from; the others are filled
FOLDS = 5  #: Parts of the history that are held out in turn to learn the quantiles


@dataclass(frozen=True)
class Backtest:
    """How forecasts would have performed over the last part of a history, learned from what came before."""

    first_s: float  #: The first forecast time
    last_s: float  #: The last one
    forecasts: int  #: How many
    mae: dict[Method, tuple[float, ...]]  #: Mean absolute error by method and day ahead, gCO2/kWh
    coverage: float
    """Share of the hours that lay between the quantiles of the method in use, learned from what came before; if that is
    too short, learned from the first half of the backtest and evaluated on the second."""
    greenest_regret: float
    """Excess emissions of the six hours of the next day that the method in use predicted as greenest over the six that
    were greenest, as a share."""


@dataclass(frozen=True)
class Forecast:
    """Intensities ahead, hour by hour from ``start_s``."""

    start_s: float  #: The forecast time
    values: Floats  #: (hours,) gCO2/kWh
    p10: Floats | None  #: (hours,) quantiles from the errors of the backtest; None if too little is known
    p90: Floats | None
    method: Method  #: What made it
    backtest: Backtest | None  #: None if the history is too short for one
    note: str = ""  #: Why the learned method was not used, if so


def persistence(history: History, origins: Ints, horizon_h: int) -> Floats:
    """Return the 24 hours before each origin, repeated: (origins, hours); with less than a day known, the last value.

    Origins are hours since the beginning of the history.
    """
    back = origins[:, None] - DAY_H + np.arange(horizon_h) % DAY_H
    return history.values[np.where(back >= 0, back, origins[:, None] - 1)]


def forecast(history: History, horizon_h: int = HORIZON_H) -> Forecast:
    """Return intensities from the end of a history on, by the method that performed better in its own backtest.

    Raises:
        DomainError: The horizon is out of bounds.
    """
    if not 1 <= horizon_h <= LONGEST_H:
        raise DomainError(f"forecasts reach 1 to {LONGEST_H} h ahead, not {horizon_h}")
    silent_h = len(history.values) - history.known_until
    made = _from_last_known(history.until(history.known_until), horizon_h + silent_h)
    if not silent_h:
        return made
    low, high = (None if each is None else each[silent_h:] for each in (made.p10, made.p90))
    notes = [f"the last {silent_h} h are not known, so that it begins before them", *([made.note] if made.note else [])]
    return replace(made, start_s=history.end_s, values=made.values[silent_h:], p10=low, p90=high, note="; ".join(notes))


def _from_last_known(history: History, horizon_h: int) -> Forecast:
    """Return the forecast from the end of a history whose last hour is known."""
    now = np.array([len(history.values)])
    tuned = tune(history, horizon_h)
    if tuned is None:
        return _from_few_days(history, horizon_h)
    values = tuned.at(history, training_days(history, horizon_h), now)
    low, high = tuned.quantiles(history, now, values)
    note = "" if tuned.method == "ridge" else "it had the smaller error in the backtest"
    return Forecast(history.end_s, values[0], low[0], high[0], tuned.method, tuned.backtest, note)


def _from_few_days(history: History, horizon_h: int) -> Forecast:
    """Return the forecast from a history too short to learn from: the pretrained one, unless persistence was better.

    The backtest is of the moments, a day apart, that had a day before them; nothing is decided on less than a week.
    """
    hours, note = len(history.values), _too_little(history, horizon_h)
    grid = MeasuredGrid(history.values, history.known, _is_root(history))
    moments = np.arange(hours % DAY_H + DAY_H, hours + 1, DAY_H)
    inner = replace(history, values=inside(grid.values, grid.root))
    made = started(inner.values, inner.start_s, moments, horizon_h)
    made = outside(from_day_to_day(inner, moments, made), grid.root)
    late, backtest = moments[moments + horizon_h <= hours], None
    if len(late) >= LEAST_BACKTEST_DAYS:
        likely, low, high = made[:, : len(late)]
        truth, plain = grid.ahead(late, horizon_h), persistence(history, late, horizon_h)
        compared: dict[Method, Floats] = {"persistence": plain, "pretrained": likely}
        backtest = _backtest(history, late, compared, truth, likely, share_between(truth, low, high))
    if len(moments) and (
        backtest is None or np.mean(backtest.mae["pretrained"]) < np.mean(backtest.mae["persistence"])
    ):
        likely, low, high = made[:, -1]
        return Forecast(history.end_s, likely, low, high, "pretrained", backtest, note)
    plain = persistence(history, np.array([hours]), horizon_h)[0]
    return Forecast(history.end_s, plain, *_day_to_day(history, plain), "persistence", backtest, note)


def _too_little(history: History, horizon_h: int) -> str:
    """Return why there is too little to learn from: the history is too short, or has too many gaps."""
    least = LAG_DAYS + LEAST_TRAINING_DAYS + LEAST_BACKTEST_DAYS + 2 * (-(-horizon_h // DAY_H))
    given = len(history.values) / DAY_H
    if given < least:
        return f"about {least} days of history are needed to learn from, and {given:.0f} are given"
    missing = 1.0 - float(history.known.mean())
    return f"too few days are left to learn from, as {100 * missing:.0f} % of the hours are missing or cannot be true"


@dataclass(frozen=True)
class Tuned:
    """The choices made by a backtest."""

    penalties: tuple[float, ...] | None  #: Of the ridge regression, by day ahead; None for persistence
    horizon_h: int  #: How far ahead it predicts, hours
    root: bool  #: Whether intensities are square roots internally
    intervals: Intervals  #: How far off the forecasts may be
    backtest: Backtest  #: The backtest behind the choices

    @property
    def method(self) -> Method:
        """The method of the forecast."""
        return "persistence" if self.penalties is None else "ridge"

    def at(self, history: History, days: Ints, now: Ints) -> Floats:
        """Return the predictions made at the moments ``now``, learned from those in ``days``: (now, hours)."""
        if self.penalties is None:
            return persistence(history, now, self.horizon_h)
        return _by_day(ridge(history, days, now, self.horizon_h, tuple(set(self.penalties))), self.penalties)

    def quantiles(self, history: History, now: Ints, values: Floats) -> tuple[Floats, Floats]:
        """Return p10 and p90 of the (now, hours) predictions made at the moments ``now``, gCO2/kWh."""
        return self.intervals.at(MeasuredGrid(history.values, history.known, self.root), now, values)


def tune(history: History, horizon_h: int = HORIZON_H) -> Tuned | None:
    """Return the choices made by a backtest on the last fifth of a history; None if the history is too short."""
    days = training_days(history, horizon_h)
    tested = min(MOST_BACKTEST_DAYS, max(LEAST_BACKTEST_DAYS, int(BACKTEST_SHARE * len(days))))
    late = days[-tested:]
    # What is learned from had ended when the first forecast of the backtest was made.
    early = days[days + horizon_h <= late[0]] if len(days) else days
    if len(early) < LEAST_TRAINING_DAYS:
        return None
    grid = MeasuredGrid(history.values, history.known, _is_root(history))
    truth = grid.ahead(late, horizon_h)
    plain = persistence(history, late, horizon_h)
    tried = ridge(history, early, late, horizon_h, PENALTIES)
    errors = {penalty: mean_errors(made, truth) for penalty, made in tried.items()}
    ahead = range(len(errors[PENALTIES[0]]))
    penalties = tuple(min(PENALTIES, key=lambda penalty: errors[penalty][day]) for day in ahead)
    learned = _by_day(tried, penalties)
    wins = np.nanmean(np.abs(learned - truth)) < np.nanmean(np.abs(plain - truth))
    made = learned if wins else plain
    used = penalties if wins else None
    recent, half = (late, made), len(late) // 2
    before = _held_out(history, early, horizon_h, used)
    calibration, judged = (before, recent) if before else ((late[:half], made[:half]), (late[half:], made[half:]))
    prior = None if used is None else quantiles(LAG_DAYS, horizon_h)
    low, high = Intervals.of(grid, *calibration, prior).at(grid, *judged)
    came = grid.ahead(judged[0], horizon_h)
    compared: dict[Method, Floats] = {"persistence": plain, "ridge": learned}
    backtest = _backtest(history, late, compared, truth, made, share_between(came, low, high))
    intervals = Intervals.of(grid, *(_held_out(history, days, horizon_h, used) or recent), prior)
    return Tuned(used, horizon_h, grid.root, intervals, backtest)


def _backtest(
    history: History, late: Ints, compared: dict[Method, Floats], truth: Floats, used: Floats, coverage: float
) -> Backtest:
    mae: dict[Method, tuple[float, ...]] = {each: mean_errors(made, truth) for each, made in compared.items()}
    first_s, last_s = (history.start_s + HOUR_S * float(late[at]) for at in (0, -1))
    regret = greenest_regret(used, history.values[late[:, None] + np.arange(truth.shape[1])])
    return Backtest(first_s, last_s, len(late), mae, coverage, regret)


def _held_out(
    history: History, days: Ints, horizon_h: int, penalties: tuple[float, ...] | None
) -> tuple[Ints, Floats] | None:
    """Return moments and the predictions made at them, learned from moments whose days ahead do not overlap theirs.

    The history is held out part by part. None if too few moments are left to learn from.
    """
    if penalties is None:
        return days, persistence(history, days, horizon_h)
    made: list[Floats] = []
    for part in np.array_split(days, FOLDS):
        others = days[(days + horizon_h < part[0]) | (days > part[-1] + horizon_h)] if len(part) else part
        if len(others) < LEAST_TRAINING_DAYS:
            return None
        made.append(_by_day(ridge(history, others, part, horizon_h, tuple(set(penalties))), penalties))
    return days, np.concatenate(made)


def _by_day(made: dict[float, Floats], penalties: tuple[float, ...]) -> Floats:
    """Return the forecasts, each day ahead with its own penalty: (forecasts, hours)."""
    days = [made[penalty][:, day * DAY_H : (day + 1) * DAY_H] for day, penalty in enumerate(penalties)]
    return np.concatenate(days, axis=1)


def mean_errors(made: Floats, truth: Floats) -> tuple[float, ...]:
    """Return the mean absolute error of each day ahead, gCO2/kWh; the last day may be partial.

    Args:
        made: (forecasts, hours).
        truth: The actual values, same shape; NaN where unknown.
    """
    errors = np.nanmean(np.abs(made - truth), axis=0)
    return tuple(float(errors[at : at + DAY_H].mean()) for at in range(0, len(errors), DAY_H))


def share_between(truth: Floats, low: Floats, high: Floats) -> float:
    """Return the share of the known values, (forecasts, hours), that lie between two others."""
    return float(((truth >= low) & (truth <= high))[np.isfinite(truth)].mean())


def greenest_regret(made: Floats, truth: Floats, hours: int = 6) -> float:
    """Return the excess emissions of the first day's predicted greenest hours over its actual greenest, as a share.

    Over all forecasts together: the sum of what the chosen hours emitted over the sum of the best, less 1.
    """
    made, truth = made[:, :DAY_H], truth[:, :DAY_H]
    chosen = np.argsort(made, axis=1, kind="stable")[:, :hours]
    best = float(np.sort(truth, axis=1)[:, :hours].sum())
    return float(np.take_along_axis(truth, chosen, axis=1).sum()) / best - 1.0 if best > 0 else 0.0


def training_days(history: History, horizon_h: int) -> Ints:
    """Return the moments that can be learned from, a day apart, at the hour of day at which the history ends."""
    end = len(history.values)
    latest = end - DAY_H * -(-horizon_h // DAY_H)  # at the same hour of day, and with all that is ahead of it known
    origins = np.arange(latest, LAG_DAYS * DAY_H + max(OFFSETS_H), -DAY_H)[::-1]
    before, after = _known_around(history, origins, horizon_h)
    return origins[(before >= LEAST_KNOWN) & (after >= LEAST_KNOWN)].astype(np.int64)


def _known_around(history: History, origins: Ints, horizon_h: int) -> tuple[Floats, Floats]:
    """Return which shares of the hours that features look at, and of those ahead, were measured: (origins,) each."""
    seen = np.concatenate(([0.0], np.cumsum(history.known)))
    before = (seen[origins] - seen[origins - LAG_DAYS * DAY_H]) / (LAG_DAYS * DAY_H)
    return before, (seen[origins + horizon_h] - seen[origins]) / horizon_h


def ridge(history: History, days: Ints, now: Ints, horizon_h: int, penalties: tuple[float, ...]) -> dict[float, Floats]:
    """Return, by penalty, the predictions at the moments ``now`` of a regression on ``days``: (now, hours) gCO2/kWh."""
    last = int(days[-1])
    # An hour later than the last day's moment would look an hour past the end of its targets.
    origins = np.unique(np.concatenate([days + offset for offset in OFFSETS_H]))
    origins = origins[origins <= last]
    root = _is_root(history.until(last + horizon_h))
    inner = replace(history, values=inside(history.values, root))
    seen, ahead = _features(inner, origins), _features(inner, now)
    centre, scale = zip(*(_scaling(name, seen[name]) for name in seen), strict=True)
    x, x_now = (_matrix(each, centre, scale) for each in (seen, ahead))
    first, first_now = (started(inner.values, inner.start_s, each, horizon_h)[0] for each in (origins, now))
    y = inner.values[origins[:, None] + np.arange(horizon_h)] - first
    before, after = _known_around(history, origins, horizon_h)
    weights = (before * after)[:, None]  # of each row, so that its square weighs in the errors
    with one_thread():
        if hours := min(history.expected_h, horizon_h):
            news, news_now = (unusual(history, each, hours) for each in (origins, now))
            per_mw = slopes(news, y[:, :hours], weights)
            y[:, :hours] -= news @ per_mw
            first_now[:, :hours] += news_now @ per_mw
        gram, moment = (weights * x).T @ (weights * x), (weights * x).T @ (weights * y)
        size = np.eye(len(gram)) * float((x * x).sum()) / len(x)
        made: dict[float, Floats] = {}
        for penalty in penalties:
            change = cast(Floats, np.linalg.solve(gram + penalty * size, moment))
            made[penalty] = outside(first_now + x_now @ change, root)
        return made


def _matrix(groups: dict[str, Floats], centre: Sequence[Floats], scale: Sequence[float]) -> Floats:
    """Return the groups of features side by side, centred and scaled, and the constant: (moments, features)."""
    columns = [(group - c) * s for group, c, s in zip(groups.values(), centre, scale, strict=True)]
    return np.hstack([*columns, np.full((len(groups["level"]), 1), CONSTANT)])


WEIGHTS = {
    "last 3 h": 5.0,
    "last day": 5.0,
    "against the week": 3.0,
    "day before": 2.0,
    "week ago": 2.0,
    "week's hours": 3.0,
    "fortnight's hours": 3.0,
    "days": 2.0,
    "level": 0.5,
    "weekday": 2.0,
    "season": 0.5,
    "shares, last day": 1.5,
    "shares, week's hours": 1.0,
    "wind and sun, next day": 3.0,
}
"""The weight of each group of features: the higher the weight, the lower the penalty on the group."""


def _features(history: History, origins: Ints) -> dict[str, Floats]:
    """Return groups of features of moments, each (moments, width).

    Measurements end before the moment. Forecasts of wind and sun reach as far after each moment as they do after the
    forecast time, which has the same hour of day.
    """
    fortnight = history.values[origins[:, None] - 1 - np.arange(LAG_DAYS * DAY_H)]  # the newest first
    level = fortnight[:, : 7 * DAY_H].mean(axis=1, keepdims=True)
    fortnight = fortnight - level
    by_day = fortnight.reshape(len(origins), LAG_DAYS, DAY_H)
    week = by_day[:, :7].mean(axis=1)
    at_s = history.start_s + HOUR_S * origins
    moments = at_s.astype("datetime64[s]")
    year = moments.astype("datetime64[Y]")
    angle = 2 * np.pi * (moments - year).astype(np.float64) / (366 * DAY_H * HOUR_S)
    groups = {
        "last 3 h": fortnight[:, :3],
        "last day": fortnight[:, :DAY_H],
        "against the week": fortnight[:, :DAY_H] - week,
        "day before": fortnight[:, DAY_H : 2 * DAY_H],
        "week ago": fortnight[:, 6 * DAY_H : 7 * DAY_H],
        "week's hours": week,
        "fortnight's hours": by_day.mean(axis=1),
        "days": by_day.mean(axis=2),
        "level": level,
        "weekday": np.eye(7)[(at_s // (DAY_H * HOUR_S)).astype(np.int64) % 7],
        "season": np.column_stack([np.sin(angle), np.cos(angle)]),
    }
    for column in range(history.shares.shape[1]):
        share = history.shares[:, column][origins[:, None] - 1 - np.arange(7 * DAY_H)]
        share = share - share.mean(axis=1, keepdims=True)
        groups[f"shares, last day {column}"] = share[:, :DAY_H]
        groups[f"shares, week's hours {column}"] = share.reshape(len(origins), 7, DAY_H).mean(axis=1)
    for column in range(history.expected.shape[1]):
        expected = history.expected[:, column]
        usual = expected[origins[:, None] - 1 - np.arange(7 * DAY_H)].mean(axis=1, keepdims=True)
        if history.expected_h:
            ahead = expected[origins[:, None] + np.arange(history.expected_h)]
            groups[f"wind and sun, next day {column}"] = ahead - usual
    return groups


def _scaling(name: str, group: Floats) -> tuple[Floats, float]:
    """Return the centre of a group's columns and the factor that gives the group its weight."""
    weight = WEIGHTS[name.rstrip("0123456789 ") if name.startswith(("shares", "wind")) else name]
    spread = float(group.std()) * np.sqrt(group.shape[1])
    return group.mean(axis=0), weight / spread if spread > 1e-9 else 0.0


def _day_to_day(history: History, plain: Floats) -> tuple[Floats | None, Floats | None]:
    """Return the quantiles of a persistence forecast from the day-to-day changes; None with less than three days."""
    known = history.known[DAY_H:] & history.known[:-DAY_H]
    changes = (history.values[DAY_H:] - history.values[:-DAY_H])[known]
    if len(changes) < 2 * DAY_H:
        return None, None
    low, high = np.quantile(changes, QUANTILES)
    floor = -np.inf if (history.values < 0).any() else 0.0
    return np.maximum(plain + min(low, 0.0), floor), plain + max(high, 0.0)


def _is_root(history: History) -> bool:
    return bool(history.values.min() >= 0)
