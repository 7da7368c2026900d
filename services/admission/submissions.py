"""Submissions, parsed and validated, the jobs that they depend on, and the answers to them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

import orjson
from pydantic import ValidationError

from services.admission.capacity import Capacity, impossibility
from services.contracts.arrays import MAX_ARRAY_TASKS, After, ArrayTasks
from services.contracts.codes import ProblemCode
from services.contracts.jobs import (
    JobBatch,
    JobSpec,
    SubmissionAnswer,
    SubmissionEntry,
    SubmittedBatch,
    SubmittedJob,
)
from services.contracts.problems import FieldError
from services.core.domain.dependencies import Condition
from services.core.domain.jobs import JobState
from services.kit.ids import new_block_id, new_id, utc_now
from services.kit.problems import ProblemError, key_reused, validation_problem
from services.kit.projects import spec_in_project
from services.kit.starts import check_start

Found = Mapping[str, Sequence[str]]  #: The ids of the stored jobs and arrays that each word may mean


REUSED = key_reused()


MOST_NEEDS = 10_000
"""Other jobs that those of one submission may name in all: while they are looked up and stored, others wait."""

MOST_TASK_BYTES = 256 * 1024**2
"""All specs that the arrays of one submission store, one for each task: the longest of 10,000 has 26 KiB."""

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
    def cell(self) -> str | None:
        """Empty for a job that a cell may run, until its place is chosen; None for others."""
        return "" if self.spec.cells and self.spec.stays_because is None else None

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
            pointers = [f"/jobs/{at}/service" if entry.batch else "/service" for at in served]
            return _problem([FieldError(pointer=pointer, detail=POOLS_ALONE) for pointer in pointers])
    try:
        check_start({f"/jobs/{at}" if entry.batch else "": spec for at, spec in enumerate(specs)})
        if entry.project is not None:
            where = "/jobs/{}/project" if entry.batch else "/project"
            specs = [spec_in_project(spec, entry.project, where.format(at)) for at, spec in enumerate(specs)]
    except ProblemError as problem:
        return problem
    if (named := sum(len(spec.after.references()) for spec in specs if spec.after)) > MOST_NEEDS:
        said = f"the jobs of one submission may wait for {MOST_NEEDS:,} others in all, not {named:,}"
        return _problem([FieldError(pointer="/jobs" if entry.batch else "/after", detail=said)])
    jobs = tuple(map(_draft_job, specs))
    if (count := sum(job.count for job in jobs)) > MAX_ARRAY_TASKS:
        said = f"the arrays of one batch may have {MAX_ARRAY_TASKS:,} tasks together, not {count:,}"
        return _problem([FieldError(pointer="/jobs", detail=said)])
    if (size := sum(job.count * len(job.document.encode()) for job in jobs if job.tasks)) > MOST_TASK_BYTES:
        said = f"every task stores the spec, {size:,} bytes in all; a submission may store {MOST_TASK_BYTES:,} of them"
        return _problem([FieldError(pointer="/jobs" if entry.batch else "/array", detail=said)])
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


def _problem(errors: Sequence[FieldError]) -> ProblemError:
    first = errors[0]
    return ProblemError(422, ProblemCode.INVALID_REQUEST, f"{first.pointer}: {first.detail}", errors=errors[:50])


def check_capacity(draft: Draft, capacity: Capacity) -> ProblemError | None:
    """Return a problem if a submission asks for gangs that the registered nodes can never hold."""
    errors: list[FieldError] = []
    for index, job in enumerate(draft.jobs):
        if job.cell is not None:
            continue
        found = impossibility(job.spec.gpus, capacity)
        if found:
            prefix = f"/jobs/{index}" if draft.entry.batch else ""
            errors.append(FieldError(pointer=prefix + found.pointer, detail=found.detail))
    if not errors:
        return None
    return ProblemError(422, ProblemCode.GANG_IMPOSSIBLE, errors[0].detail, errors=errors[:50])


def accepted(jobs: Sequence[SubmittedJob], *, batch: bool, replayed: bool) -> SubmissionAnswer:
    """Return the answer to a submission that is in the database; repetitions get the same one."""
    body = SubmittedBatch(jobs=list(jobs)) if batch else jobs[0]
    location = None if batch else f"/v1/{'jobs' if jobs[0].count is None else 'arrays'}/{jobs[0].id}"
    document = body.model_dump_json(exclude_none=True)
    return SubmissionAnswer(status=201, body=document, replayed=replayed, location=location)


def refused(problem: ProblemError) -> SubmissionAnswer:
    """Return the answer to a submission that changed nothing."""
    return SubmissionAnswer(status=problem.status, body=problem.document().model_dump_json(exclude_none=True))


def words_to_find(draft: Draft) -> set[str]:
    """Return the words by which a submission refers to jobs outside it."""
    own = {job.spec.name for job in draft.jobs} if draft.entry.batch else set[str]()
    named = (word for job in draft.jobs if job.spec.after for _, word in job.spec.after.references())
    return {word for word in named if isinstance(word, str) and word not in own}


def resolve(draft: Draft, found: Found) -> None:
    """Set the ids that every job of a submission depends on, or the problem with them.

    A job in the same batch takes precedence over a stored job of the same name.

    Args:
        draft: Changed in place.
        found: The ids that the words of ``words_to_find`` may mean.
    """
    wrong: list[FieldError] = []
    needs = [_needs(draft, at, found, wrong) for at in range(len(draft.jobs))]
    if not wrong and (circle := _circle(draft.jobs, needs)):
        names = " -> ".join(draft.jobs[at].spec.name for at in circle)
        said = f"these jobs wait for each other: {names}"
        wrong.append(FieldError(pointer=_pointer(draft, circle[0]), detail=said))
    if wrong:
        draft.problem = _problem(wrong)
        return
    draft.jobs = tuple(_with_ids(job, ids) if ids else job for job, ids in zip(draft.jobs, needs, strict=True))


def _pointer(draft: Draft, at: int) -> str:
    return f"/jobs/{at}/after" if draft.entry.batch else "/after"


def _needs(draft: Draft, at: int, found: Found, wrong: list[FieldError]) -> list[tuple[Condition, str]]:
    after = draft.jobs[at].spec.after
    needs: list[tuple[Condition, str]] = []
    for condition, word in after.references() if after else ():
        pointer = f"{_pointer(draft, at)}/{condition}"
        ids = _meant(draft, word, found)
        if len(ids) == 1:
            needs.append((condition, ids[0]))
            continue
        if ids:
            said = f"{word!r} is ambiguous; give one of these ids: {', '.join(ids[:3])}"
        elif word == draft.jobs[at].spec.name:
            said = f"{word!r} is the job itself, and no earlier job has that name"
        elif isinstance(word, int):
            said = f"there is no job at position {word}" + ("" if draft.entry.batch else " without a batch")
        else:
            said = f"there is no job {word!r}: none has that name or number, or an id that begins with it"
        wrong.append(FieldError(pointer=pointer, detail=said))
    return list(dict.fromkeys(needs))


def _meant(draft: Draft, word: str | int, found: Found) -> Sequence[str]:
    if not draft.entry.batch:
        return () if isinstance(word, int) else found.get(word, ())
    if isinstance(word, int):
        return [draft.jobs[word].id] if word < len(draft.jobs) else ()
    return [job.id for job in draft.jobs if job.spec.name == word] or found.get(word, ())


def _circle(jobs: Sequence[DraftJob], needs: Sequence[Sequence[tuple[Condition, str]]]) -> list[int]:
    """Return a cycle of jobs in a batch, each waiting for the next, with the first repeated at the end; empty if none.

    Jobs that wait for none of the batch are taken away until only cycles, and jobs that wait for them, are left.
    """
    position = {job.id: at for at, job in enumerate(jobs)}
    waits = {at: {position[on] for _, on in ids if on in position} for at, ids in enumerate(needs)}
    waited_for: dict[int, list[int]] = {at: [] for at in waits}
    for at, others in waits.items():
        for other in others:
            waited_for[other].append(at)
    free = [at for at, others in waits.items() if not others]
    while free:
        done = free.pop()
        del waits[done]
        for at in waited_for[done]:
            waits[at].discard(done)
            if not waits[at]:
                free.append(at)
    if not waits:
        return []
    path = [min(waits)]
    while (following := min(waits[path[-1]])) not in path:
        path.append(following)
    return [*path[path.index(following) :], following]


def _with_ids(job: DraftJob, needs: Sequence[tuple[Condition, str]]) -> DraftJob:
    """Return the job with its dependencies replaced by ids, also in the document that is stored."""
    by_condition = {why.value: [on for each, on in needs if each is why] or None for why in Condition}
    spec = job.spec.model_copy(update={"after": After.model_validate(by_condition)})
    return replace(job, spec=spec, document=spec.stored(), needs=tuple(needs))
