"""What a simulation of serving came to, in the figures that reports show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.serving.accounting import fairness_of_classes, violation_rate
from lab.serving.plans import HalfHour
from lab.serving.simulation import Outcome
from services.core.domain.arrays import Floats
from services.core.domain.units import J_PER_KWH

J_PER_WH = J_PER_KWH / 1_000
PERCENTILES = (50, 90, 99)


def document(outcome: Outcome, plans: Sequence[HalfHour], labels: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a simulation; None where there was nothing to measure.

    ``ttft_mean_ms`` is from a request's arrival, as a client sees it; ``server_ttft_mean_ms`` is from the moment when
    an instance was given the request, as FREESH's Table 2 measures it: there, requests wait for minutes and have a TTFT
    of 335 ms.

    Args:
        outcome: Of the simulation.
        plans: That were in force.
        labels: What was simulated.
    """
    served = outcome.served
    e2e_s, ttft_s = served.e2e_s, served.ttft_s
    server_ttft_s = served.first_token_s - np.minimum(outcome.dispatched_s, served.first_token_s)
    figures = {
        "energy_wh": outcome.energy_j / J_PER_WH,
        "carbon_kg": outcome.carbon_g / 1_000,
        "violation_rate": violation_rate(served),
        "e2e_mean_s": _mean(e2e_s),
        **{f"e2e_p{at}_s": _quantile(e2e_s, at) for at in PERCENTILES},
        "ttft_mean_ms": 1_000 * _mean(ttft_s),
        **{f"ttft_p{at}_ms": 1_000 * _quantile(ttft_s, at) for at in PERCENTILES},
        "server_ttft_mean_ms": 1_000 * _mean(server_ttft_s),
        **{f"server_ttft_p{at}_ms": 1_000 * _quantile(server_ttft_s, at) for at in PERCENTILES},
        "tbt_mean_ms": 1_000 * _mean(served.tbt_s),
        **{f"tbt_p{at}_ms": 1_000 * _quantile(served.tbt_s, at) for at in PERCENTILES},
        "jain": fairness_of_classes(served, outcome.request_class),
        "clock_mean_mhz": outcome.clock_mhz,
        "prefix_hit_share": outcome.cached_tokens / outcome.read_tokens if outcome.cached_tokens else float("nan"),
    }
    counts = {
        "requests": len(served),
        "unserved": outcome.unserved,
        "preemptions": outcome.preemptions,
        "waited_for_memory": outcome.waited_for_memory,
        "length_s": outcome.ends_s,
        "plans": [
            {
                "from_s": plan.from_s,
                "partition": plan.partition,
                "status": plan.result.status.value,
                "instances": [
                    {"place": i.place, "request_class": i.request_class, "mode": i.mode, "count": i.count}
                    for i in plan.instances
                ],
            }
            for plan in plans
        ],
    }
    known = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    return labels | known | counts


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _quantile(values: Floats, percent: int) -> float:
    known = values[np.isfinite(values)]
    return float(np.quantile(known, percent / 100)) if known.size else float("nan")
