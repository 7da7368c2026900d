"""What each policy would do with the current queue: one simulation of a recent snapshot, shared by all who ask.

At most one runs at a time in an installation, whoever asks and however often; a new one begins only when somebody asks
and the last is too old or does not include the job. The rows belong to a reserved name that no tenant can have; workers
claim, renew and retry them like any other run, so a kill only delays the answer.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from services.contracts.background import WorkRecord, WorkState
from services.contracts.explanations import Outcome, PolicyComparison, PolicyOutcome
from services.contracts.identity import Identity, Role
from services.contracts.simulations import LIVE, MAX_POLICIES, TrainingRequest
from services.core.policies.registry import POLICIES
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.kit.tasks import end_tasks
from services.simulator.repository import SimulationRepository
from services.simulator.service import SimulatorService

log = Log(__name__)

OWNER = Identity(tenant_id="_queue", role=Role.OPERATOR, key_id="simulator")
"""Names of tenants begin with a letter or a digit."""

ASSUMPTIONS = [
    "No further job is submitted, and jobs run for as long as predicted.",
    "Where nothing is measured, twice the GPUs take half the time.",
    "Policies begin without what they remember, and with default parameters; the one in force has its own.",
    "PUE is not included.",
]
REST = 5.0
"""A comparison that took long is not renewed before this many times as long, so that it never takes a core for good."""


@dataclass(frozen=True)
class Known:
    """A comparison that has succeeded."""

    work_id: str
    result: Mapping[str, Any]
    row: Mapping[str, int]

    def outcomes(self, job_id: str) -> list[PolicyOutcome]:
        """Return the outcomes of one of its jobs, the policy in force first."""
        row, result = self.row[job_id], self.result
        found = [_outcome(each, row, result) for each in result["policies"]]
        return sorted(found, key=lambda each: (not each.in_force, each.policy))


class Comparisons:
    """Answers from the newest comparison, and starts the next one when it is due."""

    def __init__(
        self, repository: SimulationRepository, service: SimulatorService, *, max_age_s: float, min_age_s: float
    ) -> None:
        """Take the stored runs, and a service whose queue takes one run of a tenant at a time.

        Args:
            max_age_s: A comparison older than this is renewed when somebody asks.
            min_age_s: A comparison younger than this is not renewed, even if it lacks the job or failed.
        """
        self._repository = repository
        self._service = service
        self._max_age = timedelta(seconds=max_age_s)
        self._min_age = timedelta(seconds=min_age_s)
        self._known: Known | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._problem: str | None = None
        self._tried_at = datetime.min.replace(tzinfo=UTC)

    async def close(self) -> None:
        if self._beginning is not None:
            await end_tasks([self._beginning])

    async def of(self, job_id: str) -> PolicyComparison:
        """Return what is known about a job; if nothing is, start a comparison and answer ``pending``."""
        newest = await self._repository.page(OWNER.tenant_id, (), None, 3)
        last = newest[0] if newest else None
        under_way = last is not None and last.state in (WorkState.QUEUED, WorkState.RUNNING)
        done = next((each for each in newest if each.state is WorkState.SUCCEEDED), None)
        known = None if done is None else await self._read(done)
        knows = known is not None and job_id in known.row
        if not under_way and self._is_due(last, knows=knows):
            self._begin()
            under_way = True
        if known is not None and knows:
            as_of = datetime.fromtimestamp(known.result["as_of_s"], UTC)
            notes = [*known.result["notes"], *ASSUMPTIONS]
            return PolicyComparison(status=Outcome.READY, as_of=as_of, items=known.outcomes(job_id), assumptions=notes)
        if last is not None and last.state in (WorkState.FAILED, WorkState.CANCELLED) and not under_way:
            why = "It was cancelled." if last.failure is None else last.failure.detail
            return PolicyComparison(status=Outcome.FAILED, detail=why)
        if self._problem is not None and (self._beginning is None or self._beginning.done()):
            return PolicyComparison(status=Outcome.FAILED, detail=self._problem)
        return PolicyComparison(status=Outcome.PENDING, detail="The present queue is being simulated.")

    def _is_due(self, last: WorkRecord | None, *, knows: bool) -> bool:
        now = datetime.now(UTC)
        if self._problem is not None and now - self._tried_at < self._min_age:
            return False
        if last is None:
            return True
        least = max(self._min_age, timedelta(seconds=REST * (last.columns["run_s"] or 0.0)))
        return now - last.submitted_at > (max(self._max_age, least) if knows else least)

    async def _read(self, done: WorkRecord) -> Known | None:
        if self._known is None or self._known.work_id != done.id:
            work = await self._repository.find(done.id, OWNER.tenant_id)
            if work is None or not isinstance(work.result, dict):
                return None
            rows = {job_id: row for row, job_id in enumerate(work.result["job_ids"])}
            self._known = Known(done.id, work.result, rows)
        return self._known

    def _begin(self) -> None:
        if self._beginning is None or self._beginning.done():
            self._beginning = asyncio.create_task(self._submit())

    async def _submit(self) -> None:
        """Submit a comparison; if another process got there first, its run serves."""
        self._tried_at = datetime.now(UTC)
        try:
            request = TrainingRequest(policy=[*POLICIES][:MAX_POLICIES], jobs=LIVE, carbon=LIVE)
            await self._service.submit(request, OWNER, None)
            await self._repository.forget_older(OWNER.tenant_id, keep=3)
            self._problem = None
        except ProblemError as error:
            if error.status != 429:
                self._problem = error.detail
                log.warning("comparison.not_begun", error=error.detail)
        except Exception as error:  # it is tried again when somebody asks again
            self._problem = "The present queue cannot be read right now."
            log.warning("comparison.not_begun", error=str(error) or type(error).__name__)


def _outcome(entry: Mapping[str, Any], row: int, result: Mapping[str, Any]) -> PolicyOutcome:
    policy, in_force = entry["policy"], entry["policy"] == result["policy_in_force"]
    if "failure" in entry:
        return PolicyOutcome(policy=policy, in_force=in_force, failure=entry["failure"])
    columns = entry["jobs"]
    starts_s, ends_s = columns["starts_at_s"][row], columns["ends_at_s"][row]
    return PolicyOutcome(
        policy=policy,
        in_force=in_force,
        starts_at=None if starts_s is None else datetime.fromtimestamp(starts_s, UTC),
        ends_at=None if ends_s is None else datetime.fromtimestamp(ends_s, UTC),
        waits_s=None if starts_s is None else max(starts_s - result["as_of_s"], 0.0),
        carbon_gco2=columns["carbon_gco2"][row],
    )
