"""One day of forty jobs on four nodes of two GPUs, or on three of four, and what each policy makes of it.

``python -m tests.golden.day`` writes ``metrics.json`` anew; a commit that moves a number quotes it before and after.
The jobs lie in ``jobs.csv``, so that they do not change with a random generator.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from pathlib import Path

import numpy as np

from services.core.accounting.completion import completion_times
from services.core.domain.units import J_PER_KWH
from tests.support.builders import a_node, hourly_curve, story
from tests.support.harness import Harness

HERE = Path(__file__).parent
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "fifo": ("fifo", {}),
    "las": ("las", {}),
    "las, widest gangs": ("las", {"gang": "max"}),
    "green": ("green", {}),
    "green without shifting": ("green", {"mu": 1.0}),
    "green on 1 GPU": ("green", {"fixed_gpus": 1}),
    "green on 2 GPUs": ("green", {"fixed_gpus": 2}),
    "green by GPU hours": ("green", {"carbon_factor": "gpu_seconds"}),
    "joint": ("joint", {}),
    "joint, hours may wait": ("joint", {"slack_s": 43_200.0}),
    "joint in order of submission, without limits": ("joint", {"order": "submitted", "limits": False}),
    "joint by an hour of 60 Wh, on nodes that stay up": ("joint", {"hour_wh": 60.0, "sleep_after_s": None}),
}
CLUSTERS = {"4x2": 4 * (2,), "3x4": 3 * (4,)}
"""GPUs by node."""
DAYS = {
    f"{name} on {cluster}": (*variant, cluster)
    for name, variant in VARIANTS.items()
    for cluster in (CLUSTERS if variant[0] == "joint" else ["4x2"])
}
INTENSITIES = [220 + 120 * math.cos(2 * math.pi * (hour - 19) / 24) for hour in range(24 * 14)]
"""gCO2/kWh by hour: dirtiest at 19:00, greenest at 07:00."""


def run(policy: str, parameters: dict[str, object], cluster: str) -> Harness:
    """Return the harness after the day's jobs have ended."""
    nodes = [a_node(f"n{at}", gpus=gpus) for at, gpus in enumerate(CLUSTERS[cluster])]
    harness = Harness(policy, parameters, nodes=nodes, curve=hourly_curve(INTENSITIES))
    with (HERE / "jobs.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            harness.submit(
                row["job"],
                work_s=float(row["work_s"]),
                at_s=float(row["at_s"]),
                min_gpus=int(row["min_gpus"]),
                max_gpus=int(row["max_gpus"]),
                scaling=float(row["scaling"]),
                gpu_power_w=float(row["gpu_power_w"]),
            )
    harness.run_until_idle()
    return harness


def metrics_of(harness: Harness) -> dict[str, object]:
    """Return what a report would show of a run, and a fingerprint of every decision in it."""
    jobs = list(harness.ended.values())
    times = completion_times(np.array([job.submitted_s for job in jobs]), np.array([job.ended_s for job in jobs]))
    stories = json.dumps([[at_s, story(plan)] for at_s, plan in harness.plans], sort_keys=True)
    return {
        "mean_jct_h": round(times.mean_s / 3600, 4),
        "p99_jct_h": round(times.p99_s / 3600, 4),
        "energy_kwh": round(sum(job.energy_j for job in jobs) / J_PER_KWH, 4),
        "carbon_kg": round(sum(job.carbon_gco2 for job in jobs) / 1000, 4),
        "preemptions": sum(job.preemptions for job in jobs),
        "rounds": len(harness.plans),
        "decisions": hashlib.sha256(stories.encode()).hexdigest()[:16],
    }


def main() -> None:
    """Write the metrics of every day."""
    metrics = {name: metrics_of(run(*day)) for name, day in DAYS.items()}
    (HERE / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
