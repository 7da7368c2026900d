"""Reports of orders, from the ledger's lines."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from services.contracts.grid import GridOrder, GridOrderJob, GridOrderReport, GridOrderTerms
from services.core.accounting.orders import EnergyLines, excess, mean_limit_w
from services.core.domain.orders import Curve
from services.scheduler.repository.orders import BEFORE_S, LineRow

LOST_S = 120.0  #: A node that has no line for so long before the newest one is not waited for


def reported(
    order: GridOrder, limits: Curve, rows: Sequence[LineRow], since: datetime, amended: list[GridOrderTerms]
) -> GridOrderReport | None:
    """Return what came of an order; None if the ledger has no line yet of the time in which it held.

    Args:
        limits: As ``curve_of``, with what amendments replaced until then.
        since: When it came into force.
        amended: As in the report.
        rows: The lines from ``BEFORE_S`` before its baseline until the time after it is over.
    """
    begin_s, baseline_s = since.timestamp(), order.baseline_at.timestamp() if order.baseline_at else 0.0
    ends_s = min(order.end_at.timestamp(), order.withdrawn_at.timestamp() if order.withdrawn_at else np.inf)
    counted_s = min(known_until_s(rows), limits[-1][0])
    until_s = min(ends_s, counted_s)
    if until_s <= begin_s or order.baseline_w is None:
        return None
    owners = sorted({row.job_id or "" for row in rows})
    at = {owner: index for index, owner in enumerate(owners)}
    lines = EnergyLines(
        np.array([at[row.job_id or ""] for row in rows], dtype=np.int64),
        *(np.array([getattr(row, name) for row in rows]) for name in ("start_s", "end_s", "energy_j")),
    )
    # As the baseline: over the time from each node's first whole line to its last, so that the parts come to it.
    of_node: dict[str, list[LineRow]] = defaultdict(list)
    for row in rows:
        if row.start_s >= baseline_s - BEFORE_S and row.end_s <= baseline_s:
            of_node[row.node_id].append(row)
    before_w = np.zeros(len(owners))
    for whole in of_node.values():
        span_s = max(row.end_s for row in whole) - min(row.start_s for row in whole)
        for row in whole:
            before_w[at[row.job_id or ""]] += row.energy_j / span_s
    during_w = lines.within(begin_s, until_s, len(owners)) / (until_s - begin_s)
    baseline_w, mean_w = order.baseline_w, float(during_w.sum())
    limit_w = mean_limit_w(tuple((at_s, min(watts, baseline_w)) for at_s, watts in limits), begin_s, until_s)
    after = ((ends_s, baseline_w), (np.inf, np.inf))
    by_change = sorted(range(len(owners)), key=lambda each: (-abs(before_w[each] - during_w[each]), owners[each]))
    return GridOrderReport(
        order=order,
        nodes=sorted({row.node_id for row in rows}),
        since=since,
        until=datetime.fromtimestamp(until_s, UTC),
        counted_until=datetime.fromtimestamp(counted_s, UTC),
        baseline_w=baseline_w,
        limit_w=limit_w,
        mean_w=mean_w,
        ordered_w=baseline_w - limit_w,
        delivered_w=baseline_w - mean_w,
        unheard=_unheard(rows, begin_s, until_s),
        above_most=excess(lines, limits, begin_s, until_s, baseline_w),
        rebound=excess(lines, after, ends_s, counted_s, baseline_w),
        jobs=[
            GridOrderJob(job_id=owners[each] or None, before_w=float(before_w[each]), during_w=float(during_w[each]))
            for each in by_change
            if before_w[each] or during_w[each]
        ],
        amended=amended,
    )


def known_until_s(rows: Sequence[LineRow]) -> float:
    """Return until when every node has lines that is not lost, UTC seconds; 0 without any."""
    last_s = dict[str, float]()
    for row in rows:
        last_s[row.node_id] = max(row.end_s, last_s.get(row.node_id, 0.0))
    newest_s = max(last_s.values(), default=0.0)
    return min((at_s for at_s in last_s.values() if at_s >= newest_s - LOST_S), default=0.0)


def _unheard(rows: Sequence[LineRow], begin_s: float, until_s: float) -> float:
    """Return the share of the nodes' time in which they have no line, each from its first one on."""
    first_s, heard_s, gaps_s = dict[str, float](), dict[str, float](), 0.0
    for row in sorted(rows, key=lambda row: row.start_s):
        since_s, to_s = (min(max(each, begin_s), until_s) for each in (row.start_s, row.end_s))
        at_s = heard_s.get(row.node_id, first_s.setdefault(row.node_id, since_s))
        gaps_s += max(since_s - at_s, 0.0)
        heard_s[row.node_id] = max(at_s, to_s)
    time_s = sum(until_s - at_s for at_s in first_s.values())
    return (gaps_s + sum(until_s - at_s for at_s in heard_s.values())) / time_s if time_s else 0.0
