"""Orders of the grid in a simulation: what the rounds see of them, and how far they were kept."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.domain.orders import STOPS_AHEAD_S, Curve, PowerOrder, curve_of, order_at, standing
from services.core.policies.orders.feedback import with_ratios

BUCKET_S = 300.0
REACHED = 0.02  #: An order counts as reached this far above its limit
CHECK_S = 10.0  #: Between rounds while the models are still being corrected, as the live scheduler's


@dataclass(frozen=True)
class SimulatedOrder:
    """An order to the whole cluster: less by a share of what it draws as it begins to prepare, or a limit in watts.

    What it draws while it answers to another order, or recovers from one, is not what it would draw: then the other's
    baseline counts.
    """

    start_s: float  #: UTC seconds
    lasts_s: float  #: inf: the cluster's own limit, in force from the beginning
    cut: float | None = None
    to_w: float | None = None
    notice_s: float = 0.0  #: How long before its start the cluster may prepare

    def __post_init__(self) -> None:
        if (self.cut is None) == (self.to_w is None) or self.lasts_s <= 0 or (self.to_w is None and self.stands):
            raise DomainError(
                "an order has a length above 0, and either a cut or watts; a limit without an end has watts"
            )

    @property
    def stands(self) -> bool:
        """Whether it has no end."""
        return math.isinf(self.lasts_s)


@dataclass
class _Kept:
    """One order as it goes: its limits, once it has a baseline, and what was drawn, by five minutes from its start."""

    order: SimulatedOrder
    curve: Curve | None = None
    baseline_w: float = math.nan
    limit_w: float = math.nan
    reached_s: float = math.nan  #: How long after its start the draw was first within ``REACHED`` of it
    energy_j: Floats = field(default_factory=lambda: np.empty(0))


class Orders:
    """The orders of a run."""

    def __init__(self, orders: Sequence[SimulatedOrder]) -> None:
        self._kept = [_Kept(order) for order in orders]
        self._ratios: Mapping[str, float] = {}

    def shown(self, snapshot: Snapshot, drawn_w: float, slices_w: float) -> tuple[Snapshot, float]:
        """Return a snapshot with the orders, and when it should be looked at again, UTC seconds.

        Args:
            drawn_w: What gangs and free devices draw. slices_w: What slices draw, which no round changes.
        """
        now_s, found = snapshot.now_s, list[PowerOrder]()
        for at, kept in enumerate(self._kept):
            order, prepares_s = kept.order, kept.order.start_s - max(kept.order.notice_s, STOPS_AHEAD_S)
            if order.stands:
                found.append(standing(order.to_w or 0.0, other_w=slices_w, measured_w=drawn_w))
                continue
            if kept.curve is None and now_s >= prepares_s:
                answered = (each.baseline_w for each in self._kept if each.curve and now_s < each.curve[-1][0])
                kept.baseline_w = next(answered, drawn_w + slices_w)  # before the first of those that hold it down
                kept.limit_w = kept.baseline_w * (1 - order.cut) if order.cut is not None else order.to_w or 0.0
                end_s = order.start_s + order.lasts_s
                kept.curve = curve_of(order.start_s, end_s, ((0.0, kept.limit_w),), kept.baseline_w)
                kept.energy_j = np.zeros(math.ceil((kept.curve[-1][0] - order.start_s) / BUCKET_S))
            if kept.curve is None:
                found.append(PowerOrder(str(at), -1, math.inf, math.inf, prepares_s, order.start_s + order.lasts_s))
            else:
                found.append(order_at(str(at), -1, kept.curve, now_s, other_w=slices_w, measured_w=drawn_w))
        before = self._ratios
        snapshot, self._ratios = with_ratios(snapshot.again(orders=tuple(found)), before)
        again_s = now_s + CHECK_S if self._ratios != before and self._ratios else math.inf
        return snapshot, again_s

    def draw(self, begin_s: float, end_s: float, power_w: float) -> None:
        """Note a period of constant draw."""
        for kept in self._kept:
            start_s = kept.order.start_s
            if kept.curve is None or end_s <= start_s or begin_s >= kept.curve[-1][0]:
                continue
            if math.isnan(kept.reached_s) and power_w <= kept.limit_w * (1 + REACHED):
                kept.reached_s = max(begin_s - start_s, 0.0)
            edges = start_s + BUCKET_S * np.arange(kept.energy_j.size + 1)
            kept.energy_j += power_w * np.maximum(np.minimum(edges[1:], end_s) - np.maximum(edges[:-1], begin_s), 0.0)

    def figures(self, now_s: float) -> tuple[Mapping[str, float], ...]:
        """Return what came of each order whose baseline is known, watts, seconds and shares; NaN: not reached.

        ``above_most`` is the largest mean of five minutes above the limit, ``below_most`` the smallest below it, as
        shares of it; ``rebound`` the largest above the baseline in the time after the order.
        """
        found: list[Mapping[str, float]] = []
        for kept in self._kept:
            if kept.curve is None:
                continue
            lasts_s, start_s = kept.order.lasts_s, kept.order.start_s
            times_s = BUCKET_S * np.arange(kept.energy_j.size)
            ran_s = np.minimum(now_s - start_s - times_s, BUCKET_S)
            means_w = np.divide(kept.energy_j, ran_s, out=np.zeros_like(ran_s), where=ran_s > 0)
            during, after = (times_s + BUCKET_S <= lasts_s) & (ran_s > 0), (times_s >= lasts_s) & (ran_s > 0)
            found.append(
                {
                    "start_s": start_s,
                    "lasts_s": lasts_s,
                    "baseline_w": kept.baseline_w,
                    "limit_w": kept.limit_w,
                    "mean_w": float(means_w[during].mean()) if during.any() else math.nan,
                    "reached_s": kept.reached_s,
                    "above_most": _most(means_w[during], kept.limit_w),
                    "below_most": _most(2 * kept.limit_w - means_w[during], kept.limit_w),
                    "rebound": _most(means_w[after], kept.baseline_w),
                }
            )
        return tuple(found)


def _most(means_w: Floats, limit_w: float) -> float:
    return max(float(means_w.max(initial=0.0)) / limit_w - 1, 0.0) if limit_w > 0 else math.nan
