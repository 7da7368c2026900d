"""Policies' decisions in a real Slurm, seen as its users see them. Needs root; installs Slurm where it is missing."""

from __future__ import annotations

import time

import pytest

from services.standalone import stack
from tests.support import slurm
from tests.support.lab import the_lab
from tests.support.servers import ROOT, scratch_folder
from tests.support.sessions import replay, steps_of
from tests.support.slurm import SlurmLab
from tests.support.slurm_bridge import Site

assert the_lab  # the fixture
pytestmark = [
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
    pytest.mark.xdist_group("slurm"),
    pytest.mark.usefixtures("the_lab"),
]


def full(site: Site, script: str, *options: str, **more: str) -> str:
    """Submit a job that needs a whole node."""
    return site.lab.sbatch(script, "--requeue", *options, gpus=8, **more)


def greener_in(site: Site, seconds: float) -> float:
    """Let the grid be green so long from now, for an hour; return when."""
    now_s = time.time()
    site.grid.set([now_s - 3_600, now_s + seconds, now_s + 3_600], [600.0, 10.0, 600.0])
    return now_s + seconds


async def says_why(site: Site, number: str) -> bool:
    """Return whether a job's comment says that it waits for a greener hour."""
    return "waits:greener_hours" in site.lab.job(number).get("Comment", "")


async def test_users_jobs_run_and_their_ends_are_known(site: Site) -> None:
    """What needs a real Slurm, and little time: mirrored, released, run, accounted for, or left alone."""
    await site.steered()
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
async def test_a_job_waits_for_a_green_hour_and_says_so_in_squeue(site: Site) -> None:
    green_s = greener_in(site, 60)
    await site.policy("wait-awhile")
    await site.steered()
    waits = site.lab.sbatch("sleep 3", "--time=10", "--requeue")
    at_once = site.lab.sbatch("sleep 3", "--comment=wattshift:off", "--time=10")

    await site.until(lambda: says_why(site, waits), "the job's comment says what it waits for")
    assert site.lab.state(waits) == "PENDING"
    assert "start:" in site.lab.job(waits)["Comment"]
    await site.until_states(**{f"_{at_once}": "COMPLETED"})
    await site.until_states(**{f"_{waits}": "COMPLETED"}, within_s=150)
    assert int(site.lab.job(waits)["StartTime"]) >= green_s - 1
    assert site.lab.job(waits)["Restarts"] == "0"


@pytest.mark.slow
async def test_joint_requeues_what_runs_for_a_green_hour(site: Site) -> None:
    await site.policy("fifo")
    await site.steered()
    number = site.lab.sbatch("sleep 40", "--time=10", "--requeue")
    await site.until_states(**{f"_{number}": "RUNNING"})
    green_s = greener_in(site, 40)
    await site.policy("joint", slack_s=86_400.0, hour_wh=0.0, limits=False)

    await site.until(lambda: says_why(site, number), "it was stopped, and its comment says what it waits for")
    assert site.lab.state(number) == "PENDING"
    # Slurm itself lets a requeued job begin after two minutes, which the bridge leaves as it is.
    await site.until_states(**{f"_{number}": "COMPLETED"}, within_s=300)
    assert int(site.lab.job(number)["StartTime"]) >= green_s - 1
    assert site.lab.job(number)["Restarts"] == "1"
    assert [row["preemptions"] for row in await site.rows("SELECT preemptions FROM jobs")] == [1]


@pytest.mark.slow
async def test_other_peoples_jobs_are_untouched(site: Site) -> None:
    await site.policy("sjf")
    private = [site.lab.sbatch("sleep 600", "--partition=private", gpus=8, user="daemon") for _ in range(2)]
    await site.until_states(**{f"_{number}": "RUNNING" for number in private})
    before = [site.lab.job(number) for number in private]
    await site.steered(leave_partitions="private")
    waiting = site.lab.sbatch("sleep 600", "--partition=private", gpus=8, user="daemon")
    mine = [full(site, "sleep 1", f"--time={minutes}") for minutes in (30, 10, 20)]

    async def all_wait() -> bool:
        jobs = [await site.job(number) for number in mine]
        return all(job.get("reason") == "not_enough_free_gpus" for job in jobs)

    await site.until(all_wait, "all wait, in Slurm's own queue")
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
    greener_in(site, 3_000)
    await site.policy("wait-awhile")
    await site.steered(hold_s="60")
    held = site.lab.sbatch("sleep 1", "--time=10", "--requeue")

    async def is_held() -> bool:
        return int(site.lab.job(held)["StartTime"]) > time.time() + 20 and await says_why(site, held)

    await site.until(is_held, "it waits for a greener hour")
    site.kill_bridge()
    await site.until_states(**{f"_{held}": "COMPLETED"}, within_s=150)  # nobody released it

    site.start_bridge()

    async def all_known() -> bool:
        return (await site.job(held)).get("state") == "succeeded"

    await site.until(all_known, "what happened meanwhile is known")
    assert await site.rows("SELECT 1 FROM device_claims") == []


@pytest.mark.slow
async def test_a_dry_run_changes_nothing_in_slurm(site: Site) -> None:
    await site.steered(mode="dry_run")
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


@pytest.mark.slow
def test_the_session_of_the_page_moves_a_job_to_a_green_hour(lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/slurm.md from top to bottom, but for the packages, which are installed, and the nodes, which are up."""
    for name in ("DATABASE_URL", "REDIS_URL", "WATTSHIFT_URL", "WATTSHIFT_API_KEY", "WATTSHIFT_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    steps = steps_of((ROOT / "docs" / "slurm.md").read_text(encoding="utf-8"))
    assert steps[0].command.startswith("apt-get install")
    commands = [f"export PATH={ROOT}/.venv/bin:$PATH", *(step.command for step in steps[1:])]
    commands = [command.replace("/run/wattshift-slurm/alive", str(lab.alive)) for command in commands]
    with scratch_folder() as folder:
        try:
            replay(steps, commands, folder, {"SLURM_CONF": str(lab.conf)})
        finally:
            stack.down(folder / "data")
    numbers = lab.run("squeue", "-h", "--states=all", "--name=moved", "-o", "%i").split()
    moved = lab.job(numbers[-1])
    assert int(moved["StartTime"]) > int(moved["SubmitTime"]) + 45  # 30 s are the submission plugin's
    assert "released;grid:" in moved["Comment"]
