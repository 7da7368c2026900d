"""From `wattshift up` to the first job accepted: with an empty data folder, and with one in use.

The target is 10 s for the empty one, which makes the database and its schema too.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from services.cli.client import Gateway
from services.standalone import stack
from tests.benchmarks.results import write_result
from tests.support.servers import scratch_folder

MOST_S = 10.0
JOB = {"name": "first", "command": ["true"]}


def start_to_first_job_s(folder: Path) -> float:
    """Start everything in ``folder``, submit a job, stop everything; return the seconds until it was accepted."""
    began_s = time.perf_counter()
    started = stack.up(folder, nodes="2x4")
    try:
        gateway = Gateway(started.gateway_url, (folder / "admin.key").read_text().strip())
        gateway.call("POST", "/v1/jobs", body=JOB)
        return time.perf_counter() - began_s
    finally:
        stack.down(folder)


def main() -> int:
    """Measure, print and write the result; 1 if the target is missed."""
    with scratch_folder() as folder:
        empty_s, used_s = (start_to_first_job_s(folder / "data") for _ in range(2))
    print(f"to the first job accepted: {empty_s:.1f} s with an empty data folder, {used_s:.1f} s with one in use")
    write_result("startup", {"empty_data_folder_s": round(empty_s, 2), "used_data_folder_s": round(used_s, 2)})
    return int(empty_s > MOST_S)


if __name__ == "__main__":
    sys.exit(main())
