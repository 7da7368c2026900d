"""Many submissions, one transaction: the hot path of the whole system.

There is one fsync per commit, not per job, and one statement per commit, not per row. A submission is answered after
its COMMIT; while one commit is being carried out, submissions gather for the next.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import asyncpg

from services.admission.figures import COMMITS, SUBMISSIONS
from services.admission.repository.submissions import SubmissionRepository
from services.admission.submissions import Draft, refused
from services.contracts.codes import ProblemCode
from services.contracts.jobs import SubmissionAnswer
from services.db.engine import is_connection_error
from services.kit import traces
from services.kit.logging import Log
from services.kit.problems import ProblemError, unavailable

log = Log(__name__)

RETRY_EVERY_S = 0.1


@dataclass(slots=True, eq=False)
class _Parcel:
    drafts: Sequence[Draft]
    answers: asyncio.Future[list[SubmissionAnswer]]
    jobs: int


class Committer:
    """Gathers drafts into commits; its ``run`` must be running."""

    def __init__(
        self, repository: SubmissionRepository, on_commit: Callable[[], None], *, max_jobs: int, patience_s: float
    ) -> None:
        self._repository, self._on_commit = repository, on_commit
        self._max_jobs, self._patience_s = max_jobs, patience_s
        self._parcels: deque[_Parcel] = deque()
        self._arrived = asyncio.Event()
        self._has_ended = False

    async def submit(self, drafts: Sequence[Draft]) -> list[SubmissionAnswer]:
        """Return the answers once the accepted jobs are on disk."""
        parcel = _Parcel(drafts, asyncio.get_running_loop().create_future(), sum(d.count for d in drafts))
        if self._has_ended:
            parcel.answers.cancel()
        else:
            self._parcels.append(parcel)
            self._arrived.set()
        return await parcel.answers

    async def run(self) -> None:
        """Commit what arrives until cancelled; submissions unanswered by then, or arriving later, are cancelled too."""
        parcels: list[_Parcel] = []
        try:
            while True:
                await self._arrived.wait()
                parcels = self._next_commit()
                answers = await self._settle([draft for parcel in parcels for draft in parcel.drafts])
                for answer in answers:
                    SUBMISSIONS.labels(str(answer.status)).inc()
                left = iter(answers)
                for parcel in parcels:
                    found = [next(left) for _ in parcel.drafts]
                    if not parcel.answers.done():  # the caller may have been cancelled
                        parcel.answers.set_result(found)
        finally:
            self._has_ended = True
            for parcel in (*parcels, *self._parcels):
                parcel.answers.cancel()
            await self._repository.close()

    def _next_commit(self) -> list[_Parcel]:
        parcels = [self._parcels.popleft()]
        jobs = parcels[0].jobs
        while self._parcels and jobs + self._parcels[0].jobs <= self._max_jobs:
            parcels.append(self._parcels.popleft())
            jobs += parcels[-1].jobs
        if not self._parcels:
            self._arrived.clear()
        return parcels

    async def _settle(self, drafts: Sequence[Draft]) -> list[SubmissionAnswer]:
        """Commit ``drafts`` together or, if the database refuses one of them, each by itself."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                began_s = time.perf_counter()
                with traces.within(drafts[0].traceparent):  # a commit is noted in the trace of its first submission
                    answers = await self._repository.commit(drafts)
                COMMITS.observe(time.perf_counter() - began_s)
                if any(answer.status == 201 and not answer.replayed for answer in answers):
                    self._on_commit()
                return answers
            except Exception as error:  # whatever goes wrong, every submission gets an answer
                if is_connection_error(error):
                    if time.monotonic() < deadline_s:
                        await asyncio.sleep(RETRY_EVERY_S)
                        continue
                    log.error("commit.no_database", submissions=len(drafts), error=str(error))
                    problem = unavailable("The database")
                elif len(drafts) > 1:
                    log.warning("commit.split", submissions=len(drafts), error=str(error))
                    return [(await self._settle([draft]))[0] for draft in drafts]
                else:
                    problem = self._refusal(error)
                self._repository.forget(drafts)
                return [refused(problem)] * len(drafts)

    @staticmethod
    def _refusal(error: Exception) -> ProblemError:
        if isinstance(error, asyncpg.DataError):
            log.warning("commit.refused", error=str(error))
            return ProblemError(422, ProblemCode.INVALID_REQUEST, "The database cannot hold a value of this request.")
        log.exception("commit.failed")
        return unavailable("The database")
