"""Submissions, parsed and validated, and the answers to them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson
from pydantic import ValidationError

from services.admission.capacity import Capacity, impossibility
from services.contracts.arrays import MAX_ARRAY_TASKS, ArrayTasks
from services.contracts.codes import ProblemCode
from services.contracts.jobs import JobBatch, JobSpec, SubmissionAnswer, SubmissionEntry
from services.contracts.problems import FieldError
from services.core.domain.dependencies import Condition
from services.core.domain.jobs import JobState
from services.kit.ids import new_block_id, new_id, utc_now
from services.kit.problems import ProblemError, key_reused, validation_problem
from services.kit.projects import spec_in_project

REUSED = key_reused()


POOLS_ALONE = "only pools can start service instances"


@dataclass(slots=True, frozen=True)
class DraftJob:
    """A job, or an array of them, to be stored; its id and its columns are fixed before the first attempt.

    ``needs`` are the ids of the jobs and arrays that ``spec.after`` names, each with its condition. ``number`` is set
    anew by each attempt, and is 0 before.
    """

    id: str
    spec: JobSpec
    document: str
    labels: str
    tasks: ArrayTasks | None = None
    needs: tuple[tuple[Condition, str], ...] = ()
    number: int = 0

    @property
    def count(self) -> int:
        """How many jobs it stores."""
        return 1 if self.tasks is None else len(self.tasks.indices)

    @property
    def state(self) -> JobState:
        """The state the job begins in."""
        return JobState.HELD if self.spec.hold else JobState.QUEUED


@dataclass(slots=True, eq=False)
class Draft:
    """A valid submission on its way to a commit.

    ``problem``: why it is refused, unless it repeats an accepted one: jobs that it names may have changed since then.
    ``traceparent``: the request and span that the starts of its jobs belong to; None if unknown.
    """

    entry: SubmissionEntry
    jobs: tuple[DraftJob, ...]
    body_sha256: bytes
    submitted_at: datetime = field(default_factory=utc_now)
    problem: ProblemError | None = None
    traceparent: str | None = None

    @property
    def count(self) -> int:
        """How many jobs it stores."""
        return sum(job.count for job in self.jobs)

    @property
    def key(self) -> tuple[str, str] | None:
        """What identifies the submission when it is repeated; None without an idempotency key."""
        key = self.entry.idempotency_key
        return None if key is None else (self.entry.tenant_id, key)


def read_submission(entry: SubmissionEntry) -> Draft | ProblemError:
    """Return the jobs that ``entry`` asks for, or the problem with it."""
    try:
        if entry.batch:
            specs = JobBatch.model_validate_json(entry.body).jobs
        else:
            specs = [JobSpec.model_validate_json(entry.body)]
    except ValidationError as error:
        return validation_problem([{**e, "loc": ("body", *e["loc"])} for e in error.errors(include_url=False)])
    if not entry.service:
        served = [at for at, spec in enumerate(specs) if spec.service is not None]
        if served:
            return _not_a_pool([f"/jobs/{at}/service" if entry.batch else "/service" for at in served])
    try:
        if entry.project is not None:
            where = "/jobs/{}/project" if entry.batch else "/project"
            specs = [spec_in_project(spec, entry.project, where.format(at)) for at, spec in enumerate(specs)]
    except ProblemError as problem:
        return problem
    jobs = tuple(map(_draft_job, specs))
    if (count := sum(job.count for job in jobs)) > MAX_ARRAY_TASKS:
        said = f"the arrays of one batch may have {MAX_ARRAY_TASKS:,} tasks together, not {count:,}"
        errors = [FieldError(pointer="/jobs", detail=said)]
        return ProblemError(422, ProblemCode.INVALID_REQUEST, f"/jobs: {said}", errors=errors)
    kind = b"batch\0" if entry.batch else b"job\0"
    within = b"" if entry.project is None else entry.project.encode() + b"\0"  # with another key it is other jobs
    return Draft(entry=entry, jobs=jobs, body_sha256=hashlib.sha256(kind + within + entry.body.encode()).digest())


def _draft_job(spec: JobSpec) -> DraftJob:
    tasks = spec.tasks
    return DraftJob(
        id=new_id("job") if tasks is None else new_block_id("array"),
        spec=spec,
        document=spec.stored(),
        labels=orjson.dumps(spec.labels).decode(),
        tasks=tasks,
    )


def _not_a_pool(pointers: list[str]) -> ProblemError:
    errors = [FieldError(pointer=pointer, detail=POOLS_ALONE) for pointer in pointers]
    return ProblemError(422, ProblemCode.INVALID_REQUEST, f"{pointers[0]}: {POOLS_ALONE}", errors=errors[:50])


def check_capacity(draft: Draft, capacity: Capacity) -> ProblemError | None:
    """Return a problem if a submission asks for gangs that the registered nodes can never hold."""
    errors: list[FieldError] = []
    for index, job in enumerate(draft.jobs):
        found = impossibility(job.spec.gpus, capacity)
        if found:
            prefix = f"/jobs/{index}" if draft.entry.batch else ""
            errors.append(FieldError(pointer=prefix + found.pointer, detail=found.detail))
    if not errors:
        return None
    return ProblemError(422, ProblemCode.GANG_IMPOSSIBLE, errors[0].detail, errors=errors[:50])


@dataclass(slots=True, frozen=True)
class MadeJob:
    """A stored job, as it appears in the answer to its submission."""

    id: str
    name: str
    state: JobState
    submitted_at: datetime
    number: int | None
    count: int | None = None


def accepted(jobs: Sequence[MadeJob], *, batch: bool, replayed: bool) -> SubmissionAnswer:
    """Return the answer to a submission that is in the database; repetitions get the same one."""
    made: list[dict[str, Any]] = [
        {"id": j.id, "number": j.number, "name": j.name, "state": j.state, "submitted_at": j.submitted_at} for j in jobs
    ]
    for job, answer in zip(jobs, made, strict=True):
        if job.count is not None:
            answer["count"] = job.count
    body = orjson.dumps({"jobs": made} if batch else made[0], option=orjson.OPT_UTC_Z).decode()
    kind = "jobs" if jobs[0].count is None else "arrays"
    location = None if batch else f"/v1/{kind}/{jobs[0].id}"
    return SubmissionAnswer(status=201, body=body, replayed=replayed, location=location)


def refused(problem: ProblemError) -> SubmissionAnswer:
    """Return the answer to a submission that changed nothing."""
    return SubmissionAnswer(status=problem.status, body=problem.document().model_dump_json(exclude_none=True))
