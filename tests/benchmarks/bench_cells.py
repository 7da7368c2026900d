"""Jobs that go through a home installation to five cells, which run them for 20 s: CPU seconds of home per job.

    ./test --bench cells

Home is real: gateway, admission, PostgreSQL with fsync, Valkey; it has no GPUs of its own. The cells are one process
that answers as five gateways would, each with 1,200 GPUs, and is not counted; nor is the load, which submits jobs at a
fixed rate. Equal jobs are of one kind; of others each is asked about by itself. Measured is the time from the first job
until the energy of all has been read, a minute after their ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import asyncpg
from aiohttp import web

from tests.benchmarks.bench_submissions import lift_limits
from tests.benchmarks.load import Load, measure
from tests.benchmarks.results import write_result
from tests.support.ports import Ports
from tests.support.servers import fresh_database, postgres_server, scratch_folder, valkey_server
from tests.support.services import Services, services

CELLS, GPUS, RUNS_S = 5, 1_200, 20.0
PER_S, DURATION_S = 50, float(os.environ.get("BENCH_DURATION_S", "40"))
JOB = {"command": ["python", "train.py"], "cells": ["any"], "gpus": {"min": 1}}
KINDS = {
    "equal": {**JOB, "name": "run-%d"},
    "each another": {**JOB, "name": "run", "command": ["train.py", "--lr", "%d"]},
}
RUN = {"signal": "average_direct", "intensity_gco2_per_kwh": 1.0}


class Cells:
    """Gateways of cells whose jobs wait for a second and run for ``RUNS_S``."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, dict[str, Any]]] = [{} for _ in range(CELLS)]
        self.numbers = itertools.count()

    def seen(self, job: dict[str, Any]) -> dict[str, Any]:
        age_s = time.time() - job["at_s"]
        state = "queued" if age_s < 1 else "running" if age_s < RUNS_S else "succeeded"
        ended = {"ended_at": f"{time.strftime('%FT%TZ', time.gmtime(job['at_s'] + RUNS_S))}"} if age_s > RUNS_S else {}
        used = min(age_s, RUNS_S) if age_s > 1 else 0.0
        footprint = {"energy_j": 300 * used, "carbon_gco2": used, "gpu_s": used}
        known = {"id": job["id"], "spec": {"labels": job["labels"]}, "state": state, "gpus": 1, **ended}
        return {**known, "generation": int(age_s >= 1), "footprint": footprint}

    async def answer(self, request: web.Request) -> web.Response:
        _, at, path = request.path.split("/", 2)
        jobs, made_s = self.jobs[int(at)], time.time()
        if path == "v1/whoami":
            found: Any = {"tenant_id": "home", "role": "user", "key_id": "k", "project": "home", "name": "home"}
        elif path == "v1/jobs:estimate":
            free = GPUS - sum(made_s - each["at_s"] < RUNS_S for each in jobs.values())
            now = {**RUN, "starts_at": time.strftime("%FT%TZ"), "zone": f"Z{at}"}
            now["carbon_gco2_per_hour"] = 10.0 + (int(at) * 7 + made_s // 10) % CELLS
            counts = {"gpus": 1, "free_gpus": free, "suitable_gpus": GPUS, "waiting_jobs": 0}
            found = {
                "policy": "joint",
                "starts_now": free > 0,
                "placement": [],
                "assumptions": [],
                "now": now,
                **counts,
            }
        elif path == "v1/jobs" and request.method == "POST":
            spec = await request.json()
            job_id = f"job_{next(self.numbers):026d}"
            jobs[job_id] = {"id": job_id, "at_s": made_s, "labels": spec["labels"]}
            return web.json_response({"id": job_id}, status=201)
        elif path == "v1/jobs":
            live = [each for each in jobs.values() if made_s - each["at_s"] < RUNS_S]
            begin = int(request.query.get("cursor", 0))
            items = [self.seen(each) for each in live[begin : begin + 500]]
            found = {"items": items, "next_cursor": str(begin + 500) if begin + 500 < len(live) else None}
        elif path.endswith("/footprint"):
            found = {
                "job_id": "j",
                "footprint": {},
                "zone": f"Z{at}",
                "signal": RUN["signal"],
                "pue": 1.2,
                "intervals": [],
            }
        else:
            found = self.seen(jobs[path.split("/")[2]])
        return web.json_response(found)


def serve(port: int) -> None:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", Cells().answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def main() -> None:
    """Measure, print and write the result."""
    figures = {kind: _figures(json.dumps(job)) for kind, job in KINDS.items()}
    for kind, found in figures.items():
        print(f"{kind:<14}" + "  ".join(f"{name} {value:,.3f}" for name, value in found.items()))
    write_result("cells", figures)


def _figures(body: str) -> dict[str, float]:
    with ExitStack() as stack:
        url = fresh_database(stack.enter_context(postgres_server()))
        folder = stack.enter_context(scratch_folder())
        home = stack.enter_context(services(folder, url, stack.enter_context(valkey_server())))
        stack.enter_context(home.started("services.admission.app"))
        stack.enter_context(home.started("gateway.app", ready_path="/healthz", GATEWAY_KEY_MAX_AGE_S="1"))
        lift_limits(home)
        port = Ports().take(27_500 + os.getpid() % 400)
        others = subprocess.Popen([sys.executable, "-m", "tests.benchmarks.bench_cells", str(port)])
        stack.callback(others.wait)
        stack.callback(others.kill)
        for at in range(CELLS):
            _add(home, f"c{at}", f"http://127.0.0.1:{port}/{at}")
        host, _, gateway = home.urls["GATEWAY"].removeprefix("http://").partition(":")
        load = Load(host, int(gateway), "/v1/jobs", home.admin_key(), body, 16, DURATION_S, 0, PER_S)
        idle_s, began_s = _cpu_s(others.pid), time.perf_counter()
        sent = measure(load)
        ended = asyncio.run(_all_ended(url))
        took_s, used_s = time.perf_counter() - began_s, _cpu_s(others.pid) - idle_s
        return {
            "jobs": float(ended["jobs"]),
            "not taken": float(sent.failed),
            "submitted per s": sent.per_s,
            "placed after s, p50": ended["p50_s"],
            "placed after s, longest": ended["longest_s"],
            "until all is read, s": took_s,
            "CPU s of home per job": used_s / ended["jobs"],
        }


def _add(home: Services, name: str, url: str) -> None:
    headers = {"authorization": f"Bearer {home.admin_key()}", "content-type": "application/json"}
    body = json.dumps({"name": name, "url": url, "key": "a-key"}).encode()
    for _ in range(100):
        try:
            urlopen(Request(f"{home.urls['GATEWAY']}/v1/cells", body, headers)).close()
        except HTTPError:  # it begins to serve
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(url)


PLACED = """
SELECT (SELECT count(*) FROM cell_jobs WHERE state <> 'over') AS live, count(*) AS jobs,
       coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY after_s), 0) AS p50_s,
       coalesce(max(after_s), 0) AS longest_s
  FROM jobs j LEFT JOIN LATERAL (
       SELECT extract(epoch FROM min(e.at) - j.submitted_at)::float8 AS after_s
         FROM job_events e WHERE e.job_id = j.id AND e.type = 'job.in_cell') placed ON true
"""


async def _all_ended(url: str) -> asyncpg.Record:
    database = await asyncpg.connect(url)
    try:
        while True:
            await asyncio.sleep(2)
            [found] = await database.fetch(PLACED)
            if not found["live"]:
                return found
    finally:
        await database.close()


def _cpu_s(besides: int) -> float:
    """Return what this process's descendants have used, but for one and the load."""
    parents, used = dict[int, int](), dict[int, float]()
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            try:
                after_name = (each / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(each.name)] = int(after_name[1])
            used[int(each.name)] = sum(map(int, after_name[11:15])) / os.sysconf("SC_CLK_TCK")
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine - {besides}:
        mine |= more
    return sum(used[pid] for pid in mine - {os.getpid()})


if __name__ == "__main__":
    serve(int(sys.argv[1]))
