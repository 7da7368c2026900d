"""Arrays and dependent jobs are planned task by task, and changed in Slurm as little as that needs."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.engines import EngineAction, EngineDecision, EngineMode
from services.engines.slurm import reading
from services.engines.slurm.bridge import Bridge
from services.engines.slurm.reading import read_jobs
from services.engines.slurm.settings import SlurmSettings
from services.engines.slurm.steering import Memory, changes_of
from services.kit.ids import utc_now
from tests.engines.plane import Plane
from tests.engines.slurm_records import Records
from tests.engines.test_slurm_lies import JOB

HOLD, RELEASE, CANCEL = EngineAction.HOLD, EngineAction.RELEASE, EngineAction.CANCEL
GREENER: dict[str, Any] = {"until": utc_now() + timedelta(hours=3), "note": "waits:greener_hours"}


class Site:
    """Records of Slurm, a bridge, and a control plane that says what a test wants."""

    def __init__(self, **settings: Any) -> None:
        self.slurm, self.plane = Records(time.time()), Plane()
        options: dict[str, Any] = {"mode": EngineMode.CONTROL, "energy": False, **settings}
        self.bridge = Bridge(SlurmSettings(**options), self.slurm, self.plane)  # pyright: ignore[reportArgumentType]

    async def look(self, times: int = 2) -> None:
        for _ in range(times):
            self.bridge._talk.is_known = False  # the reply repeats what is decided
            await self.bridge.look()

    def is_held(self, array: str, task: int) -> bool:
        return self.slurm.of(array, task)["eligible_time"] > self.slurm.now_s


async def test_each_task_is_a_job_and_the_same_one_once_it_runs() -> None:
    site = Site()
    array = site.slurm.submit("0-3")
    await site.look()
    assert [site.plane.last(f"{array}_{task}").gpus for task in range(4)] == [2] * 4
    names = {site.plane.last(f"{array}_{task}").external_id for task in range(4)}
    site.slurm.start(array, 1, 0, 1)
    await site.look()
    runs = site.plane.last(f"{array}_1")
    assert (runs.state, runs.external_id in names) == ("running", True)
    own = site.slurm.of(array, 1)
    assert own["admin_comment"] == f"wattshift:{runs.external_id}"
    own |= {"job_state": "PENDING", "submit_time": own["submit_time"] + 60, "restart_cnt": 1, "gres_detail": []}
    await site.look()
    assert site.plane.last(f"{array}_1").external_id == runs.external_id, "a requeue changes its submission"
    site.slurm.rows.remove(own)
    site.slurm.start(array, 0, 0, 1)
    await site.look()
    assert site.plane.last(f"{array}_0").external_id in names


async def test_what_is_decided_of_all_tasks_splits_none() -> None:
    site = Site()
    array = site.slurm.submit("0-9")
    await site.look()
    for task in range(10):
        site.plane.decide(f"{array}_{task}", HOLD, **GREENER | {"note": f"waits:greener_hours run:{task}gCO2"})
    await site.look()
    assert site.is_held(array, 0)
    assert (site.slurm.splits, len(site.slurm.rows)) == (0, 1)
    assert site.slurm.rows[0]["comment"] == "[wattshift]waits:greener_hours;run:0gCO2"
    before = dict(site.slurm.rows[0])
    await site.look()
    assert site.slurm.rows == [before], "nothing to change"
    for task in range(10):
        site.plane.decide(f"{array}_{task}", RELEASE)
    await site.look()
    assert not site.is_held(array, 0)
    assert site.slurm.splits == 0
    assert "wattshift-hold" not in site.slurm.rows[0]["admin_comment"]


@pytest.mark.parametrize("held_before", [True, False])
async def test_some_may_start_and_the_rest_stays_in_its_record(held_before: bool) -> None:
    site = Site()
    array = site.slurm.submit("0-9")
    await site.look()
    for task in range(10):
        site.plane.decide(f"{array}_{task}", HOLD, **GREENER)
    if held_before:
        await site.look()
    for task in (0, 1, 2):
        site.plane.decide(f"{array}_{task}", RELEASE)
    await site.look()
    assert [site.is_held(array, task) for task in range(10)] == [False] * 3 + [True] * 7
    assert (site.slurm.splits, site.slurm.waiting(array)) == (3, set(range(3, 10)))


async def test_of_a_long_array_the_last_task_told_apart_speaks_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "TASKS", 3)
    monkeypatch.setattr("services.engines.slurm.steering.TASKS", 3)
    site = Site()
    array = site.slurm.submit("0-9")
    await site.look()
    assert sum(len(report.jobs) for report in site.plane.reports) == 3
    site.plane.decide(f"{array}_0", RELEASE)
    site.plane.decide(f"{array}_2", HOLD, **GREENER)
    await site.look()
    assert [site.is_held(array, task) for task in range(10)] == [False] * 2 + [True] * 8, "1 goes with 0"
    assert site.slurm.splits == 2
    await site.look()
    assert site.plane.last(f"{array}_3").state == "pending", "the next one comes into view"


async def test_of_an_array_with_a_limit_only_so_many_take_gpus_in_plans() -> None:
    site = Site()
    array = site.slurm.submit("0-4%2")
    await site.look()
    assert [site.plane.last(f"{array}_{task}").blocked for task in range(5)] == ["", "", *[reading.ARRAY_FULL] * 3]
    site.slurm.start(array, 0, 0, 1)
    await site.look()
    said = [site.plane.last(f"{array}_{task}") for task in range(1, 5)]
    assert [each.blocked for each in said] == ["", *[reading.ARRAY_FULL] * 3]
    assert all(each.steered for each in said)


@pytest.mark.parametrize("why", [GREENER, {"note": GREENER["note"]}], ids=["until", "no moment is foreseen"])
async def test_what_cannot_start_yet_is_held_only_while_others_are(why: dict[str, Any]) -> None:
    """So it cannot slip through in the second in which the job that it depends on ends."""
    site = Site()
    other = site.slurm.submit()
    dependent = site.slurm.submit(dependency="afterok:9(unfulfilled)", eligible_time=0, state_reason="Dependency")
    await site.look()
    assert (site.plane.last(dependent).steered, site.plane.last(dependent).blocked) == (True, reading.DEPENDS)
    site.plane.decide(dependent, RELEASE, note="released")
    await site.look()
    row = site.slurm.rows[1]
    assert row["eligible_time"] == 0, "nobody waits for greener hours"
    site.plane.decide(other, HOLD, **why)
    await site.look()
    assert row["eligible_time"] > site.slurm.now_s
    assert site.plane.last(dependent).revision > 0, "nothing is left to be done"
    row |= {"dependency": "", "state_reason": "BeginTime"}
    await site.look()
    assert site.plane.last(dependent).blocked == ""
    assert row["eligible_time"] == int(site.slurm.now_s), "it was decided that it may start"


def test_tasks_that_slurm_does_not_name_are_left_alone() -> None:
    (job,) = read_jobs({"jobs": [JOB | {"array_job_id": 7, "array_task_string": "0,2,4,6,..."}]})
    assert job.special == "Slurm does not name all tasks of its array"
    assert [each.number for each in read_jobs({"jobs": [JOB | {"array_job_id": 7, "array_task_string": "0-4:2"}]})] == [
        "7_0",
        "7_2",
        "7_4",
    ]


@given(st.lists(st.sampled_from([None, HOLD, RELEASE]), min_size=1, max_size=8), st.booleans())
def test_every_task_becomes_what_was_decided_of_it(actions: list[EngineAction | None], held: bool) -> None:
    """Whatever the mixture: nothing but the named tasks is changed, and a second look changes nothing more."""
    slurm = Records(time.time())
    array = slurm.submit(f"0-{len(actions) - 1}" if len(actions) > 1 else "0")
    begin_s = int(slurm.now_s) + 500
    if held:
        slurm.rows[0] |= {"eligible_time": begin_s, "admin_comment": f"wattshift-hold:{begin_s}"}
    bystander = slurm.submit()
    settings = SlurmSettings(mode=EngineMode.CONTROL)  # pyright: ignore[reportCallIssue]
    named = {f"{array}_{task}": action for task, action in enumerate(actions)}
    decisions = {
        name: EngineDecision(external_id=name, revision=1, action=action, until=GREENER["until"], note=f"n{name}")
        for name, action in named.items()
        if action is not None
    }
    for turn in range(3):
        jobs = [(job, job.number) for job in read_jobs({"jobs": slurm.rows}) if job.number != bystander]
        assert {name for _, name in jobs} == set(named)
        changes = changes_of(jobs, decisions, {name: Memory() for name in named}, settings, slurm.now_s, heard=True)
        for numbers, fields in changes.updates:
            for number in numbers:
                for row in slurm._named(number):
                    slurm._set(row, dict(fields))
        if turn == 2:
            assert not [fields for _, fields in changes.updates if dict(fields).keys() & {"starttime"}]
    for task, action in enumerate(actions):
        before = [each for each in actions[:task] if each is not None]
        wanted = action or (before[-1] if before else None)
        if wanted is not None:
            assert (slurm.of(array, task)["eligible_time"] > slurm.now_s) == (wanted is HOLD), (task, wanted)
