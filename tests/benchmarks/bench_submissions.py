"""Durable submissions through the whole stack: client, gateway, admission, PostgreSQL with fsync, Valkey.

Every process is a real one; generator, services and servers share the machine's cores. `single`: 64 connections, one
job per request, closed. `batch`: 64 connections, 100 jobs per request, offered at a fixed rate, which is what a latency
can be told for: closed, 64 requests of 100 jobs are always under way, and by Little's law each takes 6,400 jobs' time.
`batch_closed` is that load, for the most the system carries.
"""

import json
import os
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.load import Load, Result, measure
from tests.benchmarks.results import write_result
from tests.support.servers import fresh_database, postgres_server, valkey_server
from tests.support.services import Services, services

CONNECTIONS = 64
BATCH = 100
LEAST_SINGLE_PER_S = 700
LEAST_BATCHED_JOBS_PER_S = 5_000
OFFERED_JOBS_PER_S = 5_200
MOST_P99_MS = 250
DURATION_S = float(os.environ.get("BENCH_DURATION_S", "10"))

JOB = {
    "name": "bench-%d",
    "command": ["python", "train.py", "--epochs", "90", "--data", "/data/imagenet"],
    "environment": {"NCCL_DEBUG": "WARN"},
    "gpus": {"min": 1, "max": 4},
    "work": {"total": 90, "unit": "epochs"},
    "flexibility_s": 86400,
    "project": "vision",
    "labels": {"team": "perception", "tier": "batch"},
}


def main() -> int:
    """Measure, print, write JSON; 1 where a target is missed."""
    with ExitStack() as stack:
        found = started(stack)
        lift_limits(found)
        results = {
            "single": _run(found, "single", "/v1/jobs", json.dumps(JOB)),
            "batch": _run(found, "batch", "/v1/jobs:batch", _batch(), OFFERED_JOBS_PER_S / BATCH),
            "batch_closed": _run(found, "closed", "/v1/jobs:batch", _batch()),
        }
    single, batch = results["single"], results["batch"]
    targets = {
        f"single >= {LEAST_SINGLE_PER_S}/s": single.per_s >= LEAST_SINGLE_PER_S,
        f"single p99 < {MOST_P99_MS} ms": single.p99_ms < MOST_P99_MS,
        f"batches >= {LEAST_BATCHED_JOBS_PER_S} jobs/s": batch.per_s * BATCH >= LEAST_BATCHED_JOBS_PER_S,
        f"batches p99 < {MOST_P99_MS} ms": batch.p99_ms < MOST_P99_MS,
        "nothing refused": not any(result.failed for result in results.values()),
    }
    _report(results, targets)
    return 0 if all(targets.values()) else 1


def started(stack: ExitStack) -> Services:
    database_url = fresh_database(stack.enter_context(postgres_server()))
    data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    found = stack.enter_context(services(data, database_url, stack.enter_context(valkey_server())))
    stack.enter_context(found.started("services.admission.app"))
    # The tenant's limits are lifted before the load: the gateway must not go by the old ones beyond the warm-up.
    stack.enter_context(found.started("gateway.app", ready_path="/healthz", GATEWAY_KEY_MAX_AGE_S="1"))
    return found


def lift_limits(found: Services) -> None:
    limits = {"max_active_jobs": 100_000_000, "requests_per_s": 1_000_000, "burst": 1_000_000}
    request = urllib.request.Request(
        f"{found.urls['GATEWAY']}/v1/tenants/default",
        data=json.dumps({"limits": limits}).encode(),
        method="PATCH",
        headers={"authorization": f"Bearer {found.admin_key()}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request):
        pass


def _batch() -> str:
    return json.dumps({"jobs": [JOB] * BATCH})


def _run(found: Services, name: str, path: str, body: str, per_second: float = 0) -> Result:
    host, _, port = found.urls["GATEWAY"].removeprefix("http://").partition(":")
    load = Load(
        host=host,
        port=int(port),
        path=path,
        key=found.admin_key(),
        body=body,
        connections=CONNECTIONS,
        duration_s=DURATION_S,
        warm_up_s=3,
        per_second=per_second,
        run=name,
    )
    result = measure(load)
    jobs = BATCH if "batch" in path else 1
    print(
        f"{name:8} {result.per_s:8.0f} requests/s {result.per_s * jobs:8.0f} jobs/s  p50 {result.p50_ms:6.1f} ms  "
        f"p99 {result.p99_ms:6.1f} ms  longest {result.longest_ms:6.1f} ms  failed {result.failed}"
        f" {result.first_failure}",
        flush=True,
    )
    return result


def _report(results: dict[str, Result], targets: dict[str, bool]) -> None:
    for target, met in targets.items():
        print(f"{'met   ' if met else 'MISSED'} {target}")
    figures = {
        "connections": CONNECTIONS,
        "jobs_per_batch": BATCH,
        "offered_jobs_per_s": OFFERED_JOBS_PER_S,
        "duration_s": DURATION_S,
        "results": {name: asdict(result) for name, result in results.items()},
        "targets": targets,
    }
    write_result("submissions", figures)


if __name__ == "__main__":
    sys.exit(main())
