"""What a gang's reports make of it."""

from dataclasses import replace
from typing import Any

import pytest

from services.contracts.cells import GIVEN_BACK
from services.contracts.nodes import OUT_OF_MEMORY, PORT_TAKEN, EndedBy, RankState
from services.core.domain.jobs import JobState
from services.scheduler.ingest.gangs import End, EndReason, Gang, GangState, Run, ShareReport, Stop, fate_of

RUNS = ShareReport(RankState.RUNNING)
STARTS = ShareReport(RankState.STARTING)
SILENT = ShareReport()
LOST = ShareReport(lost=EndReason.NODE_LOST)
DONE = ShareReport(RankState.EXITED, 0, EndedBy.ITSELF)
FAILED = ShareReport(RankState.EXITED, 3, EndedBy.ITSELF, "boom")
STOPPED = ShareReport(RankState.EXITED, 0, EndedBy.STOP)
KILLED = ShareReport(RankState.EXITED, -9, EndedBy.STOP)
FENCED = ShareReport(RankState.EXITED, -15, EndedBy.LEASE)
UNHEARD = ShareReport(RankState.EXITED, 1, EndedBy.ITSELF, f"{PORT_TAKEN}, 31480.")
HUNGRY = ShareReport(RankState.EXITED, -9, EndedBy.ITSELF, f"It was killed because it {OUT_OF_MEMORY} of 3.0 GiB.")
OVERDUE = ShareReport(RankState.EXITED, 0, EndedBy.TIME_LIMIT, "It reached its time limit of 60 s.")
REFUSED = ShareReport(RankState.EXITED, None, EndedBy.REFUSED, "no such device")
HOPELESS = ShareReport(RankState.EXITED, 126, EndedBy.CANNOT_START, "it cannot enter its folder: let it in")


def gang(*shares: ShareReport, state: GangState = GangState.RUNNING, **facts: Any) -> Gang:
    return Gang(state, facts.pop("stop_reason", None), shares, **facts)


def stopping(reason: EndReason, *shares: ShareReport, **facts: Any) -> Gang:
    return gang(*shares, state=GangState.STOPPING, stop_reason=reason, **facts)


@pytest.mark.parametrize(
    ("before", "fate"),
    [
        (gang(RUNS, RUNS), None),
        (gang(RUNS, SILENT, state=GangState.STARTING), None),
        (gang(RUNS, RUNS, state=GangState.STARTING), Run()),
        (gang(RUNS, DONE, state=GangState.STARTING), Run()),
        (gang(RUNS, STARTS, state=GangState.STARTING, is_late=True), Stop(EndReason.START_FAILED)),
        (gang(RUNS, DONE), None),
        (gang(RUNS, FAILED), Stop(EndReason.FAILED)),
        (gang(RUNS, FENCED), Stop(EndReason.NODE_LOST)),
        (gang(RUNS, LOST), Stop(EndReason.NODE_LOST)),
        (gang(RUNS, LOST, FAILED), Stop(EndReason.FAILED)),
        (gang(RUNS, REFUSED), Stop(EndReason.START_FAILED)),
        (gang(RUNS, HOPELESS), Stop(EndReason.START_FAILED)),
        (gang(RUNS, OVERDUE), Stop(EndReason.TIME_LIMIT)),
        (gang(RUNS, cancel_requested=True), Stop(EndReason.CANCELLED)),
        (gang(RUNS, hold_requested=True), Stop(EndReason.HELD)),
        (gang(RUNS, moves=True), Stop(EndReason.PREEMPTED)),
        (gang(RUNS, moves=True, hold_requested=True), Stop(EndReason.HELD)),
        (gang(RUNS, FAILED, finished_before=True), Stop(EndReason.FINISHED)),
        (stopping(EndReason.PREEMPTED, RUNS, STOPPED), None),
        (stopping(EndReason.PREEMPTED, RUNS, FAILED), None),
    ],
)
def test_while_a_part_of_it_lives(before: Gang, fate: object) -> None:
    assert fate_of(before) == fate


@pytest.mark.parametrize(
    ("before", "state", "reason"),
    [
        (gang(DONE, DONE), JobState.SUCCEEDED, EndReason.FINISHED),
        (stopping(EndReason.PREEMPTED, DONE, DONE), JobState.SUCCEEDED, EndReason.FINISHED),
        (stopping(EndReason.FINISHED, KILLED, finished_before=True), JobState.SUCCEEDED, EndReason.FINISHED),
        (gang(FAILED, finished_before=True), JobState.SUCCEEDED, EndReason.FINISHED),
        (stopping(EndReason.PREEMPTED, STOPPED), JobState.QUEUED, EndReason.PREEMPTED),
        (stopping(EndReason.PREEMPTED, STOPPED, work_done=True), JobState.SUCCEEDED, EndReason.FINISHED),
        (stopping(EndReason.PREEMPTED, KILLED), JobState.QUEUED, EndReason.PREEMPTED),
        (stopping(EndReason.HELD, STOPPED, hold_requested=True), JobState.HELD, EndReason.HELD),
        (stopping(EndReason.HELD, STOPPED), JobState.QUEUED, EndReason.HELD),
        (stopping(EndReason.CANCELLED, KILLED, cancel_requested=True), JobState.CANCELLED, EndReason.CANCELLED),
        (gang(LOST, LOST), JobState.QUEUED, EndReason.NODE_LOST),
        (gang(LOST, cancel_requested=True), JobState.CANCELLED, EndReason.CANCELLED),
        (stopping(EndReason.NODE_LOST, LOST, STOPPED), JobState.QUEUED, EndReason.NODE_LOST),
        (gang(FENCED), JobState.QUEUED, EndReason.NODE_LOST),
        (gang(FAILED, DONE), JobState.FAILED, EndReason.FAILED),
        (stopping(EndReason.FAILED, FAILED, KILLED), JobState.FAILED, EndReason.FAILED),
        (gang(FAILED, max_restarts=1), JobState.QUEUED, EndReason.FAILED),
        (gang(FAILED, max_restarts=1, restarts=1), JobState.FAILED, EndReason.FAILED),
        (gang(FAILED, max_restarts=1, hold_requested=True), JobState.HELD, EndReason.FAILED),
        (gang(UNHEARD, FAILED), JobState.FAILED, EndReason.PORT_TAKEN),
        (gang(FAILED, HUNGRY), JobState.FAILED, EndReason.OUT_OF_MEMORY),
        (stopping(EndReason.FAILED, HUNGRY, KILLED), JobState.FAILED, EndReason.OUT_OF_MEMORY),
        (gang(HUNGRY, max_restarts=1), JobState.QUEUED, EndReason.OUT_OF_MEMORY),
        (gang(replace(HUNGRY, ended_by=EndedBy.STOP), stop_reason=EndReason.HELD), JobState.QUEUED, EndReason.HELD),
        (gang(HUNGRY, OVERDUE), JobState.FAILED, EndReason.TIME_LIMIT),
        (gang(REFUSED, start_attempts=2), JobState.QUEUED, EndReason.START_FAILED),
        (gang(HOPELESS, start_attempts=5, max_restarts=3), JobState.FAILED, EndReason.START_FAILED),
        (stopping(EndReason.START_FAILED, HOPELESS, KILLED, start_attempts=5), JobState.FAILED, EndReason.START_FAILED),
        (gang(HOPELESS, cancel_requested=True), JobState.CANCELLED, EndReason.CANCELLED),
        (gang(OVERDUE, OVERDUE, max_restarts=3), JobState.FAILED, EndReason.TIME_LIMIT),
        (gang(FAILED, OVERDUE, max_restarts=3), JobState.FAILED, EndReason.TIME_LIMIT),
        (gang(OVERDUE, stop_reason=EndReason.PREEMPTED), JobState.FAILED, EndReason.TIME_LIMIT),
        (gang(OVERDUE, cancel_requested=True), JobState.CANCELLED, EndReason.CANCELLED),
        (gang(OVERDUE, work_done=True), JobState.SUCCEEDED, EndReason.FINISHED),
        (gang(REFUSED, start_attempts=2, failed_starts=1), JobState.FAILED, EndReason.START_FAILED),
    ],
)
def test_once_all_of_it_has_ended(before: Gang, state: JobState, reason: EndReason) -> None:
    end = fate_of(before)
    assert isinstance(end, End)
    assert (end.job_state, end.reason) == (state, reason)


def test_a_gang_that_is_given_back_is_cancelled_in_words_of_its_own() -> None:
    details = [
        end.detail
        for held in (True, False)
        for end in [fate_of(stopping(EndReason.CANCELLED, KILLED, cancel_requested=True, hold_requested=held))]
        if isinstance(end, End) and end.job_state is JobState.CANCELLED
    ]
    assert details == [GIVEN_BACK, "Cancelled by its owner."]


@pytest.mark.parametrize("said", ["this node has no container engine", "Its files are gone."])
def test_why_a_job_never_started_is_told_in_whole_sentences(said: str) -> None:
    end = fate_of(gang(replace(REFUSED, detail=said), start_attempts=2, failed_starts=1))
    assert isinstance(end, End)
    assert end.detail == f"{said.rstrip('.')}. Tried 2 times."


def test_a_start_that_no_further_try_could_mend_is_the_last() -> None:
    end = fate_of(gang(HOPELESS, start_attempts=5))
    assert isinstance(end, End)
    assert end.detail == "it cannot enter its folder: let it in."


def test_the_exit_code_is_that_of_the_part_that_failed_by_itself() -> None:
    end = fate_of(stopping(EndReason.FAILED, KILLED, FAILED))
    assert isinstance(end, End)
    assert (end.exit_code, end.detail) == (3, "boom")


def test_a_part_that_ran_out_of_memory_is_the_cause_and_counts_as_a_failure() -> None:
    end = fate_of(stopping(EndReason.FAILED, FAILED, HUNGRY, max_restarts=1))
    assert isinstance(end, End)
    assert (end.exit_code, end.detail, end.counts_as_restart) == (-9, f"{HUNGRY.detail} Restart 1 of 1.", True)


def test_only_a_preemption_counts_as_one_and_only_a_failure_as_a_restart() -> None:
    alone = ShareReport(RankState.EXITED, 0, EndedBy.STOP, "slow; Its checkpoint was not copied: it is on n1 alone.")
    for reason in (EndReason.PREEMPTED, EndReason.NODE_LOST, EndReason.SLICE_LOST, EndReason.GPU_LOST):
        told = fate_of(stopping(reason, alone, STOPPED))
        assert isinstance(told, End)
        assert told.detail.endswith("Its checkpoint was not copied: it is on n1 alone.")
        assert "continue from its checkpoint" not in told.detail
    preempted = fate_of(stopping(EndReason.PREEMPTED, STOPPED))
    lost = fate_of(gang(LOST))
    again = fate_of(gang(FAILED, max_restarts=1))
    assert isinstance(preempted, End)
    assert isinstance(lost, End)
    assert isinstance(again, End)
    counts = [(end.counts_as_preemption, end.counts_as_restart) for end in (preempted, lost, again)]
    assert counts == [(True, False), (False, False), (False, True)]
