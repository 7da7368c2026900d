"""Carbon bounds to ask for: a small one, and one that takes a worker a few seconds."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

START = datetime(2026, 3, 1, tzinfo=UTC)


def points(intensities: list[float], step: timedelta = timedelta(hours=1)) -> list[dict[str, Any]]:
    return [
        {
            "start_at": (START + index * step).isoformat(),
            "end_at": (START + (index + 1) * step).isoformat(),
            "gco2_per_kwh": value,
        }
        for index, value in enumerate(intensities)
    ]


def a_bound(*intensities: float, **changes: Any) -> dict[str, Any]:
    """4 GPUs, 6 GPU-hours of 500 W: by default 400 g, four of them in the hour of 100 g and two in that of 200."""
    series = {"signal": "average_direct", "points": points(list(intensities or (300, 100, 200)))}
    body = {"intensity": series, "capacity_gpus": 4, "work": [{"gpu_hours": 6, "power_w": 500}]}
    return {key: value for key, value in {**body, **changes}.items() if value is not None}


def a_long_bound(hours: int = 700, window_h: int = 24, seed: int = 0) -> dict[str, Any]:
    """A season of hourly cohorts, each with a day to run in: seconds of simplex."""
    curve = [200 + 100 * math.sin(hour / 24 * 2 * math.pi) + 40 * math.sin(1.7 * hour + seed) for hour in range(hours)]
    work = [
        {
            "gpu_hours": 5 + 25 * abs(math.sin(0.37 * hour + power + seed)),
            "power_w": power,
            "release_at": (START + timedelta(hours=hour)).isoformat(),
            "deadline_at": (START + timedelta(hours=hour + window_h)).isoformat(),
        }
        for hour in range(hours - window_h)
        for power in (320.0, 180.0)
    ]
    return a_bound(*curve, capacity_gpus=64, work=work, idle_power_w=50)
