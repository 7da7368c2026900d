"""What a rank costs on top of its command: how long its shim takes to start it, and what it weighs.

    ./test --bench shim

Writes `results/benchmarks/shim.json`. Fails where the median start takes longer than
0.25 s, which leaves room for a busy machine, or a shim weighs more than 8 MB.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import psutil

from gpu_agent import shim
from gpu_agent.ranks import Launch, RankFolder
from tests.benchmarks.results import write_result

RUNS = 30
LIMIT_S, LIMIT_MB = 0.25, 8.0


def main() -> int:
    """Start ranks one after the other.

    Returns:
        0, or 1 if a limit was passed.
    """
    starts_s: list[float] = []
    weights_mb: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(RUNS):
            mark = Path(scratch) / f"ran-{number}"
            folder = RankFolder(Path(scratch) / f"rank-{number}")
            folder.path.mkdir()
            launch = Launch(["sh", "-c", f": > {mark}; sleep 60"], {"PATH": "/usr/bin:/bin"}, "/", 1.0)
            began_s = time.perf_counter()
            process = folder.launch(launch, shim.clock() + 60, 60.0)
            while not mark.exists():
                time.sleep(0.0005)
            starts_s.append(time.perf_counter() - began_s)
            weights_mb.append(psutil.Process(process.pid).memory_full_info().pss / 1e6)
            process.terminate()
            process.wait()
    found = {
        "runs": RUNS,
        "start_median_s": statistics.median(starts_s),
        "start_worst_s": max(starts_s),
        "pss_median_mb": statistics.median(weights_mb),
    }
    write_result("shim", found)
    print(
        f"start {found['start_median_s'] * 1e3:.1f} ms (worst {found['start_worst_s'] * 1e3:.1f} ms), "
        f"{found['pss_median_mb']:.1f} MB"
    )
    return int(found["start_median_s"] > LIMIT_S or found["pss_median_mb"] > LIMIT_MB)
