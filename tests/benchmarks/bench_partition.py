"""A fleet of 64 GPUs split between 8 applications, and their configurations.

    ./test --bench partition

EfficientNet on H200s at different loads, SLAs and weights, every second application with an accuracy floor. CPU time of
this process, one thread. Fails where the split takes more than ``SPLIT_S``, or the whole more than ``WHOLE_S``: a plan
is made when the grid changes, which is every few minutes. Fails as well where an application ends further than
``DISTANCE_PCT`` below its bound.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from lab.inference.profiles import read_application
from services.core.domain.solving import Progress
from services.core.domain.units import J_PER_KWH
from services.core.policies.clover.anneal import AnnealingConfig
from services.core.policies.clover.partition import Demand, Fleet, partition
from tests.benchmarks.results import write_result

GPUS, APPLICATIONS = 64, 8
SPLIT_S, WHOLE_S = 20.0, 60.0
DISTANCE_PCT = 0.5


def main() -> int:
    """Measure, print and write the figures; return 1 if a limit is exceeded."""
    application = read_application("efficientnet")
    one_gpu_per_s = application.capacity_per_s(application.base(1).weights)
    demands = [
        Demand(
            f"app-{at}",
            application,
            rate_per_s=0.9 * (1 + at) * one_gpu_per_s,
            carbon_weight=0.3 + 0.05 * at,
            max_accuracy_loss_pct=None if at % 2 else 2.0,
            sla_p95_s=0.010 + 0.004 * at,
        )
        for at in range(APPLICATIONS)
    ]
    fleet = Fleet(GPUS, (0,) * GPUS, 200 / J_PER_KWH, 200 / J_PER_KWH)
    split_s = 0.0
    began_s = time.process_time()

    def report(progress: Progress) -> None:
        nonlocal split_s
        if "sharing out" in progress.doing:
            split_s = time.process_time() - began_s

    shares, _ = partition(demands, fleet, 1, AnnealingConfig(), report=report)
    whole_s = time.process_time() - began_s
    kept = sum(share.keeps_limits for share in shares)
    gaps = [share.bound - share.objective for share in shares if share.bound is not None]
    figures = {
        "gpus": GPUS,
        "applications": APPLICATIONS,
        "split_s": round(split_s, 2),
        "whole_s": round(whole_s, 2),
        "keep_limits": kept,
        "largest_distance_to_bound_pct": round(float(np.max(gaps)), 3),
    }
    print(", ".join(f"{name} {value}" for name, value in figures.items()))
    write_result("partition", figures)
    too_slow = split_s > SPLIT_S or whole_s > WHOLE_S
    return int(too_slow or kept < APPLICATIONS or float(np.max(gaps)) > DISTANCE_PCT)


if __name__ == "__main__":
    sys.exit(main())
