"""What is changed in a real Slurm beyond holds and requeues: sizes, what it refuses, and changes by slurmrestd."""

from __future__ import annotations

import time

import pytest

from services.scheduler.engines.decisions import decide, requeued, shrunk
from tests.support import slurm
from tests.support.lab import the_lab
from tests.support.slurm_bridge import Site

assert the_lab  # the fixture
pytestmark = [
    pytest.mark.usefixtures("the_lab"),
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
    pytest.mark.xdist_group("slurm_changes"),
    pytest.mark.slow,
]


@pytest.mark.parametrize("version", [36, 37, 38])
async def test_slurmrestd_is_read_and_changes_what_it_can(site: Site, version: int) -> None:
    """A job is held, says why in its comment, is released and ends; then slurmrestd dies, and another one does, too."""
    now_s = time.time()
    site.grid.set([now_s - 3_600, now_s + 40, now_s + 3_600], [600.0, 10.0, 600.0])
    await site.policy("wait-awhile")
    with site.lab.slurmrestd(version) as settings:
        await site.steered(**settings)
        number = site.lab.sbatch("sleep 1", "--time=10")

        async def says_why() -> bool:
            return "waits:greener_hours" in site.lab.job(number).get("Comment", "")

        await site.until(says_why, "its comment says what it waits for")
        (engine,) = await site.rows("SELECT version FROM engines")
        assert engine["version"].endswith(f"openapi/v0.0.{version}")
        await site.until_states(**{f"_{number}": "COMPLETED"}, within_s=150)
        assert int(site.lab.job(number)["StartTime"]) >= now_s + 39

    later = site.lab.sbatch("sleep 1", "--time=10")
    await site.until_states(**{f"_{later}": "COMPLETED"}, within_s=60)
    assert "slurmrestd.silent" in site.log

    async def both_known() -> bool:
        return [(await site.job(each)).get("state") for each in (number, later)] == ["succeeded"] * 2

    await site.until(both_known, "both ends are known")


async def test_a_job_on_two_nodes_is_made_smaller_as_it_runs_and_starts_on_one(site: Site) -> None:
    """It holds both nodes and loses one; a second job is started on fewer nodes than it was submitted for."""
    await site.policy("fifo", gang="max")
    await site.steered()
    options = ["--nodes=2", "--requeue", "--time=10", "--comment=wattshift:shrink,gpus=8-16"]
    wide = site.lab.sbatch("sleep 300", *options, gpus=8)
    await site.until_states(**{f"_{wide}": "RUNNING"})

    async def runs_on(gpus: int) -> bool:
        rows = await site.rows(
            "SELECT gpus FROM allocations a JOIN jobs j ON j.id = a.job_id WHERE a.state = 'running'"
        )
        return [row["gpus"] for row in rows] == [gpus]

    await site.until(lambda: runs_on(16), "it is known to hold both nodes")
    job = await site.job(wide)
    async with site.database.transaction() as connection:
        await decide(connection, {job["id"]: shrunk(8, 0.0, "shrinks:scale_in")})
    await site.until(lambda: runs_on(8), "it is known to hold one")
    found = site.lab.job(wide)
    assert (found["JobState"], found["NumNodes"], found["Restarts"]) == ("RUNNING", "1", "0")
    assert (await site.job(wide))["generation"] == 1
    assert "deviation_other_size" not in {row["what"] for row in await site.rows("SELECT what FROM engine_days")}

    await site.policy("fifo", gang="min")
    narrow = site.lab.sbatch("sleep 1", *options, gpus=8)
    await site.until_states(**{f"_{narrow}": "COMPLETED", f"_{wide}": "RUNNING"})
    assert site.lab.job(narrow)["NumNodes"] == "1"


async def test_what_slurm_refuses_is_known_in_its_words(site: Site) -> None:
    await site.steered()
    number = site.lab.sbatch("sleep 300", "--no-requeue")
    await site.until_states(**{f"_{number}": "RUNNING"})

    async def refused() -> str:
        query = "SELECT report ->> 'refused' AS words FROM engine_jobs WHERE external_id LIKE $1 || '@%'"
        return (await site.rows(query, number))[0]["words"]

    await site.until(lambda: site.rows("SELECT 1 FROM allocations WHERE state = 'running'"), "it is known to run")
    async with site.database.transaction() as connection:
        await decide(connection, {(await site.job(number))["id"]: requeued(0.0, "")})
    await site.until(refused, "its refusal is known")
    assert await refused() == "Requested operation is presently disabled"
    assert site.lab.state(number) == "RUNNING"
