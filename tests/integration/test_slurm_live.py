"""Policies' decisions in a real Slurm, seen as its users see them. Needs root; installs Slurm where it is missing."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support import slurm
from tests.support.servers import scratch_folder
from tests.support.slurm import SlurmLab
from tests.support.slurm_bridge import Site, a_site

pytestmark = [pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()), pytest.mark.xdist_group("slurm")]


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    if problem := slurm.install():
        pytest.skip(problem)
    with scratch_folder() as folder:
        made = SlurmLab(folder / "lab", nodes=2)
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.fixture
async def site(lab: SlurmLab, postgres_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with a_site(lab, postgres_url, redis_url, tmp_path) as made:
        yield made
    lab.run("scancel", "--user=nobody", check=False)
    lab.run("scancel", "--user=daemon", check=False)
    lab.wait(lambda: not lab.run("squeue", "-h"), 30, "no job is left")


async def a_steered_site(site: Site, **settings: str) -> None:
    """Start the bridge and return once the control plane knows the nodes."""
    site.start_bridge(**settings)
    await site.until(lambda: site.rows("SELECT 1 FROM nodes WHERE id = 'slurm.gpu2'"), "the nodes are known")


def full(site: Site, script: str, *options: str, **more: str) -> str:
    """Submit a job that needs a whole node."""
    return site.lab.sbatch(script, "--requeue", *options, gpus=8, **more)


async def test_users_jobs_run_and_their_ends_are_known(site: Site) -> None:
    """What needs a real Slurm, and little time: mirrored, released, run, accounted for, or left alone."""
    await a_steered_site(site)
    good = site.lab.sbatch("echo $CUDA_VISIBLE_DEVICES; sleep 2", gpus=3)
    bad = site.lab.sbatch("exit 3")
    left = site.lab.sbatch("sleep 1", "--comment=wattshift:off", "--hold")
    await site.until_states(**{f"_{good}": "COMPLETED", f"_{bad}": "FAILED"})

    async def is_over() -> bool:
        return [(await site.job(number)).get("state") for number in (good, bad)] == ["succeeded", "failed"]

    await site.until(is_over, "both ends are known")
    assert (await site.job(bad))["exit_code"] == 3
    assert await site.job(left) == {}
    assert "AdminComment" not in site.lab.job(left)
    assert site.lab.job(left)["Comment"] == "wattshift:off"


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "length", "stops"), [("wait-awhile", 3, 0), ("joint", 40, 1)])
async def test_a_job_waits_for_a_green_hour_and_says_so_in_squeue(
    site: Site, policy: str, length: int, stops: int
) -> None:
    """Held at once, or, as ``joint`` starts what is new and looks again at its next round, requeued for it."""
    now_s = time.time()
    green_s = now_s + 60
    site.grid.set([now_s - 3_600, green_s, now_s + 3_600], [600.0, 10.0, 600.0])
    parameters = {"slack_s": 86_400.0, "hour_wh": 0.0, "limits": False} if policy == "joint" else {}
    await site.policy(policy, **parameters)
    await a_steered_site(site)
    waits = site.lab.sbatch(f"sleep {length}", "--time=10", "--requeue")
    at_once = site.lab.sbatch("sleep 3", "--comment=wattshift:off", "--time=10")

    async def says_why() -> bool:
        return "waits:greener_hours" in site.lab.job(waits).get("Comment", "")

    await site.until(says_why, "the job's comment says what it waits for")
    assert site.lab.state(waits) == "PENDING"
    if policy == "wait-awhile":
        assert "start:" in site.lab.job(waits)["Comment"]
    await site.until_states(**{f"_{at_once}": "COMPLETED"})
    await site.until_states(**{f"_{waits}": "COMPLETED"}, within_s=150)
    assert int(site.lab.job(waits)["StartTime"]) >= green_s - 1
    assert int(site.lab.job(waits)["Restarts"]) == stops


@pytest.mark.slow
async def test_green_requeues_jobs_that_have_emitted_for_those_that_have_not(site: Site) -> None:
    """GREEN's lower queue goes by what jobs have emitted: the ledger, which has no time to fill here, is filled."""
    await site.policy("green")
    await a_steered_site(site)
    numbers = [full(site, "sleep 300") for _ in range(4)]

    async def two_run() -> bool:
        return len(await site.rows("SELECT 1 FROM jobs WHERE state = 'running'")) == 2

    await site.until(two_run, "two jobs run")
    await site.rows(
        "INSERT INTO job_footprints (job_id, energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s) "
        "SELECT id, 1e7, 1e7, 1e7, 1e6, 1e4 FROM jobs WHERE state = 'running' RETURNING 1"
    )

    async def the_others_run() -> bool:
        rows = await site.rows("SELECT preemptions, state FROM jobs WHERE external_id IS NOT NULL ORDER BY preemptions")
        return [tuple(row) for row in rows] == [(0, "running")] * 2 + [(1, "queued")] * 2

    await site.until(the_others_run, "the other two have their turn", 120)
    found = [site.lab.job(number) for number in numbers]
    assert (
        sorted((job["JobState"], job["Restarts"]) for job in found) == [("PENDING", "1")] * 2 + [("RUNNING", "0")] * 2
    )


@pytest.mark.slow
async def test_released_jobs_exchange_their_priorities_and_other_peoples_jobs_are_untouched(site: Site) -> None:
    await site.policy("sjf")
    private = [site.lab.sbatch("sleep 600", "--partition=private", gpus=8, user="daemon") for _ in range(2)]
    await site.until_states(**{f"_{number}": "RUNNING" for number in private})
    before = [site.lab.job(number) for number in private]
    await a_steered_site(site, leave_partitions="private")
    waiting = site.lab.sbatch("sleep 600", "--partition=private", gpus=8, user="daemon")
    mine = [full(site, "sleep 1", f"--time={minutes}") for minutes in (30, 10, 20)]

    async def are_held() -> bool:
        jobs = [await site.job(number) for number in mine]
        return all(job.get("reason") == "not_enough_free_gpus" for job in jobs)

    await site.until(are_held, "all wait")
    for number in private:
        after = site.lab.job(number)
        assert {name: after.get(name) for name in ("Comment", "AdminComment", "Priority", "StartTime", "Restarts")} == {
            name: next(each for each in before if each["JobId"] == number).get(name)
            for name in ("Comment", "AdminComment", "Priority", "StartTime", "Restarts")
        }
    assert "AdminComment" not in site.lab.job(waiting)
    site.lab.run("scancel", waiting, *private)
    await site.until_states(**{f"_{number}": "COMPLETED" for number in mine})


@pytest.mark.slow
async def test_a_dead_bridge_holds_nobody_for_ever_and_finds_everything_again(site: Site) -> None:
    await a_steered_site(site, hold_s="60")
    first = [full(site, "sleep 20") for _ in range(2)]
    await site.until_states(**{f"_{number}": "RUNNING" for number in first})
    held = full(site, "sleep 1")

    async def is_held() -> bool:
        return int(site.lab.job(held)["StartTime"]) > time.time() + 20 and "AdminComment" in site.lab.job(held)

    await site.until(is_held, "the third waits")
    site.kill_bridge()
    await site.until_states(**{f"_{held}": "COMPLETED"}, within_s=150)  # nobody released it

    site.start_bridge()

    async def all_known() -> bool:
        return [(await site.job(each)).get("state") for each in (*first, held)] == ["succeeded"] * 3

    await site.until(all_known, "what happened meanwhile is known")
    assert await site.rows("SELECT 1 FROM device_claims") == []


@pytest.mark.slow
async def test_a_dry_run_changes_nothing_in_slurm(site: Site) -> None:
    await a_steered_site(site, mode="dry_run")
    numbers = [full(site, "sleep 5") for _ in range(3)]
    await site.until_states(**{f"_{number}": "COMPLETED" for number in numbers})

    async def all_known() -> bool:
        return [(await site.job(each)).get("state") for each in numbers] == ["succeeded"] * 3

    await site.until(all_known, "their ends are known")
    for number in numbers:
        assert "AdminComment" not in site.lab.job(number)
        assert "Comment" not in site.lab.job(number)
    counted = {row["what"] for row in await site.rows("SELECT what FROM engine_days")}
    assert counted <= {"would_hold", "would_release", "would_requeue"}
