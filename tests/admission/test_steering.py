"""Cancel, hold and release in every state, and against a scheduler that is faster."""

import asyncio

import pytest

from services.admission.steering import Command, Steered, decide
from services.core.domain.errors import TransitionError
from services.core.domain.jobs import JobState
from tests.admission.installation import Admission

S = JobState
HOLDING = [S.STARTING, S.RUNNING, S.PREEMPTING]
ENDED = [S.SUCCEEDED, S.FAILED, S.CANCELLED]
SAME, REFUSED = None, "refused"

# What each command does to a job in each state: the event that tells of it, nothing, or a refusal.
TABLE: list[tuple[Command, list[JobState], str | None]] = [
    (Command.CANCEL, [S.QUEUED, S.HELD], "job.cancelled"),
    (Command.CANCEL, HOLDING, "job.cancel_requested"),
    (Command.CANCEL, [S.CANCELLED], SAME),
    (Command.CANCEL, [S.SUCCEEDED, S.FAILED], REFUSED),
    (Command.HOLD, [S.QUEUED], "job.held"),
    (Command.HOLD, [S.HELD], SAME),
    (Command.HOLD, HOLDING, "job.hold_requested"),
    (Command.HOLD, ENDED, REFUSED),
    (Command.RELEASE, [S.HELD], "job.queued"),
    (Command.RELEASE, [S.QUEUED, *HOLDING], SAME),
    (Command.RELEASE, ENDED, REFUSED),
    (Command.WITHDRAW, [S.QUEUED, S.HELD], "job.cancelled"),
    (Command.WITHDRAW, HOLDING, "job.cancel_requested"),
    (Command.WITHDRAW, [S.CANCELLED], SAME),
    (Command.WITHDRAW, [S.SUCCEEDED, S.FAILED], REFUSED),
    (Command.GIVE_BACK, [S.QUEUED, S.HELD], "job.cancelled"),
    (Command.GIVE_BACK, HOLDING, "job.cancel_requested"),
    (Command.GIVE_BACK, [S.CANCELLED], SAME),
    (Command.GIVE_BACK, [S.SUCCEEDED, S.FAILED], REFUSED),
    (Command.FORGET_CHECKPOINT, [S.QUEUED, S.HELD], SAME),
    (Command.FORGET_CHECKPOINT, [*HOLDING, *ENDED], REFUSED),
]
CASES = [(command, state, event) for command, states, event in TABLE for state in states]


def test_the_table_is_complete() -> None:
    assert {(command, state) for command, state, _ in CASES} == {
        (command, state) for command in Command for state in JobState
    }


@pytest.mark.parametrize(("command", "state", "event"), CASES)
def test_each_command_in_each_state(command: Command, state: JobState, event: str | None) -> None:
    if event == REFUSED:
        with pytest.raises(TransitionError):
            decide(command, Steered(state))
        return
    decision = decide(command, Steered(state))
    assert (decision and decision.event) == event


@pytest.mark.parametrize("state", JobState)
def test_what_was_started_is_not_withdrawn(state: JobState) -> None:
    with pytest.raises(TransitionError):
        decide(Command.WITHDRAW, Steered(state, generation=1))


@pytest.mark.parametrize(("command", "event"), [("cancel", "job.cancel_requested"), ("hold", "job.hold_requested")])
def test_what_a_cell_has_is_only_marked(command: str, event: str) -> None:
    decision = decide(Command(command), Steered(S.QUEUED, cell="north"))
    assert (decision and decision.event) == event
    assert decision
    assert "state" not in decision.values


@pytest.mark.parametrize("state", HOLDING)
def test_what_was_asked_already(state: JobState) -> None:
    assert decide(Command.CANCEL, Steered(state, cancel_requested=True)) is None
    assert decide(Command.HOLD, Steered(state, hold_requested=True)) is None
    withdrawn = decide(Command.RELEASE, Steered(state, hold_requested=True))
    assert withdrawn is not None
    assert withdrawn.values == {"hold_requested": False}
    for command in (Command.HOLD, Command.RELEASE):
        with pytest.raises(TransitionError):
            decide(command, Steered(state, cancel_requested=True))


@pytest.mark.parametrize("held", [True, False])
def test_only_what_is_given_back_is_marked_as_cancelled_and_held(held: bool) -> None:
    marks = [
        decision and decision.values["cancel_requested"] + 2 * decision.values["hold_requested"]
        for command in (Command.GIVE_BACK, Command.CANCEL)
        for decision in [decide(command, Steered(S.RUNNING, hold_requested=held))]
    ]
    assert marks == [3, 1]


async def test_a_waiting_job_is_cancelled_at_once(admission: Admission) -> None:
    job_id = await admission.submit()
    for _ in range(2):
        answer = await admission.ask("POST", f"/v1/jobs/{job_id}/cancel")
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert answer.json()["ended_at"]
    assert await admission.count("job_events", f"job_id = '{job_id}' AND type = 'job.cancelled'") == 1
    refused = await admission.ask("POST", f"/v1/jobs/{job_id}/release")
    assert (refused.status_code, refused.json()["code"]) == (409, "invalid_transition")


async def test_hold_and_release_go_back_and_forth(admission: Admission) -> None:
    job_id = await admission.submit()
    states = [
        (await admission.ask("POST", f"/v1/jobs/{job_id}/{command}")).json()["state"]
        for command in ("hold", "hold", "release", "release", "hold", "cancel")
    ]
    assert states == ["held", "held", "queued", "queued", "held", "cancelled"]


async def test_a_job_that_was_held_for_losing_nodes_begins_anew_once_released(admission: Admission) -> None:
    job_id = await admission.submit()
    await admission.database.execute(
        "UPDATE jobs SET state = 'held', reason = 'node_losses', detail = 'x', node_losses = 3 WHERE id = $1", job_id
    )
    held = (await admission.ask("GET", f"/v1/jobs/{job_id}")).json()
    assert (held["state"], held["reason"], held["detail"], held["node_losses"]) == ("held", "node_losses", "x", 3)
    released = (await admission.ask("POST", f"/v1/jobs/{job_id}/release")).json()
    assert (released["state"], released["reason"], released["node_losses"]) == ("queued", None, 0)


async def test_a_running_job_is_left_to_the_scheduler(admission: Admission) -> None:
    job_id = await admission.submit()
    await admission.start(job_id)
    answer = await admission.ask("POST", f"/v1/jobs/{job_id}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (200, "running")
    assert await admission.count("jobs", f"id = '{job_id}' AND cancel_requested") == 1


async def test_a_job_that_is_being_started_is_not_cancelled_behind_the_schedulers_back(admission: Admission) -> None:
    job_id = await admission.submit()
    async with admission.database.transaction():
        await admission.database.execute(
            "UPDATE jobs SET state = 'starting' WHERE id = $1 AND state = 'queued'", job_id
        )
        cancel = asyncio.create_task(admission.ask("POST", f"/v1/jobs/{job_id}/cancel"))
        done, _ = await asyncio.wait({cancel}, timeout=0.2)
        assert not done  # it waits for the row
    assert (await cancel).json()["state"] == "starting"
    assert await admission.count("jobs", f"id = '{job_id}' AND cancel_requested") == 1


async def test_many_cancels_at_once_are_one(admission: Admission) -> None:
    job_id = await admission.submit()
    answers = await asyncio.gather(*(admission.ask("POST", f"/v1/jobs/{job_id}/cancel") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert await admission.count("job_events", f"job_id = '{job_id}' AND type = 'job.cancelled'") == 1


async def test_what_an_operator_does_to_others_is_audited(admission: Admission) -> None:
    tenant = await admission.make_tenant("audited")
    job_id = await admission.submit(tenant=tenant)
    assert (await admission.ask("POST", f"/v1/jobs/{job_id}/cancel", role="operator")).status_code == 200
    entries = (await admission.ask("GET", "/v1/audit", role="operator")).json()["items"]
    assert (entries[0]["action"], entries[0]["target"]) == ("job.cancelled", job_id)


@pytest.mark.parametrize(("state", "said"), [(S.QUEUED, {"reason": None, "detail": None}), (S.HELD, {})])
def test_a_checkpoint_is_forgotten_by_a_job_that_waits(state: JobState, said: dict[str, None]) -> None:
    decision = decide(Command.FORGET_CHECKPOINT, Steered(state, bound_to=["n"]))

    assert decision is not None
    assert (decision.event, decision.values) == ("job.checkpoint_forgotten", {"bound_to": None, **said})
