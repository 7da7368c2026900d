"""GREEN's carbon footprint optimizer: who runs first in the lower queue, and at what hour.

Source: GREEN section 5.2.
"""

import numpy as np

from services.core.domain.arrays import Bools, Floats
from services.core.domain.carbon import CarbonCurve


def rescaled_power(power_w: Floats, mu: float) -> Floats:
    """Return ``P* = (P - Pmin) / (Pmax - Pmin) * (mu - 1) + 1``, which lies in [1, mu].

    The bounds are taken over the jobs whose power is known. If it is not known, or if all draw the same, P* is 1.

    Args:
        power_w: (n_jobs,) mean draw of one of each job's GPUs, NaN where unobserved.
        mu: >= 1; at 1 every P* is exactly 1.

    Source: GREEN, equation 6.
    """
    known = power_w[np.isfinite(power_w)]
    span = float(known.max() - known.min()) if known.size else 0.0
    if span <= 0:
        return np.ones_like(power_w)
    scaled = (power_w - known.min()) / span * (mu - 1.0) + 1.0
    return np.where(np.isfinite(scaled), scaled, 1.0)


def high_power(power_w: Floats) -> Bools:
    """Return which jobs draw at least the median of the known draws: (n_jobs,); False for an unobserved job.

    Source: GREEN section 5.2, P~; for jobs at the median see ``shifting``.
    """
    known = np.isfinite(power_w)
    draws = power_w[known]
    if not draws.size:
        return known
    middle = (draws.size - 1) // 2, draws.size // 2
    draws.partition(middle)  # np.median takes several times as long
    median_w = (draws.item(middle[0]) + draws.item(middle[1])) / 2
    return power_w >= median_w


def shifting(power_w: Floats, intensity: float | Floats, mean_intensity: float | Floats, mu: float) -> Floats:
    """Return SHIFTING: a factor below 1 brings a job forward at this hour, one above 1 puts it back.

    Our reading of the table in Fig. 5a, which is missing from our copy, following the explanation given with Fig. 6:

    ==============================  =====================  ==================
    hour                            P at least the median  P below the median
    ==============================  =====================  ==================
    green: intensity below average  1 / P*                 P*
    dirty: intensity at or above    P*                     1 / P*
    ==============================  =====================  ==================

    A job whose power is unobserved has the neutral factor 1. Shown by
    ``tests/unit/core/test_green_carbon.py::test_shifting_follows_the_table_of_four_quadrants``.

    The paper calls jobs above the median high-power jobs; here those at the median count too. Jobs of one kind draw the
    same power, so many jobs often draw exactly the median. If these were the most power-hungry ones, there would be no
    high-power job at all, and the table would bring them forward in dirty hours. Shown by
    ``tests/unit/core/test_green_carbon.py::test_jobs_that_share_the_median_power_are_high_power_jobs``.

    Args:
        power_w: (n_jobs,) mean draw of one of each job's GPUs, NaN where unobserved.
        intensity: Present carbon intensity, gCO2/kWh; (n_jobs,) where jobs draw from several grids.
        mean_intensity: The average I-bar that separates green hours from dirty ones, gCO2/kWh; shaped as ``intensity``.
        mu: >= 1; at 1 every factor is exactly 1.

    Source: GREEN section 5.2, Fig. 5a and 6.
    """
    known = np.isfinite(power_w)
    if not known.any():
        return np.ones_like(power_w)
    high = high_power(power_w)
    factor = rescaled_power(power_w, mu)
    late = high == (intensity >= mean_intensity)
    return np.where(known, np.where(late, factor, 1.0 / factor), 1.0)


def mean_intensity(curve: CarbonCurve, now_s: float, window_s: float) -> float:
    """Return the average I-bar: the time-weighted mean over the latest known ``window_s``, looking no further ahead.

    The window ends at ``min(end of the curve, now + window)`` and is ``window_s`` long, or as long as the curve goes
    back. So with a full forecast it is the window ahead, without one it is the window just past, and otherwise
    something in between.

    Source: GREEN section 8.1, which gives the scheduler a curve of 24 or 48 hours.
    """
    end_s = min(curve.end_s, now_s + window_s)
    return curve.mean(max(end_s - window_s, curve.start_s), end_s)


def lower_priority(counted: Floats, degradation: Floats, shifting_factor: Floats) -> Floats:
    """Return ``PRIORITY = FOOTPRINT / DEGRADATION * SHIFTING``; smaller runs first.

    Args:
        counted: (n_jobs,) what counts against each job: emissions (gCO2) or GPU seconds since it last starved; values
            below zero (marginal signals) and unobserved ones count as zero.
        degradation: (n_jobs,) NaN where unobserved, which counts as 1.
        shifting_factor: (n_jobs,) from ``shifting``.

    Source: GREEN, equation 5.
    """
    burden = np.where(counted > 0.0, counted, 0.0)
    return burden / np.where(np.isnan(degradation), 1.0, degradation) * shifting_factor
