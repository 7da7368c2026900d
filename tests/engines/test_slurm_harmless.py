"""Steering does no harm: what is never changed in Slurm, whatever is decided and whatever users do meanwhile."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.engines import EngineAction, EngineDecision, EngineMode
from services.core.cycle.plan import Hold, Preempt
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.engines.slurm import reading
from services.engines.slurm.reading import HOLD, SlurmJob, read_jobs
from services.engines.slurm.settings import SlurmSettings
from services.engines.slurm.steering import Memory, changes_of, report_of
from services.scheduler.engines.directing import Theirs
from services.scheduler.repository.engines import LiveRow
from tests.engines.test_slurm_lies import JOB
from tests.support.builders import a_job, a_node, a_snapshot

NOW_S = 1_800_000_000
NAME = "7@1000"
SETTINGS = SlurmSettings(mode=EngineMode.CONTROL, partitions=["batch"])  # pyright: ignore[reportCallIssue]
SHORT = SETTINGS.model_copy(update={"hold_s": 60.0})


def pending(**fields: Any) -> SlurmJob:
    """Return a job of Slurm that waits; fields are those of its JSON."""
    (job,) = read_jobs({"jobs": [JOB | {"submit_time": NOW_S - 500, "eligible_time": NOW_S - 500} | fields]})
    return job


def decided(action: EngineAction | None) -> dict[str, EngineDecision]:
    """Return a decision on the job."""
    return {} if action is None else {NAME: EngineDecision(external_id=NAME, revision=1, action=action, note="n")}


def fields_of(
    job: SlurmJob,
    action: EngineAction | None,
    now_s: float = NOW_S,
    *,
    heard: bool = True,
    settings: SlurmSettings = SETTINGS,
) -> dict[str, str]:
    """Return what is set of a job that waits."""
    changes = changes_of([(job, NAME)], decided(action), {NAME: Memory()}, settings, now_s, heard=heard)
    return dict(changes.updates[0][1]) if changes.updates else {}


def carried_out(job: SlurmJob, fields: dict[str, str], now_s: int) -> SlurmJob:
    """Return the job as Slurm has it after that."""
    admin = fields.get("admincomment", job.admin_comment)
    begin_s = job.eligible_s
    if fields.get("starttime") == "now":
        begin_s = now_s
    elif "starttime" in fields:
        begin_s = int(datetime.fromisoformat(fields["starttime"] + "+00:00").timestamp())
    return pending(
        eligible_time=begin_s, admin_comment=admin, restart_cnt=job.restarts, comment=job.comment, qos=job.qos
    )


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("decide"), st.sampled_from([None, *EngineAction])),
        st.tuples(st.just("user"), st.integers(-100, 4_000)),
        st.tuples(st.just("requeue"), st.just(121)),
        st.tuples(st.just("wait"), st.integers(1, 1_000)),
        st.tuples(st.just("comment"), st.sampled_from(["wattshift:off", "mine"])),
        st.tuples(st.just("silence"), st.booleans()),
    ),
    max_size=12,
)


@given(STEPS, st.booleans(), st.sampled_from([SETTINGS, SHORT]))
def test_no_begin_time_but_our_own_is_ever_moved_to_an_earlier_one(
    steps: list[tuple[str, Any]], plugin: bool, settings: SlurmSettings
) -> None:
    """Users and Slurm set begin times at any moment, on jobs that are held, released or new; we look after each."""
    now_s, heard, action = NOW_S, True, None
    theirs_s = NOW_S - 500
    begin_s = NOW_S + 30 if plugin else theirs_s
    job = pending(eligible_time=begin_s, admin_comment=f"wattshift-hold:{begin_s}" if plugin else "")
    for what, value in steps:
        match what:
            case "decide":
                action = value
            case "user" | "requeue":
                hold = HOLD.search(job.admin_comment)
                if hold and int(hold["until"]) == now_s + value:
                    continue  # the very second that we have set: nobody could tell
                theirs_s = now_s + value
                job = replace(job, eligible_s=theirs_s, restarts=job.restarts + (what == "requeue"))
            case "wait":
                now_s += value
            case "comment":
                job = replace(job, comment=value)
            case _:
                heard = not value
        fields = fields_of(job, action, now_s, heard=heard, settings=settings)
        assert not fields.keys() & {"priority", "nice"}
        before, job = job, carried_out(job, fields, now_s)
        assert max(job.eligible_s, now_s) >= theirs_s, "earlier than they said"
        holds = action in (EngineAction.HOLD, EngineAction.REQUEUE, EngineAction.SHRINK)
        if "starttime" in fields and not holds:
            assert job.eligible_s <= max(now_s, theirs_s), "held although nobody decided so"
            assert before.is_held, "it was not ours to move"
        if not fields:
            assert job.eligible_s == before.eligible_s


PUBLISHED = frozenset(Path(__file__).with_name("slurm-reasons.txt").read_text().split())
"""The reasons that the sources of 22.05 to 25.11 name."""
GPUS_ALONE = {"None", "Resources", "Priority", "BeginTime", "SchedDefer", "Cleaning"}
SOME = {"QOSMaxGRESPerUser": "its QOS", "MaxGRESPerAccount": "its QOS", "AssocGrpGRES": "its account or user"} | {
    "Licenses": "what is used up",
    "ReqNodeNotAvail": "nodes that it cannot have",
    "Reservation": "nodes that it cannot have",
    "PartitionDown": "its partition",
    "Dependency": "other jobs",
    "JobHeldAdmin": "its release",
}


@pytest.mark.parametrize("reason", sorted(PUBLISHED | {"SomethingNew"}))
def test_what_waits_for_something_else_than_gpus_and_its_turn_says_so(reason: str) -> None:
    """Every reason that was ever published has one meaning; a new one blocks, too."""
    blocked = report_of(pending(state_reason=reason), NAME, None, Memory(), SETTINGS, NOW_S).blocked
    meant = [said for said in reading.MEANINGS if re.fullmatch(said, reason)]
    assert len(meant) == (reason in PUBLISHED - GPUS_ALONE)
    assert (blocked == "") == (reason in GPUS_ALONE)
    assert blocked.partition(": ")[0] == ("" if reason in GPUS_ALONE else reason)
    assert blocked.partition(": ")[2] == SOME.get(reason, blocked.partition(": ")[2])


def test_a_begin_time_of_its_users_blocks_it_and_a_hold_of_ours_does_not() -> None:
    theirs = pending(eligible_time=NOW_S + 100, admin_comment=f"wattshift:{NAME} wattshift-hold:{NOW_S + 99}")
    ours = pending(eligible_time=NOW_S + 100, admin_comment=f"wattshift:{NAME} wattshift-hold:{NOW_S + 100}")
    said = [report_of(job, NAME, None, Memory(), SETTINGS, NOW_S) for job in (theirs, ours)]
    assert [(each.steered, each.blocked) for each in said] == [(False, "it has a begin time of its own"), (True, "")]
    assert [fields_of(job, EngineAction.RELEASE) for job in (theirs, ours)] == [
        {},
        {"admincomment": f"wattshift:{NAME}", "comment": "[wattshift]n", "starttime": "now"},
    ]


def test_a_hold_over_slurms_own_delay_of_a_requeued_job_gives_that_back() -> None:
    job = pending(eligible_time=NOW_S + 100, restart_cnt=1, admin_comment="a note")
    held = carried_out(job, fields_of(job, EngineAction.HOLD), NOW_S)
    assert re.fullmatch(rf"wattshift:{NAME};wattshift-hold:\d+/{NOW_S + 100} a note", held.admin_comment)
    assert held.eligible_s >= NOW_S + SETTINGS.hold_s
    released = carried_out(held, fields_of(held, EngineAction.RELEASE), NOW_S)
    assert (released.eligible_s, released.admin_comment) == (NOW_S + 100, f"wattshift:{NAME} a note")


def test_what_is_not_steered_any_more_is_not_held_any_more() -> None:
    """Its user opts out, or it is in a QOS that is left alone, of which the submission plugin knows nothing."""
    job = pending(eligible_time=NOW_S + 500, admin_comment=f"wattshift-hold:{NOW_S + 500} x", comment="wattshift:off")
    assert fields_of(job, EngineAction.HOLD) == {"admincomment": "x", "starttime": "now"}
    assert fields_of(pending(comment="wattshift:off"), EngineAction.HOLD) == {}


def test_a_job_without_a_decision_is_left_as_it_is() -> None:
    tag = {"admincomment": f"wattshift:{NAME}"}
    assert fields_of(pending(), None) == tag
    begin_s = NOW_S + 20
    new = pending(eligible_time=begin_s, admin_comment=f"wattshift-hold:{begin_s}")
    assert fields_of(new, None) == {"admincomment": f"wattshift:{NAME};wattshift-hold:{begin_s}"}


def theirs_of(kind: str, mode: str = "control", **sizes: int) -> Theirs:
    """Return the one job of an engine, in a snapshot with a node it might run on."""
    snapshot = a_snapshot([a_job("a", **sizes)], [a_node(gpus=8)])
    return Theirs(snapshot, {"a": LiveRow("a", "site", mode, kind, "")})


@pytest.mark.parametrize("kind", ["slurm", "kueue"])
@pytest.mark.parametrize("mode", ["control", "dry_run"])
@pytest.mark.parametrize("reason", list(Reason))
def test_nothing_is_held_or_stopped_but_for_greener_hours_and_orders(reason: Reason, mode: str, kind: str) -> None:
    """Where the engine has a queue; until when is foreseen of no other one either."""
    holds, theirs = (Reason.GREENER_HOURS, Reason.GRID_ORDER), theirs_of(kind, mode)
    _, preempts = theirs.carried_out([], [Preempt(JobId("a"), reason, 1)])
    stops = bool(preempts) or theirs.would != {}
    assert stops == (reason in (*holds, Reason.SCALE_IN, Reason.SCALE_OUT))

    theirs = theirs_of(kind, mode)
    wanted = theirs.wanted([], [Hold(JobId("a"), reason, theirs.snapshot.now_s + 3_600)])["a"]
    assert (wanted["action"] == "hold") == (reason in holds)
    if mode == "dry_run":
        assert (theirs.would_start["a"][0] is not None) == (reason in holds)


def test_an_engine_without_a_queue_is_told_the_plans_order() -> None:
    theirs = theirs_of("ray")
    assert theirs.carried_out([], [Preempt(JobId("a"), Reason.OUTRANKED, 1)])[1] != []
    assert theirs.wanted([], [Hold(JobId("a"), Reason.NOT_ENOUGH_FREE_GPUS)])["a"]["action"] == "hold"
