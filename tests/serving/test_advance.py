"""How an instance moves on: what counts, and what is of another time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from services.contracts.nodes import Listener
from services.contracts.serving import InstanceState, PoolPlace, ServerMode, ServerProbes
from services.core.domain.jobs import JobState
from services.serving.controller.advance import Change, Seen, advance, one_by_one
from services.serving.controller.probes import KeyCheck
from services.serving.instances import Instance, InstanceJob, InstanceTerms

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
URL = "http://127.0.0.1:29500"
PROBES = ServerProbes()
TERMS = InstanceTerms(
    mode=ServerMode(name="one", gpu_model="A100", gpus=1, command=["serve"]),
    place=PoolPlace(name="here", zone="DE"),
    probes=PROBES,
)
RUNS = InstanceJob(JobState.RUNNING, url=URL, running_at=NOW - timedelta(seconds=30))
READY = Instance(
    *("i", "pool", "acme", "here", "one", InstanceState.READY, TERMS, NOW),
    **{"job_id": "j", "job": RUNS, "url": URL, "ready_at": NOW},
)
STARTING = replace(READY, state=InstanceState.STARTING, url=None, ready_at=None)
DRAINING = replace(READY, state=InstanceState.DRAINING, draining_at=NOW - timedelta(seconds=20), reason="not_needed")


def becomes(instance: Instance, seen: Seen | None = None) -> Change:
    return advance(instance, seen, PROBES, NOW)


def state_of(instance: Instance, seen: Seen | None = None) -> InstanceState:
    return becomes(instance, seen).get("state", instance.state)


def test_only_an_answer_from_where_it_runs_now_makes_it_ready() -> None:
    answered = Seen(InstanceState.STARTING, URL, answers=True)
    assert state_of(STARTING, answered) is InstanceState.READY
    assert state_of(STARTING, replace(answered, url="http://127.0.0.1:29501")) is InstanceState.STARTING
    assert state_of(STARTING, replace(answered, answers=False)) is InstanceState.STARTING
    assert state_of(STARTING, replace(answered, state=InstanceState.READY)) is InstanceState.STARTING


def test_an_instance_whose_port_another_process_has_gets_no_requests() -> None:
    """Whatever answers there, and in whichever state the instance is."""
    foreign = replace(RUNS, listener=Listener.FOREIGN)
    for instance in (STARTING, READY, replace(READY, silent_since=NOW), DRAINING):
        seen = Seen(instance.state, URL, answers=True, empties=0)
        stopped = becomes(replace(instance, job=foreign), seen)
        assert (stopped["state"], stopped["reason"], stopped["listener"]) == ("stopping", "port_taken", "foreign")
    moves = [
        (each, becomes(each)) for each in (replace(READY, id=name, job=foreign, silent_since=NOW) for name in "ab")
    ]
    assert one_by_one(moves) == moves, "none is spared, though all are silent"
    assert state_of(replace(STARTING, state=InstanceState.STOPPING, job=foreign)) is InstanceState.STOPPING


@pytest.mark.parametrize("listener", [*Listener, None])
def test_an_answer_counts_if_it_can_be_the_instance_s_own(listener: Listener | None) -> None:
    starting = replace(STARTING, job=replace(RUNS, listener=listener))
    answered = Seen(InstanceState.STARTING, URL, answers=True)

    ready = state_of(starting, answered) is InstanceState.READY

    assert ready == (listener in (Listener.OWN, Listener.UNCHECKED, None)), "an older agent does not look"
    assert becomes(starting, answered).get("listener") == listener


def test_an_instance_is_ready_once_its_key_is_accepted() -> None:
    def after(key: KeyCheck | None, job: InstanceJob = RUNS) -> Change:
        return becomes(replace(STARTING, job=job), Seen(InstanceState.STARTING, URL, answers=True, key=key))

    keys = (KeyCheck.CHECKED, KeyCheck.UNCHECKED, None)
    assert [after(key)["state"] for key in keys] == ["ready"] * 3
    assert [after(key)["checks_key"] for key in keys] == [True, False, None]
    assert after(KeyCheck.REFUSED)["reason"] == "key_refused"
    assert "state" not in after(KeyCheck.REFUSED)
    late = replace(RUNS, running_at=NOW - timedelta(seconds=PROBES.ready_timeout_s + 1))
    assert (after(KeyCheck.REFUSED, late)["state"], after(KeyCheck.CHECKED, late)["state"]) == ("stopping", "ready")


def test_it_is_given_up_when_it_loads_for_too_long_but_not_for_waiting() -> None:
    long_ago = NOW - timedelta(seconds=PROBES.ready_timeout_s + 1)
    loads = replace(STARTING, job=replace(RUNS, running_at=long_ago))
    assert becomes(loads)["reason"] == "not_ready"
    waits = replace(STARTING, created_at=long_ago, job=InstanceJob(JobState.QUEUED, queued_at=long_ago))
    assert state_of(waits) is InstanceState.STARTING


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
def test_an_instance_ends_with_its_job_and_says_why(state: JobState) -> None:
    over = InstanceJob(state, "failed", "Exit status 1.")
    for instance in (STARTING, READY):
        ended = becomes(replace(instance, job=over))
        assert (ended["state"], ended["reason"], ended["detail"]) == ("ended", "failed", "Exit status 1.")
    for leaving in (DRAINING, replace(DRAINING, state=InstanceState.STOPPING)):
        ended = becomes(replace(leaving, job=over))
        assert (ended["state"], "reason" in ended) == ("ended", False), "why it left is known"
    assert becomes(replace(READY, job=None))["reason"] == "job_missing"


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.STARTING, JobState.PREEMPTING, JobState.HELD])
def test_no_request_goes_to_a_job_that_starts_again(state: JobState) -> None:
    again = becomes(replace(READY, job=InstanceJob(state, "node_lost"), silent_since=NOW))
    assert (again["state"], again["url"], again["silent_since"]) == ("starting", None, None)
    assert state_of(replace(DRAINING, job=InstanceJob(state))) is InstanceState.STOPPING


def test_another_process_at_the_same_port_is_not_the_one_that_answered() -> None:
    later = replace(RUNS, running_at=NOW + timedelta(seconds=1))
    assert state_of(replace(READY, job=later)) is InstanceState.STARTING
    assert state_of(replace(DRAINING, job=later)) is InstanceState.STOPPING


def test_silence_must_be_long_and_heard_twice() -> None:
    silent = replace(READY, silent_since=NOW - timedelta(seconds=PROBES.unhealthy_timeout_s))
    heard = Seen(InstanceState.READY, URL, answers=False, silences=2)
    assert state_of(silent, heard) is InstanceState.STOPPING
    assert state_of(silent, replace(heard, silences=1)) is InstanceState.READY
    assert state_of(silent) is InstanceState.READY
    assert becomes(READY, heard) == {"silent_since": NOW}
    assert becomes(silent, replace(heard, answers=True)) == {"silent_since": None}


def test_a_drain_ends_with_two_empty_readings_or_its_time() -> None:
    empty = Seen(InstanceState.DRAINING, URL, empties=2)
    assert state_of(DRAINING, empty) is InstanceState.STOPPING
    assert state_of(DRAINING, replace(empty, empties=1)) is InstanceState.DRAINING
    just_now = replace(DRAINING, draining_at=NOW - timedelta(seconds=1))
    assert state_of(just_now, empty) is InstanceState.DRAINING
    old = replace(DRAINING, draining_at=NOW - timedelta(seconds=PROBES.drain_timeout_s))
    assert state_of(old) is InstanceState.STOPPING
    no_metrics = PROBES.model_copy(update={"load_path": None})
    assert advance(DRAINING, None, no_metrics, NOW)["state"] is InstanceState.STOPPING
    assert advance(just_now, None, no_metrics, NOW) == {}


def test_a_wanted_instance_leaves_that_state_by_the_answer_to_its_submission_alone() -> None:
    wanted = replace(STARTING, state=InstanceState.WANTED, job_id=None, job=None)
    assert becomes(wanted) == {}
    made = becomes(wanted, Seen(InstanceState.WANTED, job_id="j"))
    assert (made["state"], made["job_id"]) == ("starting", "j")
    found = becomes(replace(wanted, job_id="j"), Seen(InstanceState.WANTED, refusal=("refused", "No."), is_final=True))
    assert (found["state"], found["job_id"]) == ("starting", "j"), "there is a job, whatever was answered"
    assert state_of(wanted, Seen(InstanceState.WANTED, refusal=("refused", "No."), is_final=True)) == "ended"
    away = Seen(InstanceState.WANTED, refusal=("admission_unavailable", "Later."))
    assert becomes(wanted, away) == {"reason": "admission_unavailable", "detail": "Later."}


def test_when_nobody_answers_one_is_given_up_at_a_time() -> None:
    heard = Seen(InstanceState.READY, URL, answers=False, silences=2)
    silent = [
        replace(READY, id=str(number), silent_since=NOW - timedelta(seconds=PROBES.unhealthy_timeout_s))
        for number in range(3)
    ]

    def given_up(*others: Instance) -> list[str]:
        moves = [(each, becomes(each, heard)) for each in (*silent, *others)]
        return [each.id for each, change in one_by_one(moves) if change.get("reason") == "unhealthy"]

    assert given_up() == ["0"]
    assert given_up(replace(STARTING, id="new")) == []
    answers = (READY, becomes(READY, replace(heard, answers=True)))
    moves = [(each, becomes(each, heard)) for each in silent]
    assert one_by_one([*moves, answers]) == [*moves, answers], "somebody is heard: the silence is theirs"
    assert one_by_one(moves[:1]) == moves[:1]
