"""Which jobs a submission depends on: names become ids, and circular dependencies are refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.admission.submissions import Draft, DraftJob
from services.contracts.arrays import After
from services.contracts.codes import ProblemCode
from services.contracts.problems import FieldError
from services.core.domain.dependencies import Condition
from services.kit.problems import ProblemError

Found = Mapping[str, Sequence[str]]  #: The ids of the stored jobs and arrays that each word may mean


@dataclass
class _Wrong:
    """What is wrong with the dependencies of a submission, by field."""

    errors: list[FieldError] = field(default_factory=list[FieldError])

    def add(self, pointer: str, detail: str) -> None:
        self.errors.append(FieldError(pointer=pointer, detail=detail))

    def problem(self) -> ProblemError:
        """Return the problem to answer with; at least one must have been noted."""
        first = self.errors[0]
        return ProblemError(
            422, ProblemCode.INVALID_REQUEST, f"{first.pointer}: {first.detail}", errors=self.errors[:50]
        )


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
    wrong = _Wrong()
    needs = [_needs(draft, at, found, wrong) for at in range(len(draft.jobs))]
    if not wrong.errors and (circle := _circle(draft.jobs, needs)):
        names = " -> ".join(draft.jobs[at].spec.name for at in circle)
        wrong.add(_pointer(draft, circle[0]), f"these jobs wait for each other: {names}")
    if wrong.errors:
        draft.problem = wrong.problem()
        return
    draft.jobs = tuple(_with_ids(job, ids) if ids else job for job, ids in zip(draft.jobs, needs, strict=True))


def _pointer(draft: Draft, at: int) -> str:
    return f"/jobs/{at}/after" if draft.entry.batch else "/after"


def _needs(draft: Draft, at: int, found: Found, wrong: _Wrong) -> list[tuple[Condition, str]]:
    after = draft.jobs[at].spec.after
    needs: list[tuple[Condition, str]] = []
    for condition, word in after.references() if after else ():
        pointer = f"{_pointer(draft, at)}/{condition}"
        ids = _meant(draft, word, found)
        if len(ids) == 1:
            needs.append((condition, ids[0]))
        elif ids:
            wrong.add(pointer, f"{word!r} is ambiguous; give one of these ids: {', '.join(ids[:3])}")
        elif word == draft.jobs[at].spec.name:
            wrong.add(pointer, f"{word!r} is the job itself, and no earlier job has that name")
        elif isinstance(word, int):
            wrong.add(
                pointer, f"there is no job at position {word}" + ("" if draft.entry.batch else " without a batch")
            )
        else:
            wrong.add(pointer, f"there is no job {word!r}: no name or number is equal and no id begins so")
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
