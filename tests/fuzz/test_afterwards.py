"""An installation that was walked over: its dashboard shows what its API says, and a backup of it is all of it."""

from __future__ import annotations

import asyncio
import csv
import os
import string
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.routes import read_routes
from services.standalone.processes import SERVICES
from services.standalone.stack import Stack
from tests.fuzz.asking import FOLLOWED, WITHIN_S
from tests.fuzz.pages import pages_agree
from tests.fuzz.walk import walked
from tests.fuzz.world import installed
from tests.support.servers import ON_PORTS, ROOT, scratch_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]
STEPS = 200
NOW = ("/metrics", "/v1/nodes", "/v1/plans", "/v1/topology", "/v1/reports", "/v1/invariants", "/v1/shares",
       "/v1/jobs:counts", "/v1/jobs/{job_id}/explain", "/v1/policies/active", "/v1/apps/{app}/report")  # fmt: skip
"""What tells of the moment, of nodes, all of which count as lost, or of energy that still came in."""
CHANGES = {"generation", "state", "reason", "detail", "expected_start_at", "placement", "gpus", "footprint",
           "last_success_at"}  # fmt: skip


async def wattshift(*words: object, **environment: str) -> None:
    command = [sys.executable, "-m", "services.cli.main", *map(str, words)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=os.environ | environment)
    assert await process.wait() == 0, words


async def read(http: httpx.AsyncClient, ids: dict[str, str]) -> dict[str, Any]:
    """Return what each route that only reads answers of what there is, and the lines of the ledger."""
    found = dict[str, Any]()
    for route in read_routes():
        known = all(name in ids for _, name, _, _ in string.Formatter().parse(route.path) if name)
        if route.method == "GET" and known and route.path not in FOLLOWED and not route.path.startswith(NOW):
            answer = await http.get(route.path.format_map(ids))
            is_json = answer.is_success and "json" in answer.headers["content-type"]
            found[route.path] = answer.json() if is_json else answer.status_code
    found["lines"] = {tuple(row) for row in csv.reader((await http.get("/v1/reports/lines")).text.splitlines())}
    return found


def differences(before: Any, after: Any, where: str) -> Iterator[str]:
    """Yield where two answers differ, but for what a restore changes."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted({*before, *after} - CHANGES):
            yield from differences(before.get(name), after.get(name), f"{where}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for at, both in enumerate(zip(before, after, strict=True)):
            yield from differences(*both, f"{where}[{at}]")
    elif before != after:
        yield f"{where}: {str(before)[:300]} -> {str(after)[:300]}"


async def test_pages_show_what_the_api_says_and_a_restore_brings_all_of_it_back() -> None:
    with scratch_folder() as folder:
        file, data = folder / "backup.tar", folder / "data"
        async with installed() as world, httpx.AsyncClient(timeout=WITHIN_S) as http:
            url, router = world.stack.gateway_url, world.urls["router"]
            walk = await walked(url, http, world.urls["telemetry"], world.admin, 5, STEPS)
            await pages_agree(url, world.admin["authorization"].removeprefix("Bearer "))
            user = next(key for key in walk.live_keys("user") if not key.project)
            sent = {"file": ("requests.jsonl", b'{"custom_id": "a"}\n')}
            stored = await http.post(f"{router}/v1/files", headers=user.headers, files=sent, data={"purpose": "batch"})
            assert stored.is_success, stored.text
            ids = {**world.ids, **world.objects, "job_id": world.held_job}
            async with httpx.AsyncClient(base_url=url, headers=world.admin, timeout=WITHIN_S) as admin:
                before = await read(admin, ids)
            await wattshift("backup", file, "--data-dir", world.stack.folder.path)
        await wattshift("restore", file, "--data-dir", data, TELEMETRY_LEASE_TTL_S="0.1")
        async with (
            Stack(data, nodes="", services=SERVICES, workers=(), env=ON_PORTS) as stack,
            httpx.AsyncClient(base_url=stack.gateway_url, timeout=WITHIN_S, headers=world.admin) as admin,
        ):
            after = await read(admin, ids)
            assert before.pop("lines") <= after["lines"]
            assert [each for path in before for each in differences(before[path], after[path], path)] == []
            for key in walk.keys:
                answer = await admin.get("/v1/whoami", headers=key.headers)
                assert answer.status_code == (200 if key.ends_s == float("inf") else 401), answer.text
            where = f"{stack.urls['router']}/v1/files/{stored.json()['id']}/content"
            assert (await admin.get(where, headers=user.headers)).content == sent["file"][1]
