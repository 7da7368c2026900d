"""Plans of pools to ask for: a small one, and one that takes a worker as long as it may."""

from __future__ import annotations

import random
from typing import Any

LONG_S = 6.0
"""How long a solver works on ``a_long_plan``: it could go on for minutes."""


def a_plan(*qps: float, **changes: Any) -> dict[str, Any]:
    """Hours of demand, by default of 20 requests/s, for instances that serve 10 each: at 1 kW and 100 g/kWh."""
    rates = list(qps or (20,))
    profile = {"mode": "small", "max_qps": 10, "power_w": 1_000, "ttft_ms": 100}
    asked = {"name": "all", "demand_qps": rates, "max_ttft_ms": 300, "profiles": [profile]}
    body = {
        "step_s": 3_600,
        "locations": [{"name": "here", "gpus": {"A100": 400}, "intensity": [100] * len(rates)}],
        "modes": [{"name": "small", "gpus": {"A100": 1}}],
        "partitions": [{"name": "one", "classes": [asked]}],
    }
    return {key: value for key, value in {**body, **changes}.items() if value is not None}


def a_long_plan(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Thirty places, six modes and nine classes, solved to the last instance, within ``LONG_S``."""
    drawn = random.Random(seed)
    modes = range(1, 7)
    places = [{"name": f"l{at}", "gpus": {"A100": 41}, "intensity": [drawn.randint(50, 600)]} for at in range(30)]
    classes = [
        {
            "name": f"c{at}",
            "demand_qps": [150 * (1 + drawn.random())],
            "max_ttft_ms": 300,
            "profiles": [
                {
                    "mode": f"m{gpus}",
                    "max_qps": 3 * gpus**0.9 * drawn.uniform(0.7, 1.3),
                    "power_w": 300 * gpus * drawn.uniform(0.8, 1.2),
                    "ttft_ms": 100,
                }
                for gpus in modes
            ],
        }
        for at in range(9)
    ]
    return {
        "locations": places,
        "modes": [{"name": f"m{gpus}", "gpus": {"A100": gpus}} for gpus in modes],
        "partitions": [{"name": "one", "classes": classes}],
        "gap": 0,
        "time_limit_s": LONG_S,
        **changes,
    }
