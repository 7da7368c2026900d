"""The use case of submitting jobs: read, check, commit, answer."""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import asyncpg
from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.capacity import CapacityCache
from services.admission.figures import COMMITS, SUBMISSIONS
from services.admission.repository.cells import CellRepository
from services.admission.repository.submissions import SubmissionRepository
from services.admission.repository.uploads import SecretRepository, SecretWanted, UploadRepository
from services.admission.submissions import (
    Draft,
    Found,
    check_capacity,
    read_submission,
    refused,
    resolve,
    words_to_find,
)
from services.contracts.cells import ANY
from services.contracts.codes import ProblemCode
from services.contracts.jobs import SubmissionAnswer, SubmissionEntry
from services.contracts.problems import FieldError
from services.db.engine import is_connection_error
from services.kit import traces
from services.kit.disk import DiskWatch
from services.kit.logging import Log
from services.kit.problems import ProblemError, as_problem, unavailable
from services.kit.references import missing_references, named_upload, secret_places
from services.kit.starts import check_start

RETRY_EVERY_S = 0.1


@dataclass(slots=True, eq=False)
class _Parcel:
    drafts: Sequence[Draft]
    answers: asyncio.Future[list[SubmissionAnswer]]
    jobs: int


class Committer:
    """Gathers drafts into commits, the hot path of the whole system; its ``run`` must be running.

    There is one fsync per commit, not per job, and one statement per commit, not per row. A submission is answered
    after its COMMIT; while one commit is being carried out, submissions gather for the next.
    """

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


log = Log(__name__)

FindJobs = Callable[[str, str | None, AbstractSet[str]], Awaitable[Found]]
"""Return the ids of the jobs and arrays of a tenant, in one project or in any, that each word may mean."""


class References:
    """Checks the secrets, uploads and cells that jobs name. Submissions without any do not touch the database."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def check(self, draft: Draft) -> ProblemError | None:
        """Return a problem if a job names a secret or upload that its tenant lacks, or a cell that there is not.

        Or if it has more in variables with its secrets than Linux takes.

        Uploads that it names are kept from now on.
        """
        secrets = [
            SecretWanted(at, job.spec.project, name)
            for at, job in enumerate(draft.jobs)
            if job.spec.secrets or job.spec.source
            for name in secret_places(job.spec)
        ]
        uploads = {upload for job in draft.jobs if (upload := named_upload(job.spec))}
        cells = {cell for job in draft.jobs for cell in job.spec.cells or () if cell != ANY}
        if not secrets and not uploads and not cells:
            return None
        tenant_id = draft.entry.tenant_id
        async with self._engine.begin() as connection:
            sizes = await SecretRepository(connection).sizes(tenant_id, secrets) if secrets else []
            lacking = uploads - await UploadRepository(connection).use(tenant_id, uploads) if uploads else uploads
            if cells:
                cells -= {each.name for each in await CellRepository(connection).cells()}
        names: defaultdict[int, list[str]] = defaultdict(list)
        known: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for at, name, size in sizes:
            if size is None:
                names[at].append(name)
            else:
                known[f"/jobs/{at}" if draft.entry.batch else ""][name] = size
        if not names and not lacking and not cells:
            return _too_large(draft, known)
        errors: list[FieldError] = []
        for at, job in enumerate(draft.jobs):
            prefix = f"/jobs/{at}" if draft.entry.batch else ""
            errors += missing_references(job.spec, names[at], lacking, prefix)
            errors += (
                FieldError(pointer=f"{prefix}/cells/{number}", detail=f"there is no cell {cell}")
                for number, cell in enumerate(job.spec.cells or ())
                if cell in cells
            )
        return ProblemError(422, ProblemCode.INVALID_REQUEST, errors[0].detail, errors=errors[:50])


def _too_large(draft: Draft, secrets: Mapping[str, Mapping[str, int]]) -> ProblemError | None:
    specs = {f"/jobs/{at}" if draft.entry.batch else "": job.spec for at, job in enumerate(draft.jobs)}
    try:
        check_start({pointer: spec for pointer, spec in specs.items() if pointer in secrets}, secrets)
    except ProblemError as problem:
        return problem
    return None


class Submissions:
    """Answers submissions, many at a time; an invalid one does not affect the others."""

    def __init__(
        self,
        committer: Committer,
        capacity: CapacityCache,
        references: References,
        find: FindJobs,
        disk: DiskWatch,
    ) -> None:
        self._committer, self._capacity = committer, capacity
        self._references, self._find, self._disk = references, find, disk

    async def submit(self, entries: Sequence[SubmissionEntry]) -> list[SubmissionAnswer]:
        """Return the answers in the order of the entries, once the accepted jobs are on disk."""
        spans = [traces.begin("job.submit", entry.traceparent) for entry in entries]
        try:
            answers = await self._submit(entries, [span.traceparent for span in spans])
            for entry, span, answer in zip(entries, spans, answers, strict=True):
                with traces.within(span.traceparent):
                    _log_answer(entry, answer)
            return answers
        finally:
            for span in spans:
                span.end()

    async def _submit(
        self, entries: Sequence[SubmissionEntry], traceparents: Sequence[str | None]
    ) -> list[SubmissionAnswer]:
        try:
            self._disk.check("The database's disk")
        except ProblemError as full:
            return [refused(full) for _ in entries]
        read = [self._read(entry) for entry in entries]
        for item, traceparent in zip(read, traceparents, strict=True):
            if isinstance(item, Draft):
                item.traceparent = traceparent
        checked = await self._check(read)
        drafts = [draft for draft in checked if isinstance(draft, Draft)]
        for draft in drafts:
            await self._check_references(draft)
        answers = iter(await self._committer.submit(drafts) if drafts else ())
        return [next(answers) if isinstance(item, Draft) else refused(item) for item in checked]

    async def _check_references(self, draft: Draft) -> None:
        """Find the jobs that a submission depends on; note the problem if something that it names does not exist."""
        try:
            if any(job.spec.after for job in draft.jobs):
                entry = draft.entry
                resolve(draft, await self._find(entry.tenant_id, entry.project, words_to_find(draft)))
            draft.problem = draft.problem or await self._references.check(draft)
        except Exception as error:  # that of one submission is not that of the others
            problem = unavailable("The database") if is_connection_error(error) else as_problem(error)
            if problem.status == 500:
                log.exception("submission.not_checked")
            draft.problem = draft.problem or problem

    @staticmethod
    def _read(entry: SubmissionEntry) -> Draft | ProblemError:
        try:
            return read_submission(entry)
        except Exception as error:  # an error in a validator must affect this entry only
            log.exception("submission.not_read")
            return as_problem(error)

    async def _check(self, read: Sequence[Draft | ProblemError]) -> list[Draft | ProblemError]:
        drafts = [item for item in read if isinstance(item, Draft)]
        if not drafts:
            return list(read)
        try:
            capacity = await self._capacity.get()
            if any(check_capacity(draft, capacity) for draft in drafts):
                capacity = await self._capacity.get(fresh=True)  # a node may have registered since
        except Exception as error:
            if not is_connection_error(error):
                raise
            return list(read)  # the commit waits for the database and answers 503 if it stays unreachable
        return [(check_capacity(item, capacity) or item) if isinstance(item, Draft) else item for item in read]


def _log_answer(entry: SubmissionEntry, answer: SubmissionAnswer) -> None:
    """Log how one of a group of submissions ended, since the line about their common request does not say."""
    who = {"tenant_id": entry.tenant_id, "key_id": entry.key_id}
    if entry.user_id is not None:
        who["user_id"] = entry.user_id
    made = {} if answer.location is None else {"path": answer.location}
    log.info("submission.answered", status=answer.status, **made, **who)
