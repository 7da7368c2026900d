"""The plan's order in Slurm, where its site asks for it: by nice values that are given back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.engines import EngineAction, EngineDecision, EngineReply
from services.engines.slurm.bridge import Bridge
from services.engines.slurm.commands import Commands
from services.engines.slurm.ordering import Priority, nice_values
from services.engines.slurm.reading import Rows, SlurmJob, read_jobs
from services.engines.slurm.steering import SET_BY_HAND, TAKEN_BACK, Changes, Memory, changes_of, report_of
from services.kit.bridges.silent import EngineSilentError
from tests.engines.bridge import Bridge as Theirs
from tests.engines.bridge import a_job, on
from tests.engines.plane import Plane
from tests.engines.test_slurm_harmless import NAME, NOW_S, SETTINGS, fields_of, pending
from tests.engines.test_slurm_lies import JOB
from tests.scheduler.world import World

JOBS = st.lists(
    st.tuples(
        st.integers(1_000, 60_000),  # what its factors say
        st.integers(-500, 500),  # its user's nice value
        st.integers(-900, 900),  # what we gave it before
        st.sampled_from(["ann", "bob"]),
        st.booleans(),  # whether its place is in the plan's order
    ),
    min_size=1,
    max_size=8,
)


@given(JOBS, st.sampled_from(["user", "account", "partition"]))
def test_jobs_of_a_group_change_places_and_nobody_else_is_passed_by_more(jobs: list[Any], within: str) -> None:
    theirs: dict[str, SlurmJob] = {}
    priorities: dict[str, Priority] = {}
    for at, (factors, own, ours, user, _) in enumerate(jobs):
        admin = f"wattshift-nice:{own + ours}/{own}"
        theirs[f"n{at}"] = replace(
            pending(nice=own + ours, admin_comment=admin, account="lab"), number=str(at), user=user
        )
        priorities[str(at)] = Priority(factors - own - ours, own + ours, False)
    order = [f"n{at}" for at, job in enumerate(jobs) if job[4]]
    nices = nice_values(order, theirs, priorities, within)
    assert nices.keys() == {name[1:] for name in order}
    groups = [[str(at) for at, job in enumerate(jobs) if job[4] and job[3] == user] for user in ("ann", "bob")]
    for group in groups if within == "user" else [[name[1:] for name in order]]:
        own = [jobs[int(number)][0] - jobs[int(number)][1] for number in group]
        then = [jobs[int(number)][0] - nices[number] for number in group]
        assert then == sorted(then, reverse=True), "the order"
        assert len(set(then)) == len(then), "without ties"
        for before, after in zip(sorted(own, reverse=True), then, strict=True):
            assert after <= before + 10, "a higher place than any of them had"
    again = {number: replace(job, nice=nices.get(number, job.nice)) for number, job in theirs.items()}
    later = {
        number: Priority(each.value + each.nice - nices.get(number, each.nice), nices.get(number, each.nice), False)
        for number, each in priorities.items()
    }
    assert nice_values(order, again, later, within) == nices, "done once, it is left"


def test_whose_place_is_not_ours_to_give_keeps_its_own() -> None:
    kinds = {
        "array": replace(pending(), number="7_1"),
        "two": pending(partition="batch,long"),
        "set": replace(pending(), number="3"),
        "unknown": replace(pending(), number="4"),
    }
    priorities = {job.number: Priority(5_000, 0, name == "set") for name, job in kinds.items() if name != "unknown"}
    assert nice_values([*kinds, "gone"], kinds, priorities, "partition") == {}


def niced(job: SlurmJob, nices: dict[str, int], action: EngineAction | None, *, heard: bool = True) -> dict[str, str]:
    """Return the fields that are set of a job."""
    decisions = {} if action is None else {NAME: EngineDecision(external_id=NAME, revision=1, action=action)}
    changes = changes_of([(job, NAME)], decisions, {NAME: Memory()}, SETTINGS, NOW_S, heard=heard, nices=nices)
    return dict(changes.updates[0][1]) if changes.updates else {}


def test_a_nice_value_is_written_down_beside_its_users_and_given_back() -> None:
    job = pending(nice=50, admin_comment="a note")
    fields = niced(job, {"7": -400}, EngineAction.RELEASE)
    assert fields == {"nice": "-400", "admincomment": f"wattshift:{NAME};wattshift-nice:-400/50 a note"}
    ours = pending(nice=-400 % 2**32, admin_comment=fields["admincomment"])
    assert (ours.nice, ours.our_nice, ours.own_nice) == (-400, -400, 50)
    assert niced(ours, {"7": -400}, EngineAction.RELEASE) == {}
    assert niced(ours, {"7": -300}, EngineAction.RELEASE)["admincomment"] == (
        f"wattshift:{NAME};wattshift-nice:-300/50 a note"
    )
    back = {"nice": "50", "admincomment": f"wattshift:{NAME} a note"}
    assert niced(ours, {}, EngineAction.RELEASE) == back, "it is not in the order any more"
    assert niced(ours, {"7": -400}, EngineAction.RELEASE, heard=False) == back, "nobody says so any more"
    assert niced(ours, {"7": -400}, None) == back
    held = niced(ours, {"7": -400}, EngineAction.HOLD)
    assert (held["nice"], "wattshift-nice" in held["admincomment"]) == ("50", False)
    assert "wattshift-hold" in held["admincomment"]
    running = replace(ours, state="running", reason="None")
    assert niced(running, {"7": -400}, EngineAction.RELEASE) == back
    by_hand = replace(ours, special=SET_BY_HAND)
    assert niced(by_hand, {}, EngineAction.RELEASE) == {}, "Slurm would ignore it, and the mark would be lost"
    stopped = replace(ours, priority=0)
    assert niced(stopped, {"7": -400}, EngineAction.RELEASE) == back, "held by an admin"


@pytest.mark.parametrize(
    "job",
    [
        pending(nice=900, admin_comment=f"wattshift:{NAME};wattshift-nice:-400/50"),
        pending(eligible_time=NOW_S - 5, admin_comment=f"wattshift:{NAME};wattshift-hold:{NOW_S + 500}"),
    ],
    ids=["nice", "begin"],
)
def test_who_changes_what_we_set_has_the_last_word(job: SlurmJob) -> None:
    report = report_of(job, NAME, None, Memory(), SETTINGS, NOW_S)
    assert (report.steered, report.why_not, report.blocked) == (False, TAKEN_BACK, TAKEN_BACK)
    for action in EngineAction:
        assert fields_of(job, action) == {}
        assert niced(job, {"7": 3}, action) == {}


def test_a_hold_that_has_passed_was_changed_by_nobody() -> None:
    passed = pending(eligible_time=NOW_S - 5, admin_comment=f"wattshift:{NAME} wattshift-hold:{NOW_S - 5}")
    dependent = pending(eligible_time=0, dependency="afterok:1", admin_comment=f"wattshift-hold:{NOW_S + 5}")
    for job in (passed, dependent):
        assert report_of(job, NAME, None, Memory(), SETTINGS, NOW_S).steered


class Squeue:
    """A Slurm with jobs 7 and 8 of one user, which remembers what it was told."""

    def __init__(self) -> None:
        self.rows = [JOB | {"job_id": number, "submit_time": NOW_S} for number in (7, 8)]
        self.set: set[str] = set()

    async def jobs(self) -> tuple[Rows[SlurmJob], str]:
        return read_jobs({"jobs": self.rows}), "22.05.8"

    async def nodes(self) -> Rows[Any]:
        return Rows([], {})

    async def priorities(self) -> dict[str, Priority]:
        return {
            str(row["job_id"]): Priority(5_000 - row.get("nice", 0), row.get("nice", 0), str(row["job_id"]) in self.set)
            for row in self.rows
        }

    async def change(self, changes: Changes) -> dict[str, str]:
        for numbers, fields in changes.updates:
            for row in self.rows:
                if str(row["job_id"]) in numbers:
                    wanted = dict(fields)
                    row["admin_comment"] = wanted.get("admincomment", row["admin_comment"])
                    row["nice"] = int(wanted.get("nice", row.get("nice", 0)))
        return {}

    @property
    def nices(self) -> list[int]:
        return [row.get("nice", 0) for row in self.rows]


class Ordering(Plane):
    """A control plane that wants job 8 first."""

    async def call(self, what: str, report: Any, answer: Any, timeout_s: float) -> Any:
        reply: EngineReply = await super().call(what, report, answer, timeout_s)
        assert report.orders
        return reply.model_copy(update={"order": [f"{number}@{NOW_S}" for number in (8, 7)]})


async def test_the_bridge_orders_and_gives_back_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, plane = Squeue(), Ordering()
    plane.wanted = {number: (EngineAction.RELEASE, {}) for number in ("7", "8")}
    settings = SETTINGS.model_copy(update={"order": "user", "energy": False, "interval_s": 0.01})
    bridge = Bridge(settings, slurm, plane)  # pyright: ignore[reportArgumentType]
    for _ in range(3):
        await bridge.look()
    assert slurm.nices == [1, 0]
    slurm.set = {"8"}
    bridge._nodes_at_s = -1e9
    for _ in range(2):
        await bridge.look()
    assert plane.last("8").blocked == SET_BY_HAND
    slurm.rows[1] |= {"job_state": "RUNNING", "start_time": NOW_S}
    await bridge.look()
    assert not plane.last("8").steered
    slurm.rows[0] |= {"nice": 1, "admin_comment": "wattshift-nice:1/0"}

    async def end(_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(bridge._talk, "keep_looking", end)
    with pytest.raises(asyncio.CancelledError):
        await bridge.run()
    assert (slurm.nices, slurm.rows[0]["admin_comment"]) == ([0, 0], "")


async def test_priorities_are_read_of_sprio(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 22.05 prints them; of one that an admin has set, no factor is left."""
    said = "5 51000 -1000 0 0 50000 0 0 0 0\n7 777777 0 0 0 0 0 0 0 0\n9 1 300 0 0 0 0 0 0 0\n"

    async def answer(*_: str, **__: Any) -> tuple[int, str, str]:
        return 0, said, ""

    commands = Commands(1)
    monkeypatch.setattr(commands, "_run", answer)
    assert await commands.priorities() == {
        "5": Priority(51_000, -1_000, False),
        "7": Priority(777_777, 0, True),
        "9": Priority(1, 300, False),
    }
    said += "sprio: what is this\n"
    with pytest.raises(EngineSilentError, match="what is this"):
        await commands.priorities()


async def test_released_jobs_are_told_in_the_plans_order_where_the_site_asks(world: World) -> None:
    """What holds the GPUs is no part of it, nor what its engine blocks."""
    now = datetime.now(UTC)
    bridge = Theirs(world)
    await bridge.enrol(nodes=1, gpus=4)
    await bridge.say(a_job("1", "running", gpus=4, shares=[on("g1", 0, 1, 2, 3)], started_at=now))
    await bridge.say(a_job("2", gpus=2), a_job("3", gpus=1), a_job("4", blocked="Licenses"), orders=True)
    await world.fetch("UPDATE scheduler_state SET last_active_at = NULL")
    nodes = [{"name": "g1", "gpus": 4, "gpu_model": "A100", "memory_gib": 80, "queues": ["batch"]}]
    await bridge.say(orders=True)
    await bridge.say(orders=True)
    assert (await bridge.say(orders=True)).order == []
    assert (await bridge.say(orders=True, nodes=nodes)).order == ["2", "3"]
    assert (await bridge.say(nodes=nodes)).order == []
