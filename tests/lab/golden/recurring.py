"""An hour of recurring jobs on 64 GPUs, predicted by the median of their groups, under A-SRPT and its baselines.

``python -m tests.lab.golden.recurring`` writes ``recurring.json`` anew; a commit that moves a number quotes it before
and after.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from lab.earlier_runs import EarlierRuns
from lab.foresight import learning
from services.simulator.engine import EngineOptions, simulate
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.workload import ClusterSpec

FILE = Path(__file__).parent / "recurring.json"
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "a-srpt": ("a-srpt", {}),
    "a-srpt, machine runs": ("a-srpt", {"machine": "runs"}),
    "a-srpt, tau 0, refined": ("a-srpt", {"tau": 0.0, "placement": "refined"}),
    "a-srpt, machine runs, speed 0.7": ("a-srpt", {"machine": "runs", "machine_speed": 0.7}),
    "wcs-duration, heavy-edge": ("wcs-duration", {"placement": "heavy-edge"}),
    **{name: (name, {}) for name in ("spjf", "spwf", "wcs-duration", "wcs-workload", "wcs-subtime")},
}


def metrics_of(policy: str, parameters: dict[str, object]) -> dict[str, object]:
    """Return a run's figures, and a fingerprint of when every job started."""
    jobs = read_jobs("a-srpt", start="2023-08-15", days=1 / 24, seed=1)
    result = simulate(
        policy,
        jobs,
        ClusterSpec.parse("8x8:V100"),
        read_carbon("GB", start="2023-08-15"),
        parameters=parameters,
        options=EngineOptions(rigid=True),
        predictor=learning(EarlierRuns("median")),
    )
    starts = json.dumps([round(each, 3) for each in result.columns.started_s.tolist()])
    return {
        "jobs": result.jobs,
        "unrunnable": result.unrunnable,
        "mean_jct_h": round(result.avg_jct_s / 3600, 4),
        "makespan_h": round(result.makespan_s / 3600, 4),
        "preemptions": result.preemptions,
        "starts": hashlib.sha256(starts.encode()).hexdigest()[:16],
    }


def main() -> None:
    """Write the metrics of every variant."""
    metrics = {name: metrics_of(*variant) for name, variant in VARIANTS.items()}
    FILE.write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
