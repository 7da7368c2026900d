"""Whether it is a job's hour: its work goes into the hours before some completion such that both together cost least.

For every step ``k`` of the forecast as the last one, the job takes the greenest steps up to it that hold its work:

    cost(k) = P / 1000 * integral of c over those steps + w * (end of k - now)

The least cost(k) whose end keeps the deadline wins, and the job runs now if this step is among the steps taken. Without
``w`` and with a single ``k``, that of the deadline, this is Wait Awhile's rule
(``services.core.policies.greener_hours``).

With its sizes (``column_now``), a wider gang adds speed to a step for watts, ``dP / ds`` on the lower hull of power
over speed, so that the work that it adds emits ``c * dP / ds``. The cheapest additions that hold the work replace
the greenest steps. CarbonScaler does the same by GPUs instead of watts.
"""

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.carbon import CarbonCurve
from services.core.domain.units import S_PER_HOUR

DAY_S = 86_400.0
HORIZON_S = 2 * DAY_S
"""How far ahead hours are compared, unless said. A forecast that ends before is continued by its last day."""
LEAST_STEPS, MOST_STEPS = 12, 1_000
"""An hour of steps of five minutes, as the shortest are, and more of them than three days have: time and memory grow
with the square of the steps."""


def starts_s(
    curve: CarbonCurve,
    now_s: float,
    left_s: Floats,
    deadline_s: Floats,
    watts: Floats,
    hour_g: float | Floats,
    stay_share: float = 0.0,
    horizon_s: float = HORIZON_S,
) -> Floats:
    """Return when each job has its first hour, UTC seconds: (n_jobs,).

    It is now for those that cannot keep their deadlines, or outlast the horizon.

    Args:
        left_s: (n_jobs,) what each still needs.
        deadline_s: (n_jobs,) when each must be done, UTC seconds.
        watts: (n_jobs,) draw while it runs.
        hour_g: w, gCO2 per hour; one for all, or (n_jobs,).
        stay_share: The share by which this step's intensity is discounted.
        horizon_s: How far ahead hours are compared.
    """
    begins, ends, intensity = steps_ahead(curve, now_s, horizon_s)
    intensity = np.append(intensity[0] * (1.0 - stay_share), intensity[1:])
    order = np.argsort(intensity, kind="stable")
    n_steps = order.size
    steps = np.arange(n_steps)
    lengths_s = np.where(order[None, :] <= steps[:, None], (ends - begins)[order], 0.0)
    time_s, emitted = lengths_s.cumsum(axis=1), (lengths_s * intensity[order]).cumsum(axis=1)
    least, start_s = np.full(left_s.size, np.inf), np.full(left_s.size, now_s)
    first_of = np.minimum.accumulate(order)
    for step in steps.tolist():
        spare_s = time_s[step, -1] - left_s
        fits = (spare_s >= 0) & ((ends[step] <= deadline_s) | np.isinf(least))
        if not fits.any():
            continue
        at = np.minimum(np.searchsorted(time_s[step], left_s), n_steps - 1)
        carbon = emitted[step, at] - (time_s[step, at] - left_s) * intensity[order[at]]
        first = np.isinf(least)  # where all steps are needed, it is done before the last one ends
        end_s = ends[step] - np.where(first, np.minimum(spare_s, ends[step] - begins[step]), 0.0)
        cost = watts / 1000.0 * carbon / S_PER_HOUR + hour_g * (end_s - now_s) / S_PER_HOUR
        better = fits & (cost < least)
        least[better] = cost[better]
        start_s[better] = begins[first_of[at[better]]]
    return start_s


def column_now(
    curve: CarbonCurve,
    now_s: float,
    left_s: Floats,
    deadline_s: Floats,
    speed: Floats,
    watts: Floats,
    hour_g: float | Floats,
    otherwise: Ints,
    held: int | Ints = -1,
    stay_share: float = 0.0,
    horizon_s: float = HORIZON_S,
) -> tuple[Ints, Floats]:
    """Return the gang, a column, that each job runs as now, -1 if it waits, and when it has its first hour.

    Both are (n_jobs,), the latter UTC seconds.

    Args:
        left_s: (n_jobs,) what each still needs at speed 1.
        deadline_s, hour_g, stay_share, horizon_s: As for ``starts_s``; ``stay_share`` is for what a job has.
        speed, watts: (n_jobs, n_sizes) of each gang, with its draw while it runs; infinite watts: there is none.
        otherwise: The column of those that outlast the horizon: (n_jobs,).
        held: The column that each has now, or one for all; -1: none.
    """
    begins, ends, intensity = steps_ahead(curve, now_s, horizon_s)
    column, more, per_work = _hull(speed, watts)
    n_jobs, n_steps, n_more = left_s.size, begins.size, column.shape[1]
    price = intensity[:, None] * per_work[:, None, :]
    price[:, 0] *= np.where(column <= np.reshape(held, (-1, 1)), 1.0 - stay_share, 1.0)
    each = np.where(np.arange(n_steps)[:, None] == 0, column[:, None, :], -1)
    parts = (np.where(more[:, None, :] > 0, price, np.inf), (ends - begins)[:, None] * more[:, None, :], each)
    order = np.argsort(parts[0].reshape(n_jobs, -1), axis=1, kind="stable")
    price, work_of, each = (np.take_along_axis(part.reshape(n_jobs, -1), order, axis=1) for part in parts)
    price = np.where(work_of > 0, price, 0.0)
    step_of, columns = order // n_more, np.maximum.accumulate(each, axis=1)
    first_of = np.minimum.accumulate(np.where(work_of > 0, step_of, n_steps - 1), axis=1)
    rows: Ints = np.arange(n_jobs, dtype=np.int64)
    least, chosen, start_s = np.full(n_jobs, np.inf), otherwise.copy(), np.full(n_jobs, now_s)
    for last in range(begins.size):
        work = np.where(step_of <= last, work_of, 0.0)
        done = work.cumsum(axis=1)
        spare_s = (done[:, -1] - left_s) / more.sum(axis=1)
        fits = (spare_s >= 0) & ((ends[last] <= deadline_s) | np.isinf(least))
        if not fits.any():
            continue
        at = np.minimum((done < left_s[:, None]).sum(axis=1), done.shape[1] - 1)
        emitted = (work * price).cumsum(axis=1)[rows, at] - (done[rows, at] - left_s) * price[rows, at]
        first = np.isinf(least)  # where all steps are needed, it is done before the last one ends
        end_s = ends[last] - np.where(first, np.minimum(spare_s, ends[last] - begins[last]), 0.0)
        cost = emitted / 1000.0 / S_PER_HOUR + hour_g * (end_s - now_s) / S_PER_HOUR
        better = fits & (cost < least)
        least[better] = cost[better]
        chosen[better] = columns[rows, at][better]
        start_s[better] = begins[first_of[rows, at]][better]
    return chosen, start_s


def _hull(speed: Floats, watts: Floats) -> tuple[Ints, Floats, Floats]:
    """Return the lower hull of power over speed from standstill on: three arrays (n_jobs, n_sizes).

    Returns:
        The column that each addition leads to, the speed that it adds (0 where there is none), and watts per speed.
    """
    n_jobs, n_sizes = speed.shape
    column, more, per_work = np.full(speed.shape, -1), np.zeros(speed.shape), np.zeros(speed.shape)
    rows: Ints = np.arange(n_jobs, dtype=np.int64)
    at_speed, at_w = np.zeros(n_jobs), np.zeros(n_jobs)
    for each in range(n_sizes):
        faster = speed - at_speed[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            slope = np.where(faster > 0, (watts - at_w[:, None]) / faster, np.inf)
        best = slope.argmin(axis=1)
        there = np.isfinite(slope[rows, best])
        column[there, each], more[there, each] = best[there], faster[rows, best][there]
        per_work[there, each] = slope[rows, best][there]
        at_speed = np.where(there, speed[rows, best], at_speed)
        at_w = np.where(there, watts[rows, best], at_w)
    return column, more, per_work


def hours_of(
    curve: CarbonCurve,
    now_s: float,
    left_s: float,
    deadline_s: float,
    watts: float,
    hour_g: float,
    stay_share: float,
    horizon_s: float = HORIZON_S,
) -> tuple[tuple[float, float], ...]:
    """Return when one job will run if it follows ``starts_s`` at every step of the forecast: UTC seconds.

    An approximation for a job whose sizes are planned with its hours (``column_now``): it runs less, and wider, then.
    Whatever is left at the end of the forecast is done there without a pause. Args as for ``starts_s``, for one job.
    """
    runs: list[tuple[float, float]] = []
    begins, ends, _ = steps_ahead(curve, now_s, horizon_s)
    for begin_s, end_s in zip(begins.tolist(), ends.tolist(), strict=True):
        if left_s <= 0 or begin_s + 1.0 >= curve.end_s:
            break
        stays = stay_share if runs and runs[-1][1] == begin_s else 0.0
        left, deadline, draw = np.array([left_s]), np.array([deadline_s]), np.array([watts])
        if starts_s(curve, begin_s, left, deadline, draw, hour_g, stays, horizon_s)[0] <= begin_s:
            done_s = min(left_s, end_s - begin_s)
            runs.append((begin_s, begin_s + done_s))
            left_s -= done_s
    if left_s > 0:
        begin_s = max(curve.end_s, now_s, runs[-1][1] if runs else now_s)
        runs.append((begin_s, begin_s + left_s))
    return tuple(runs)


def steps_ahead(curve: CarbonCurve, now_s: float, horizon_s: float) -> tuple[Floats, Floats, Floats]:
    """Return the steps from now on, repeating the last day known: begins and ends, UTC seconds, and gCO2/kWh.

    Where less than an hour is known from now on, as in an outlook that could not be renewed, the last day known
    stands for today, instead of a few seconds repeated thousands of times. Of a replay, whose hours are steps of
    seconds, that is less than ``LEAST_STEPS``, and no more than ``MOST_STEPS`` are compared.
    """
    until_s = now_s + horizon_s
    least_s = min(S_PER_HOUR, LEAST_STEPS * (curve.end_s - curve.times_s[-1]))
    back_s = max(np.ceil((now_s + least_s - curve.end_s) / DAY_S), 0.0) * DAY_S
    begins, ends, intensity = curve.steps(now_s - back_s, min(curve.end_s, until_s - back_s))
    begins, ends = begins + back_s, ends + back_s
    if ends[-1] >= until_s:
        return begins[:MOST_STEPS], ends[:MOST_STEPS], intensity[:MOST_STEPS]
    last = begins >= min(ends[-1] - DAY_S, begins[-1])  # a step may be longer
    length_s = float(ends[-1] - begins[last][0])
    times = min(int(np.ceil((until_s - ends[-1]) / length_s)), MOST_STEPS)
    later_s = length_s * np.arange(times + 1)
    begins = np.concatenate((begins, *(begins[last] + shift for shift in later_s[1:])))
    ends = np.concatenate((ends, *(ends[last] + shift for shift in later_s[1:])))
    intensity = np.concatenate((intensity, *(intensity[last] for _ in later_s[1:])))
    keep = np.flatnonzero(begins < until_s)[:MOST_STEPS]
    return begins[keep], np.minimum(ends[keep], until_s), intensity[keep]
