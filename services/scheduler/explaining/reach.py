"""How far an order can be met as the cluster is, in figures and in words."""

import asyncio
import math

from services.contracts.grid import GridOrder, GridOrderState
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.orders import STOPS_AHEAD_S, PowerOrder, least_of
from services.core.policies.orders.layer import Reach, reach_of
from services.kit.problems import ProblemError
from services.scheduler.grid.orders import changed_at, curve
from services.scheduler.planning.dry_run import Live, LiveView
from services.scheduler.repository.orders import OrderRow

NOTABLE = 0.02  #: Less than this share of a limit is no shortfall

UNDER_WAY = (GridOrderState.ANNOUNCED, GridOrderState.IN_FORCE)


class Judging:
    """Judges orders by the live state."""

    def __init__(self, view: LiveView) -> None:
        self._view = view

    async def one(self, order: GridOrder) -> GridOrder:
        """Return an order with how far it can be met unless it is over; as it is, before the scheduler's first turn."""
        return (await self.all([order]))[0]

    async def all(self, found: list[GridOrder]) -> list[GridOrder]:
        """Return orders as ``one`` does."""
        wanted = {(each.id, each.revision) for each in found if each.state in UNDER_WAY}
        try:
            live = await self._view.read() if wanted else None
            if live is not None and not wanted <= {(row.id, row.revision) for row in live.rows.orders}:
                live = await self._view.read()  # the one that was shared had begun before they were stored
        except ProblemError:
            return found
        return found if live is None else await asyncio.to_thread(self._judged, live, found)

    def _judged(self, live: Live, found: list[GridOrder]) -> list[GridOrder]:
        snapshot = self._view.snapshot(live, Trigger.PASSIVE, at_rest=True)
        rows = {row.id: row for row in live.rows.orders}
        return [
            judged(each, rows[each.id], snapshot) if each.state in UNDER_WAY and each.id in rows else each
            for each in found
        ]


def judged(order: GridOrder, row: OrderRow, snapshot: Snapshot) -> GridOrder:
    """Return an order with what its scope draws, how far that can come down, and why not further.

    While its baseline is not known, what is drawn now stands for it.
    """
    seen = next((each for each in snapshot.orders if each.id == order.id), None)
    if seen is None:
        return order.model_copy(update={"shortfall": f"The zone {order.zone} has no nodes now: nothing can draw less."})
    drawn_w, reach = seen.measured_w + seen.other_w, reach_of(snapshot, seen)
    if math.isnan(drawn_w):
        words = None if order.state is GridOrderState.ANNOUNCED else "None of its nodes says what it draws."
        return order.model_copy(update={"least_w": reach.least_w, "shortfall": words})
    limits = curve(row._replace(baseline_w=drawn_w if row.baseline_w is None else row.baseline_w)) or ()
    allowed_w = least_of(limits, max(snapshot.now_s, row.start_at.timestamp()), row.end_at.timestamp() - 1e-3)
    is_now = allowed_w == order.limit_w
    words = shortfall(reach, allowed_w, drawn_w, "It allows" if is_now else "At its lowest it will allow")
    now_w = math.inf if order.limit_w is None else order.limit_w
    if (
        words is None
        and drawn_w > (1 + NOTABLE) * now_w
        and snapshot.now_s > changed_at(row).timestamp() + STOPS_AHEAD_S
    ):
        words = f"It allows {now_w:,.0f} W, and {drawn_w:,.0f} W are drawn, though {reach.least_w:,.0f} W can be "
        words += "reached: gangs are late to stop, or GPUs do not keep the limits that are set."
    return order.model_copy(update={"drawn_w": drawn_w, "least_w": reach.least_w, "shortfall": words})


def shortfall(reach: Reach, allowed_w: float, drawn_w: float, allows: str) -> str | None:
    """Return why a limit cannot be reached, None if it can be; ``drawn_w``: NaN where it is not known."""
    if reach.least_w <= (1 + NOTABLE) * allowed_w:
        return None
    drawn = "" if math.isnan(drawn_w) else f"{drawn_w:,.0f} W are drawn, and "
    parts = (
        (reach.idle_w, "by idle GPUs and hosts"),
        (reach.bound_w, "by jobs that may not be stopped, at their lowest limits"),
        (reach.other_w, "by model servers, applications and nodes that are off"),
    )
    by = ", ".join(f"{watts:,.0f} W {whom}" for watts, whom in parts if watts >= 0.5)
    return f"{allows} {allowed_w:,.0f} W; {drawn}{reach.least_w:,.0f} W can at least be reached: {by}."


def words_of(snapshot: Snapshot) -> list[str]:
    """Return for each order that limits a round and cannot be met why that is so."""
    found: list[str | None] = []
    for each in snapshot.orders:
        if each.limits:
            allowed_w = min(each.limit_w, each.soon_w) + each.other_w
            found.append(shortfall(reach_of(snapshot, each), allowed_w, math.nan, _named(each)))
    return [*filter(None, found)]


def _named(order: PowerOrder) -> str:
    return "The limit of the cluster's power is" if order.stands else f"The order {order.id} allows"
