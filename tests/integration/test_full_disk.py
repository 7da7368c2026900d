"""A whole installation on a disk of 400 MB: jobs print more than fits, and something else fills the rest."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from services.cli.commands import CliError
from services.standalone import postgres, stack
from tests.integration.conftest import UNUSED, Installation
from tests.support.servers import scratch_folder, wait_until

LEASE_S = 6.0


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 400 MB."""
    with scratch_folder() as folder:
        folder.chmod(0o755)
        disk = folder / "disk"
        disk.mkdir(mode=0o755)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m,mode=755", "none", disk], check=False).returncode:
            pytest.skip("mounting a small file system takes root")
        try:
            yield disk
        finally:
            subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")
def test_a_full_disk_neither_repeats_nor_loses_jobs(small_disk: Path) -> None:
    lease = {"TELEMETRY_LEASE_TTL_S": str(LEASE_S)}
    installation = Installation(small_disk / "data", "2x2", without=(*UNUSED, "worker"), **lease)
    installation.up()
    try:
        loud = _submit(installation, "head", "-c", "600M", "/dev/zero")
        (ended,) = installation.wait_for_ends([loud], 60)
        assert (ended["state"], ended["exit_code"]) == ("failed", -25)
        assert "of a disk on which" in ended["detail"]

        brief = _submit(installation, "sleep", "5")
        installation.wait_for(brief, lambda job: job["state"] == "running")
        ballast = small_disk / "ballast"
        subprocess.run(["sh", "-c", f"cat /dev/zero > {ballast}"], check=False, capture_output=True)
        with pytest.raises(CliError, match="nearly full"):
            _submit(installation, "true")
        wait_until(lambda: stack.read_status(installation.folder).state == "degraded", 30)
        time.sleep(LEASE_S + 6)  # the job ends, and leases do too, as far as heartbeats cannot be stored
        ballast.unlink()
        (ended,) = installation.wait_for_ends([brief], 60)
        assert (ended["state"], ended["exit_code"]) == ("succeeded", 0)

        wait_until(lambda: not any(node["closed"] for node in installation.nodes()), 60)
        last = _submit(installation, "true")
        assert installation.wait_for_ends([last], 60)[0]["state"] == "succeeded"
        assert asyncio.run(_gangs(installation)) == {loud: 1, brief: 1, last: 1}, "no job ran twice"
    finally:
        installation.down()


async def _gangs(installation: Installation) -> dict[str, int]:
    """Return how many gangs each job had."""
    password = (installation.folder / "secrets" / "postgres").read_text().strip()
    connection = await asyncpg.connect(postgres.url(password, Path(installation.process("postgres").socket).parent))
    try:
        return dict(await connection.fetch("SELECT job_id, count(*) FROM allocations GROUP BY 1"))
    finally:
        await connection.close()


def _submit(installation: Installation, *command: str) -> str:
    spec = {"name": "a", "command": list(command), "grace_s": 1}
    return str(installation.gateway.call("POST", "/v1/jobs", body=spec)["id"])
