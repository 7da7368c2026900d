"""Cancel, hold and release in every state, and against a scheduler that is faster."""

import asyncio

import pytest

from services.admission.steering import Verb, decide
from services.core.domain.errors import TransitionError
from services.core.domain.jobs import JobState
from tests.admission.desk import Desk

S = JobState
HOLDING = [S.STARTING, S.RUNNING, S.PREEMPTING]
ENDED = [S.SUCCEEDED, S.FAILED, S.CANCELLED]
SAME, REFUSED = None, "refused"

# What each verb does to a job in each state: the event that tells of it, nothing, or a refusal.
TABLE: list[tuple[Verb, list[JobState], str | None]] = [
    (Verb.CANCEL, [S.QUEUED, S.HELD], "job.cancelled"),
    (Verb.CANCEL, HOLDING, "job.cancel_requested"),
    (Verb.CANCEL, [S.CANCELLED], SAME),
    (Verb.CANCEL, [S.SUCCEEDED, S.FAILED], REFUSED),
    (Verb.HOLD, [S.QUEUED], "job.held"),
    (Verb.HOLD, [S.HELD], SAME),
    (Verb.HOLD, HOLDING, "job.hold_requested"),
    (Verb.HOLD, ENDED, REFUSED),
    (Verb.RELEASE, [S.HELD], "job.queued"),
    (Verb.RELEASE, [S.QUEUED, *HOLDING], SAME),
    (Verb.RELEASE, ENDED, REFUSED),
]
CASES = [(verb, state, event) for verb, states, event in TABLE for state in states]


def test_the_table_is_complete() -> None:
    assert {(verb, state) for verb, state, _ in CASES} == {(verb, state) for verb in Verb for state in JobState}


@pytest.mark.parametrize(("verb", "state", "event"), CASES)
def test_each_verb_in_each_state(verb: Verb, state: JobState, event: str | None) -> None:
    if event == REFUSED:
        with pytest.raises(TransitionError):
            decide(verb, state, cancel_requested=False, hold_requested=False)
        return
    decision = decide(verb, state, cancel_requested=False, hold_requested=False)
    assert (decision and decision.event) == event


@pytest.mark.parametrize("state", HOLDING)
def test_what_was_asked_already(state: JobState) -> None:
    assert decide(Verb.CANCEL, state, cancel_requested=True, hold_requested=False) is None
    assert decide(Verb.HOLD, state, cancel_requested=False, hold_requested=True) is None
    withdrawn = decide(Verb.RELEASE, state, cancel_requested=False, hold_requested=True)
    assert withdrawn is not None
    assert withdrawn.values == {"hold_requested": False}
    for verb in (Verb.HOLD, Verb.RELEASE):
        with pytest.raises(TransitionError):
            decide(verb, state, cancel_requested=True, hold_requested=False)


async def test_a_waiting_job_is_cancelled_at_once(desk: Desk) -> None:
    job_id = await desk.submit()
    for _ in range(2):
        answer = await desk.ask("POST", f"/v1/jobs/{job_id}/cancel")
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert answer.json()["ended_at"]
    assert await desk.count("job_events", f"job_id = '{job_id}' AND type = 'job.cancelled'") == 1
    refused = await desk.ask("POST", f"/v1/jobs/{job_id}/release")
    assert (refused.status_code, refused.json()["code"]) == (409, "invalid_transition")


async def test_hold_and_release_go_back_and_forth(desk: Desk) -> None:
    job_id = await desk.submit()
    states = [
        (await desk.ask("POST", f"/v1/jobs/{job_id}/{verb}")).json()["state"]
        for verb in ("hold", "hold", "release", "release", "hold", "cancel")
    ]
    assert states == ["held", "held", "queued", "queued", "held", "cancelled"]


async def test_a_running_job_is_left_to_the_scheduler(desk: Desk) -> None:
    job_id = await desk.submit()
    await desk.start(job_id)
    answer = await desk.ask("POST", f"/v1/jobs/{job_id}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (200, "running")
    assert await desk.count("jobs", f"id = '{job_id}' AND cancel_requested") == 1


async def test_a_job_that_is_being_started_is_not_cancelled_behind_the_schedulers_back(desk: Desk) -> None:
    job_id = await desk.submit()
    async with desk.database.transaction():
        await desk.database.execute("UPDATE jobs SET state = 'starting' WHERE id = $1 AND state = 'queued'", job_id)
        cancel = asyncio.create_task(desk.ask("POST", f"/v1/jobs/{job_id}/cancel"))
        done, _ = await asyncio.wait({cancel}, timeout=0.2)
        assert not done  # it waits for the row
    assert (await cancel).json()["state"] == "starting"
    assert await desk.count("jobs", f"id = '{job_id}' AND cancel_requested") == 1


async def test_many_cancels_at_once_are_one(desk: Desk) -> None:
    job_id = await desk.submit()
    answers = await asyncio.gather(*(desk.ask("POST", f"/v1/jobs/{job_id}/cancel") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert await desk.count("job_events", f"job_id = '{job_id}' AND type = 'job.cancelled'") == 1


async def test_what_an_operator_does_to_others_is_audited(desk: Desk) -> None:
    tenant = await desk.make_tenant("audited")
    job_id = await desk.submit(tenant=tenant)
    assert (await desk.ask("POST", f"/v1/jobs/{job_id}/cancel", role="operator")).status_code == 200
    entries = (await desk.ask("GET", "/v1/audit", role="operator")).json()["items"]
    assert (entries[0]["action"], entries[0]["target"]) == ("job.cancelled", job_id)
