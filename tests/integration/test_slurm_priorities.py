"""A real Slurm with accounts, QOS, fair share and multifactor priority, whose order and limits stay its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from tests.support import slurm
from tests.support.lab import the_lab
from tests.support.slurm import SlurmLab
from tests.support.slurm_bridge import Site

assert the_lab  # the fixture
pytestmark = [pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()), pytest.mark.xdist_group("slurm_sites")]

PLUGIN_S = 31
"""New jobs may have a begin time so far ahead, by ``job_submit.lua``."""


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    """A Slurm of four nodes with accounting, for this module."""
    with slurm.a_slurm(nodes=4, accounting=True) as made:
        yield made


def factors(lab: SlurmLab, number: str) -> dict[str, int]:
    """Return what a waiting job's priority is made of."""
    words = lab.run("sprio", "-h", "-j", number, "-o", "%Y %F %Q %N").split()
    return dict(zip(("priority", "fair_share", "qos", "nice"), map(int, words), strict=True))


def held_s(lab: SlurmLab, number: str) -> int:
    """Return how long after its submission a job may start; 0: nobody has said."""
    job = lab.job(number)
    return int(job["EligibleTime"]) - int(job["SubmitTime"]) if job["EligibleTime"] != "Unknown" else 0


def fill(lab: SlurmLab) -> list[str]:
    """Let jobs that are not ours hold all GPUs."""
    return [lab.sbatch("sleep 600", "--partition=private", gpus=8, user="daemon") for _ in range(4)]


async def another_round(site: Site) -> None:
    """Return once a round was held that began after now, and what it decided has reached Slurm."""
    (now,) = await site.rows("SELECT now() AS at")
    query = "SELECT 1 FROM scheduler_state WHERE last_active_at > $1"
    await site.until(lambda: site.rows(query, now["at"]), "a round is held")
    await asyncio.sleep(2)


async def released(site: Site, *numbers: str) -> None:
    """Return once jobs are ours, planned, and held by nobody."""

    async def are_so() -> bool:
        rows = await site.rows(
            "SELECT external_id FROM engine_jobs WHERE decision ->> 'action' = 'release' "
            "AND (report ->> 'revision')::int >= revision"
        )
        known = {row["external_id"].partition("@")[0] for row in rows}
        return known >= set(numbers) and all(
            int(site.lab.job(number)["EligibleTime"]) <= time.time() for number in numbers
        )

    await site.until(are_so, "all are released")


async def test_nobody_waits_for_what_another_users_limit_does_not_start(site: Site) -> None:
    """One user may hold 8 of 32 GPUs and wants 32; the other one's three jobs get the 24 that are left."""
    await site.policy("joint")
    await site.steered(partitions="batch")
    capped = [site.lab.sbatch("sleep 600", "--qos=capped", "--time=30", gpus=8) for _ in range(4)]
    others = [site.lab.sbatch("sleep 600", "--time=60", gpus=8, user="daemon") for _ in range(3)]

    async def all_gpus_are_used() -> bool:
        assert all(held_s(site.lab, number) <= PLUGIN_S for number in (*capped, *others)), "held for GPUs"
        return [site.lab.state(number) for number in (*capped, *others)].count("RUNNING") == 4

    await site.until(all_gpus_are_used, "32 GPUs run 8 of one and 24 of the other", 90)
    assert [site.lab.state(number) for number in others] == ["RUNNING"] * 3

    async def says_why() -> bool:
        rows = await site.rows("SELECT detail FROM jobs WHERE reason = 'engine_limit'")
        return ["QOSMaxGRESPerUser: its QOS" in row["detail"] for row in rows] == [True] * 3

    await site.until(says_why, "three jobs say which limit they wait for")
    last = site.lab.sbatch("sleep 600", "--time=5", gpus=8, user="daemon")
    await released(site, last)
    site.lab.wait(
        lambda: site.lab.job(last)["Reason"] in ("Resources", "Priority"), 30, "it waits in Slurm's own queue"
    )
    site.lab.run("scancel", others[0])
    await site.until_states(**{f"_{last}": "RUNNING"})
    assert held_s(site.lab, last) <= PLUGIN_S


async def test_nobody_waits_for_what_licences_or_a_maintenance_do_not_start(site: Site) -> None:
    """Sixteen GPUs go into maintenance soon; two jobs wait for that and for a licence, and take no GPUs in plans."""
    lab = site.lab
    lab.run("scontrol", "create", "reservation", "reservationname=repair", "starttime=now+30minutes", "duration=60",
            "users=root", "nodes=gpu[3-4]", "flags=maint,ignore_jobs")  # fmt: skip
    try:
        await site.policy("joint")
        await site.steered(partitions="batch")
        licensed = lab.sbatch("sleep 600", "--licenses=matlab", gpus=8)
        await site.until_states(**{f"_{licensed}": "RUNNING"})
        without = lab.sbatch("sleep 600", "--licenses=matlab", "--time=5", gpus=8)
        repaired = lab.sbatch("sleep 600", "--nodelist=gpu[3-4]", "--nodes=2", "--time=60", gpus=8)

        async def says_why() -> bool:
            rows = await site.rows(
                "SELECT report ->> 'blocked' AS why FROM engine_jobs WHERE report ->> 'blocked' > ''"
            )
            return {row["why"] for row in rows} == {
                "Licenses: what is used up",
                "ReqNodeNotAvail: nodes that it cannot have",
            }

        await site.until(says_why, "both say why")
        assert all(held_s(lab, number) <= PLUGIN_S for number in (without, repaired))
        others = [lab.sbatch("sleep 600", "--time=20", gpus=8, user="daemon") for _ in range(3)]
        await site.until_states(**{f"_{number}": "RUNNING" for number in others}, within_s=90)
    finally:
        lab.run("scontrol", "delete", "reservationname=repair")


@pytest.mark.usefixtures("the_lab")
async def test_priorities_are_slurms_and_an_admins_stays(site: Site) -> None:
    """Age, fair share and QOS count as they do for a job that is left alone, and go on doing so without us."""
    await site.policy("sjf")
    running = fill(site.lab)
    await site.until_states(**{f"_{number}": "RUNNING" for number in running})
    await site.steered(partitions="batch")
    longer, shorter, nice, raised, later = (
        site.lab.sbatch("sleep 1", f"--time={minutes}", *more, gpus=8)
        for minutes, more in ((30, ()), (10, ()), (20, ("--nice=50",)), (40, ()), (50, ()))
    )
    peer = site.lab.sbatch("sleep 1", "--time=60", "--comment=wattshift:off", gpus=8)
    await released(site, longer, shorter, nice, raised, later)
    site.lab.run("scontrol", "update", f"jobid={raised}", "priority=777777")
    site.lab.run("scontrol", "update", f"jobid={later}", "nice=900")

    async def like_its_peer() -> bool:
        theirs = factors(site.lab, peer)
        found = [factors(site.lab, number) for number in (longer, shorter)]
        return all(
            (each["fair_share"], each["qos"], each["nice"]) == (theirs["fair_share"], theirs["qos"], 0)
            and abs(each["priority"] - theirs["priority"]) <= 2  # half a minute of age
            for each in found
        )

    for end in (lambda: None, site.kill_bridge):
        end()
        await another_round(site)
        await site.until(like_its_peer, "they have the priority of one that is left alone", 90)
        assert [site.lab.job(number)["Nice"] for number in (nice, later)] == ["50", "900"]
        assert site.lab.job(raised)["Priority"] == "777777"


async def test_no_job_starts_before_the_time_that_its_user_asked_for(site: Site) -> None:
    """At submission, and of a job that was ours already."""
    await site.policy("fifo")
    running = fill(site.lab)
    await site.until_states(**{f"_{number}": "RUNNING" for number in running})
    await site.steered(partitions="batch")
    moved = site.lab.sbatch("sleep 1", gpus=8)
    await released(site, moved)
    begun = site.lab.sbatch("sleep 1", "--begin=now+40", gpus=8)
    site.lab.run("scontrol", "update", f"jobid={moved}", "StartTime=now+40", user="nobody")
    wanted = {number: int(site.lab.job(number)["EligibleTime"]) for number in (moved, begun)}
    assert all(begin_s > time.time() + 20 for begin_s in wanted.values())
    site.lab.run("scancel", *running)
    await site.until_states(**{f"_{number}": "COMPLETED" for number in wanted}, within_s=120)
    for number, begin_s in wanted.items():
        assert int(site.lab.job(number)["StartTime"]) >= begin_s


async def test_what_cannot_be_steered_starts_at_once(site: Site) -> None:
    """Interactive jobs, other partitions and dependent jobs get no begin time, and no name of ours.

    A dependent one gets its name once what it depends on is over: then it can be steered.
    """
    await site.steered(partitions="batch")
    lab = site.lab
    lab.run("srun", "--gres=gpu:1", "--mem=10", "--job-name=shell", "true", user="nobody")
    interactive = lab.run("squeue", "-h", "--states=all", "--name=shell", "-o", "%i").split()[-1]
    private = lab.sbatch("sleep 1", "--partition=private")
    dependent = lab.sbatch("sleep 1", f"--dependency=afterany:{private}")
    steered = lab.sbatch("sleep 1")
    assert "wattshift" in lab.job(steered)["AdminComment"], "the plugin's hold, or the bridge's name already"
    alone = {f"_{number}": "COMPLETED" for number in (interactive, private, dependent)}
    await site.until_states(**alone)
    for number in (interactive, private, dependent):
        job = lab.job(number)
        assert ("wattshift-hold" if number == dependent else "wattshift") not in job.get("AdminComment", "")
        assert number == dependent or held_s(lab, number) < PLUGIN_S - 1


@pytest.mark.usefixtures("the_lab")
async def test_an_array_waits_for_greener_hours_as_a_whole_and_then_starts_task_by_task(site: Site) -> None:
    """What depends on it waits, too; Slurm keeps one record of the tasks that wait, and each is a job of ours."""
    now_s = time.time()
    site.grid.set([now_s - 3_600, now_s + 2 * 3_600], [900, 10])
    await site.policy("wait-awhile")
    await site.steered(partitions="batch")
    lab = site.lab
    array = lab.sbatch("sleep 2", "--array=0-5%4", "--time=5")
    dependent = lab.sbatch("sleep 1", f"--dependency=afterok:{array}", "--time=5")

    async def all_are_held() -> bool:
        return all(held_s(lab, number) > 600 for number in (array, dependent))

    await site.until(all_are_held, "the array and what depends on it are held")
    assert lab.run("squeue", "-h", "-j", array, "-o", "%i") == f"{array}_[0-5%4]"
    wanted = {f"{array}_{task}" for task in range(6)} | {dependent}

    async def all_are_ours() -> bool:
        rows = await site.rows("SELECT external_id FROM jobs WHERE state = 'queued'")
        return {row["external_id"].partition("@")[0] for row in rows} == wanted

    await site.until(all_are_ours, "each task is a job of ours")
    site.grid.set([now_s - 3_600], [10])
    await site.policy("wait-awhile")

    async def all_succeeded() -> bool:
        rows = await site.rows("SELECT state FROM jobs")
        return [row["state"] for row in rows] == ["succeeded"] * 7

    await site.until(all_succeeded, "six tasks and what depends on them succeeded", 120)
    assert "wattshift-hold" not in lab.job(dependent)["AdminComment"]


@pytest.mark.usefixtures("the_lab")
async def test_an_order_that_the_site_asks_for_is_kept_by_nice_and_given_back(site: Site) -> None:
    """Shorter ones of one account come first there, in the places that Slurm gives these jobs; all others keep theirs.

    An admin's word stands: a priority, a nice value, a hold, and an earlier begin time.
    """
    lab = site.lab
    await site.policy("sjf")
    running = fill(lab)
    await site.until_states(**{f"_{number}": "RUNNING" for number in running})
    longer, shorter, nice, raised, later = (
        lab.sbatch("sleep 1", f"--time={minutes}", *more, gpus=8)
        for minutes, more in ((30, ()), (10, ()), (20, ("--nice=50",)), (40, ()), (50, ()))
    )
    peer = lab.sbatch("sleep 1", "--time=60", "--comment=wattshift:off", gpus=8)
    wanted = (shorter, nice, longer, raised, later)

    def order() -> list[str]:
        rows = [line.split() for line in lab.run("sprio", "-h", "-o", "%Y %i").splitlines()]
        return [number for _, number in sorted(rows, key=lambda row: -int(row[0])) if number in wanted]

    async def is_kept() -> bool:
        return order() == list(wanted)

    async def is_given_back() -> bool:
        nices = [lab.job(number)["Nice"] for number in (*wanted, peer)]
        return nices == ["0", "50", "0", "0", "0", "0"] and not any(
            "wattshift-nice" in lab.job(number).get("AdminComment", "") for number in wanted
        )

    assert order() != list(wanted)
    await site.steered(partitions="batch", order="account")
    await site.until(is_kept, "the shortest come first", 120)
    strangers = factors(lab, peer)
    assert factors(lab, shorter)["priority"] <= strangers["priority"] + 2, "it passes nobody else"
    assert strangers["nice"] == 0
    site.kill_bridge()
    site.start_bridge(partitions="batch")
    await site.until(is_given_back, "the next start gives back what a crash has left")
    site.stop_bridge()
    site.start_bridge(partitions="batch", order="account")
    await site.until(is_kept, "it begins anew", 120)
    lab.run("scontrol", "update", f"jobid={raised}", "priority=777777")
    lab.run("scontrol", "update", f"jobid={later}", "nice=900")
    lab.run("scontrol", "hold", longer)

    async def is_left_alone() -> bool:
        query = "SELECT report ->> 'number' AS number, report ->> 'blocked' AS why FROM engine_jobs WHERE NOT over"
        said = {row["number"]: row["why"] for row in await site.rows(query)}
        return [said[number] for number in (raised, later, longer)] == [
            "its priority was set in Slurm",
            "its begin time or nice value was changed in Slurm",
            "it is held in Slurm",
        ]

    await site.until(is_left_alone, "each says why it is left alone")
    await another_round(site)
    assert (lab.job(raised)["Priority"], lab.job(later)["Nice"]) == ("777777", "900")
    assert (lab.job(longer)["Priority"], lab.job(longer)["Nice"]) == ("0", "0")
    site.stop_bridge()
    assert (lab.job(raised)["Priority"], lab.job(later)["Nice"]) == ("777777", "900")
    assert [lab.job(number)["Nice"] for number in (shorter, nice)] == ["0", "50"]


@pytest.mark.usefixtures("the_lab")
async def test_an_admins_release_of_our_hold_stands(site: Site) -> None:
    now_s = time.time()
    site.grid.set([now_s - 3_600, now_s + 2 * 3_600], [900, 10])
    await site.policy("wait-awhile")
    running = fill(site.lab)
    await site.steered(partitions="batch")
    held = site.lab.sbatch("sleep 1", "--time=5", gpus=8)

    async def is_held() -> bool:
        return held_s(site.lab, held) > 600

    await site.until(is_held, "it waits for greener hours")
    site.lab.run("scontrol", "update", f"jobid={held}", "StartTime=now")
    await another_round(site)
    job = site.lab.job(held)
    assert int(job["EligibleTime"]) <= time.time(), job

    async def is_told() -> bool:
        (row,) = await site.rows("SELECT detail FROM jobs WHERE external_id LIKE $1 || '@%'", held)
        return "its begin time or nice value was changed in Slurm" in row["detail"]

    await site.until(is_told, "it is said why")
    site.lab.run("scancel", *running)
    await site.until_states(**{f"_{held}": "COMPLETED"})


async def test_new_jobs_wait_only_while_somebody_will_plan_them(site: Site) -> None:
    """With the service up a job waits for its plan, down or silent not at all; submitting itself never waits."""
    lab = site.lab

    def waits_s(*options: str) -> int:
        return held_s(lab, lab.sbatch("sleep 1", *options))

    lab.alive.unlink(missing_ok=True)
    assert waits_s() <= 1, "there is no bridge"
    await site.steered(partitions="batch")
    await site.until(lambda: asyncio.to_thread(lab.alive.exists), "it is heard")
    await site.policy("fifo")
    number = lab.sbatch("sleep 1")
    assert "wattshift" in lab.job(number)["AdminComment"]
    await site.until_states(**{f"_{number}": "COMPLETED"})
    print(
        "with the service up a job began after", int(lab.job(number)["StartTime"]) - int(lab.job(number)["SubmitTime"])
    )
    lab.run("salloc", "--gres=gpu:1", "--mem=10", "--job-name=shell", "true", user="nobody")
    shell = lab.run("squeue", "-h", "--states=all", "--name=shell", "-o", "%i").split()[-1]
    assert "wattshift" not in lab.job(shell).get("AdminComment", "")
    site.stop_bridge()
    assert waits_s() <= 1, "it has said goodbye"
    lab.alive.write_text(f"{time.time() - 1:.0f}")
    assert waits_s() <= 1, "it was killed, or nobody hears it"
    assert waits_s("--array=0-3") <= 1
