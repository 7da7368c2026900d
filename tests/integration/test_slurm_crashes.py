"""slurmctld killed with -9: whatever it forgets, a job ends once for us."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support import slurm
from tests.support.slurm_bridge import Site

pytestmark = [
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
    pytest.mark.xdist_group("slurm_crashes"),
    pytest.mark.slow,
]


def a_shared_file(site: Site) -> Path:
    """Return an empty file that jobs of all users may write to."""
    ran = site.lab.folder / "run" / f"ran-{len(list((site.lab.folder / 'run').iterdir()))}"
    ran.touch()
    ran.chmod(0o666)
    return ran


async def test_a_job_that_has_ended_and_waits_again_after_a_crash_does_not_run_twice(
    site: Site, tmp_path: Path
) -> None:
    """slurmctld saves its state some seconds after a change: killed before that, it knows no end."""
    ran = a_shared_file(site)
    await site.steered()
    number = site.lab.sbatch(f"sleep 1; echo ran >> {ran}", "--requeue")

    async def is_over() -> bool:
        return (await site.job(number)).get("state") == "succeeded"

    await site.until(is_over, "it has run")
    ended = await site.job(number)
    site.lab.kill_controller()
    site.lab.start_controller()
    was = site.lab.state(number)

    async def is_over_in_slurm() -> bool:
        return site.lab.state(number) in ("COMPLETED", "CANCELLED")

    await site.until(is_over_in_slurm, f"it is over there, too; it was {was} after the crash")
    await asyncio.sleep(3)
    assert await site.job(number) == ended
    assert len(await site.rows("SELECT 1 FROM jobs")) == 1
    assert ran.read_text() == "ran\n"
    counted = await site.rows("SELECT count FROM engine_days WHERE what = 'deviation_rolled_back'")
    assert len(counted) == int(was in ("PENDING", "RUNNING"))
