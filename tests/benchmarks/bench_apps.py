"""Requests through the door of applications beside those through the door of models, by one router process and by two.

The load generator and the mock of all servers are pinned to core 0, the router to core 1 (two processes: to both). The
processor time that the router takes per request does not depend on who else uses the machine; the rates do.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_router import BODY, KEY, PATH, answers, cpu_s, mock, process, router_environment
from tests.benchmarks.load import Load, measure
from tests.benchmarks.mock_model_server import APP
from tests.benchmarks.results import write_result
from tests.support.ports import Ports
from tests.support.servers import http_ready, valkey_server, wait_until

DURATION_S = float(os.environ.get("BENCH_DURATION_S", "8"))
INFERENCE = {"inputs": [{"name": "image", "shape": [1, 4], "datatype": "FP32", "data": [0.1, 0.2, 0.3, 0.4]}]}
KINDS = {
    "models": (PATH, BODY),
    "applications, v2": (f"/v2/models/{APP}/infer", INFERENCE),
    "applications, plain": (f"/apps/{APP}/label", INFERENCE),
}
MOST_TIMES_THE_MODELS = 1.0
"""An inference is not to cost the router more than a completion, whose prompt it counts and whose answer it reads."""


def main() -> int:
    """Measure, print, write JSON; 1 where the target is missed."""
    with tempfile.TemporaryDirectory() as folder, valkey_server() as redis_url:
        figures = run(Path(folder), redis_url)
    print(json.dumps(figures, indent=2))
    write_result("apps", figures)
    return 0 if figures["is_target_met"] else 1


def run(folder: Path, redis_url: str) -> dict[str, Any]:
    """Return all figures."""
    ports = Ports()
    mock_port, router_port = (ports.take(29_850 + number) for number in range(2))
    figures: dict[str, Any] = {"duration_s": DURATION_S, "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
    with process(mock(mock_port), {}, core="0"):
        wait_until(lambda: answers(mock_port))
        for name, workers in (("one process", 1), ("two processes", 2)):
            environment = router_environment(folder, mock_port, router_port, workers) | {"REDIS_URL": redis_url}
            with process(["-m", "services.router.app"], environment, core="1" if workers == 1 else "0,1") as pid:
                wait_until(lambda: http_ready(("127.0.0.1", router_port)))
                figures[name] = {kind: one(router_port, pid, *asked) for kind, asked in KINDS.items()}
    ports.release()
    found = figures["one process"]
    figures["is_target_met"] = (
        found["applications, v2"]["cpu_us_per_request"] <= MOST_TIMES_THE_MODELS * found["models"]["cpu_us_per_request"]
    )
    return figures


def one(port: int, pid: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return requests a second of 32 connections, their latencies, and the router's processor time for each."""
    before = cpu_s(pid)
    load = Load("127.0.0.1", port, path, KEY, json.dumps(body), 32, DURATION_S, 0, status=200)
    closed = measure(load)
    used = cpu_s(pid) - before
    return asdict(closed) | {
        "cpu_us_per_request": 1e6 * used / max(1, closed.requests),
        "per_cpu_s": closed.requests / used,
    }


if __name__ == "__main__":
    sys.exit(main())
