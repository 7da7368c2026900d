"""Carbon intensity in steps shorter than an hour, for a past too short to learn much from.

Marginal signals come in steps of five minutes, and providers give out only a month of them. The last value predicts the
next hour best, and the same time yesterday predicts tomorrow best; the blend of both is

    w(k) x last value + (1 - w(k)) x yesterday(t + k)

with a weight w between 0 (persistence) and 1 for each hour ahead: the one of ``WEIGHTS`` with the least absolute error
over the past. The quantiles are those of the errors there.
"""

from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError
from services.learning.carbon import QUANTILES, greenest_regret, share_between
from services.learning.carbon_history import DAY_H, HOUR_S, filled

WEIGHTS = np.linspace(0.0, 1.0, 11)
LEAST_ORIGINS = 48
"""Moments, an hour apart, to learn weights from, and to test them at."""
TESTED_SHARE = 0.2
MOST_DAYS = 60


@dataclass(frozen=True)
class Blend:
    """The weights and errors learned from the past."""

    weights: Floats  #: (steps,) w
    low: Floats  #: (steps,) quantile of the errors, gCO2/kWh; at most 0
    high: Floats  #: The same; at least 0
    origins: Ints  #: (tested,) moments of the backtest, steps since the beginning, over the last part of the past
    mae: dict[str, Floats]
    """By method, the (steps,) mean absolute errors there, with the weights learned from the part before."""
    coverage: float  #: Share of the steps there that lie between the quantiles learned from the part before
    greenest_regret: float  #: As in ``services.learning.carbon.Backtest``

    @property
    def is_better(self) -> bool:
        """Whether its error was smaller than that of persistence."""
        return bool(self.mae["blend"].mean() < self.mae["persistence"].mean())

    def at(self, values: Floats, day: int) -> tuple[Floats, Floats, Floats]:
        """Return the forecast that continues these values, and its p10 and p90; (steps,) each."""
        made = blended(values, np.array([len(values)]), self.weights, day)[0]
        low, high = made + self.low, made + self.high
        return (made, low, high) if values.min() < 0 else (made, np.maximum(low, 0.0), high)


def learn(values: Floats, hours: int, hour: int) -> Blend:
    """Return the weights and errors of a past in equal steps.

    Args:
        values: (n,) gCO2/kWh, oldest first, without gaps.
        hours: How far ahead to forecast.
        hour: Number of steps in an hour.

    Raises:
        DomainError: The past is shorter than needed: five days plus twice the hours ahead.
    """
    steps, day = hours * hour, DAY_H * hour
    origins = np.arange(len(values) - steps, day - 1, -hour, dtype=np.int64)[::-1]
    late = origins[-max(LEAST_ORIGINS, int(TESTED_SHARE * len(origins))) :]
    early = origins[origins + steps <= late[0]] if len(late) else late
    if len(early) < LEAST_ORIGINS:
        least = 5 + 2 * hours / DAY_H
        raise DomainError(f"about {least:.0f} days are needed to blend, and {len(values) / day:.0f} are given")
    truth = values[late[:, None] + np.arange(steps)]
    before = _weights(values, early, steps, hour)
    made = {"persistence": blended(values, late, 0.0 * before, day), "blend": blended(values, late, before, day)}
    low, high = _quantiles(values, early, before, day)
    missed = truth - made["blend"]
    weights = _weights(values, origins, steps, hour)
    by_hour = [each.reshape(len(late), hours, hour).mean(axis=2) for each in (made["blend"], truth)]
    return Blend(
        weights,
        *_quantiles(values, origins, weights, day),
        late,
        {name: np.abs(each - truth).mean(axis=0) for name, each in made.items()},
        share_between(missed, low, high),
        greenest_regret(by_hour[0], by_hour[1]),
    )


def blended(values: Floats, origins: Ints, weights: Floats, day: int) -> Floats:
    """Return the (origins, steps) forecasts made at past moments, gCO2/kWh; a day has ``day`` steps."""
    yesterday = values[origins[:, None] - day + np.arange(len(weights)) % day]
    return yesterday + weights * (values[origins - 1][:, None] - yesterday)


def _weights(values: Floats, origins: Ints, steps: int, hour: int) -> Floats:
    """Return the weight with the least absolute error for each hour ahead; (steps,)."""
    truth = values[origins[:, None] + np.arange(steps)]
    tried = (np.abs(blended(values, origins, np.full(steps, w), DAY_H * hour) - truth).mean(axis=0) for w in WEIGHTS)
    by_hour = np.stack([each.reshape(-1, hour).mean(axis=1) for each in tried])
    return np.repeat(WEIGHTS[np.argmin(by_hour, axis=0)], hour)


def _quantiles(values: Floats, origins: Ints, weights: Floats, day: int) -> tuple[Floats, Floats]:
    missed = values[origins[:, None] + np.arange(len(weights))] - blended(values, origins, weights, day)
    low, high = np.quantile(missed, QUANTILES, axis=0)
    return np.minimum(low, 0.0), np.maximum(high, 0.0)


def steps_of(times_s: Floats, values: Floats, step_s: float) -> Floats:
    """Return the last ``MOST_DAYS`` of a series with gaps filled by the value a day before, else the previous one.

    Args:
        times_s: (n,) when each value took effect, increasing.
        values: (n,) gCO2/kWh.

    Raises:
        DomainError: An hour is not a whole number of steps.
    """
    hour = round(HOUR_S / step_s)
    if hour < 2 or hour * step_s != HOUR_S:
        raise DomainError(f"an hour holds no whole number of steps of {step_s:g} s")
    at = np.rint((times_s - times_s[-1]) / step_s).astype(np.int64)
    kept = at > -MOST_DAYS * DAY_H * hour
    at = at[kept] - at[kept][0]
    steps = np.full(int(at[-1]) + 1, np.nan)
    steps[at] = values[kept]
    return filled(steps, DAY_H * hour)
