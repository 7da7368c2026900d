"""The demand that pools are planned for: peaks that, with head-room, are seldom exceeded.

This is called for every plan, so the backtest that chooses is thinned: at most ``MOMENTS`` moments of the last two
days, and a few fits.
"""

from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.domain.serving import SERVICE, STEPS_AHEAD
from services.core.profiles import traffic
from services.learning.traffic_boosting import Boosting

JUDGED_STEPS, MOMENTS = 2 * traffic.DAY_STEPS, 192
"""The backtest's span, which has each hour of the day twice, and its moments: with both, a moment each quarter of an
hour, and twice what the highest service level has to see."""
LEAST_ORIGINS = 12  #: An hour to judge by, after the two that margins are learned from
LEAST_REFIT_STEPS, REFIT_SHARE = 24, 0.1
"""A fit is as old at most as two hours, or a tenth of the history where that is more."""


@dataclass(frozen=True)
class Demand:
    """The demand to plan for."""

    peaks_qps: Floats
    """(STEPS_AHEAD, n_classes) for the steps that follow the history; with margins, without head-room."""
    method: str  #: The forecaster chosen, or what is used instead if there is too little history
    scores: dict[str, dict[str, list[float]]]
    """By forecaster, lists by class over the same past moments, each with its margin: ``mae_qps``, ``short_share`` of
    the steps with less than their peak, ``spare_qps``, ``cost_qps`` (the newsvendor's)."""
    left_out: dict[str, str]  #: Why the others were not compared, by name
    assumed: bool  #: Whether nothing could be learned yet


def candidates(service: float = SERVICE) -> list[traffic.Forecaster]:
    """Return the forecasters to compare, the simpler first."""
    plain: list[traffic.Forecaster] = [traffic.LastPeak(), traffic.SeasonalNaive(), Boosting()]
    high: list[traffic.Forecaster] = [Boosting(quantile=service)] if service != Boosting().quantile else []
    return [*plain, *high]


def forecast_demand(
    history: traffic.Traffic,
    assumed_qps: Floats | None,
    *,
    head_room: float = traffic.HEAD_ROOM,
    service: float = SERVICE,
) -> Demand:
    """Return the peaks to plan pools for, from the traffic so far.

    If history is too short to learn from, this is the peak that the operator expects, or the greatest peak so far if
    that is higher.

    >>> forecast_demand(Traffic(np.array([[3.0], [4.0]])), None).peaks_qps.T.tolist()
    [[4.0, 4.0, 4.0, 4.0, 4.0, 4.0]]

    Args:
        history: The traffic until the moment of planning.
        assumed_qps: (n_classes,) peaks that the operator expects; None if there is no such estimate.
        head_room: The factor by which the plan's capacity exceeds the peaks.
        service: Share of the steps in which that should suffice.

    Raises:
        DomainError: There is neither history nor assumption, the assumption is impossible, or head-room or service
            level is out of bounds.
    """
    criterion = traffic.ServiceLevel(service, head_room)
    if assumed_qps is not None and (
        assumed_qps.shape != (history.n_classes,) or not np.all(np.isfinite(assumed_qps) & (assumed_qps >= 0))
    ):
        raise DomainError(f"assumed peaks are {history.n_classes} finite numbers >= 0")
    compared = candidates(service)
    least = traffic.LastPeak().steps_needed(history) + criterion.moments_needed + LEAST_ORIGINS
    if len(history) < least:
        why = f"needs {least} steps of history, which has {len(history)}"
        return _assumed(history, assumed_qps, {each.name: why for each in compared})
    choice = traffic.choose(
        history,
        compared,
        criterion,
        least_origins=LEAST_ORIGINS,
        most_origins=MOMENTS,
        latest_steps=JUDGED_STEPS,
        refit_steps=max(LEAST_REFIT_STEPS, int(REFIT_SHARE * len(history))),
    )
    scores = {score.name: _figures(score, criterion) for score in choice.scores}
    return Demand(choice.model.forecast(history), choice.method, scores, choice.left_out, assumed=False)


def _assumed(history: traffic.Traffic, assumed_qps: Floats | None, left_out: dict[str, str]) -> Demand:
    if not len(history) and assumed_qps is None:
        raise DomainError("no history to learn from, and no demand assumed")
    seen = history.peaks_qps.max(axis=0, initial=0.0)
    peaks = seen if assumed_qps is None else np.maximum(assumed_qps, seen)
    method = "greatest peak so far" if assumed_qps is None or (seen > assumed_qps).any() else "assumed"
    return Demand(np.repeat(peaks[None], STEPS_AHEAD, axis=0), method, {}, left_out, assumed=True)


def _figures(score: traffic.Backtest, criterion: traffic.ServiceLevel) -> dict[str, list[float]]:
    gap = criterion.head_room * score.forecast_qps - score.actual_qps
    return {
        "mae_qps": score.mae_qps.tolist(),
        "short_share": score.under_share(criterion.head_room).tolist(),
        "spare_qps": np.nanmean(np.maximum(gap, 0.0), axis=(0, 1)).tolist(),
        "cost_qps": score.newsvendor_qps(criterion.service, criterion.head_room).tolist(),
    }
