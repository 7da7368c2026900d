"""An installation at work is backed up and restored elsewhere: every joule is there, and nothing runs twice."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg

from services.standalone import postgres, stack
from tests.integration.conftest import QUICK, UNUSED, Installation
from tests.integration.test_kills import check_ledger, submit_once
from tests.support.servers import ROOT, scratch_folder, wait_until

LEDGER = """
SELECT node_id, boot_id, sequence, owner, gpu_energy_j, cpu_energy_j, static_energy_j, carbon_gco2 FROM energy_usages
"""


def ask(folder: Path, query: str) -> list[tuple[Any, ...]]:
    async def fetch() -> list[tuple[Any, ...]]:
        address = stack.read_status(folder).socket_of("postgres")
        assert address
        connection = await asyncpg.connect(postgres.url((folder / "secrets" / "postgres").read_text(), address.parent))
        try:
            return [tuple(record) for record in await connection.fetch(query)]
        finally:
            await connection.close()

    return asyncio.run(fetch())


def wattshift(*words: object, **environment: str) -> str:
    command = [sys.executable, "-m", "services.cli.main", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_populated_installation_is_restored_with_its_ledger_to_the_joule(installation: Installation) -> None:
    ended, running = (submit_once(installation, 132 + 5 * number, steps) for number, steps in enumerate((20, 2_000)))
    installation.wait_for_ends([ended], 90)
    wait_until(lambda: installation.job(running)["state"] == "running")
    installation.wait_for(ended, lambda job: job["footprint"]["energy_j"] > 0)
    ledger = set(ask(installation.folder, LEDGER))
    assert len(ledger) > 10
    with scratch_folder() as folder:
        file, data = folder / "backup.tar", folder / "data"
        assert "it contains secrets" in wattshift("backup", file, "--data-dir", installation.folder)
        assert installation.job(running)["state"] == "running", "a backup stops nothing"
        installation.gateway.call("POST", f"/v1/jobs/{running}/cancel")

        said = wattshift("restore", file, "--data-dir", data, TELEMETRY_LEASE_TTL_S="0.1")

        assert "the jobs are queued again" in said
        restored = Installation(data, two_nodes="", without=(*UNUSED, "worker"))
        started = stack.up(data, nodes="", env=QUICK, without=(*UNUSED, "worker"))
        try:
            assert ledger <= set(ask(data, LEDGER)), "to the last bit; more were written until the backup"
            key = (data / "admin.key").read_text()
            assert key == (installation.folder / "admin.key").read_text()
            restored.gateway = type(installation.gateway)(started.gateway_url, key.strip())
            assert restored.job(ended)["state"] == "succeeded"
            again = restored.wait_for(running, lambda job: job["state"] == "queued")
            assert (again["generation"] > 1_000, again["restarts"]) == (True, 0)
            assert ask(data, "SELECT * FROM device_claims") == []
            assert ask(data, "SELECT id FROM allocations WHERE state <> 'ended'") == []
            check_ledger(restored)
        finally:
            stack.down(data)
