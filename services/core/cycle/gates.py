"""Which queued jobs must not start yet: those that depend on others, tasks beyond their array's limit, those that pause
because they ended soon after each of their last starts, and those that their engine will not start.

They are left out of snapshots, so that no policy can start them and none needs to know about arrays and dependencies.
Both the live scheduler and the simulator use this module to decide.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.core.domain.counted import counted
from services.core.domain.dependencies import Condition, Ends, Verdict, verdict
from services.core.domain.reasons import Reason

WAITS_FOR = {
    Condition.OK: "It waits for {name} to succeed.",
    Condition.ANY: "It waits for {name} to end.",
    Condition.NOT_OK: "It waits for {name} to end, and starts only if that fails or is cancelled.",
}
NEVER_MET = {
    Condition.OK: "It was to start only if {name} succeeds, and that did not succeed.",
    Condition.ANY: "It was to start once {name} has ended.",
    Condition.NOT_OK: "It was to start only if {name} fails or is cancelled, and that succeeded.",
}

PAUSED = {
    Reason.BACKING_OFF: "It ended soon after it was started, again and again: its next start is not before {until}.",
    Reason.SET_ASIDE: "The scheduler cannot plan with it, and tries again at {until}. Operators see why in its log.",
}


@dataclass(frozen=True, slots=True)
class Need:
    """A dependency of a job or, if ``dependent`` is an array's id, of each of its tasks."""

    dependent: str  #: The job or array that depends
    needed: str  #: The job or array it depends on
    condition: Condition  #: How ``needed`` must have ended
    name: str  #: The name of ``needed`` that users see
    ends: Ends  #: How far ``needed`` has got

    @property
    def verdict(self) -> Verdict:
        return verdict(self.condition, self.ends)

    def words(self) -> str:
        """Return what the dependent waits for, or why it can never start, in words."""
        sentences = NEVER_MET if self.verdict is Verdict.IMPOSSIBLE else WAITS_FOR
        return sentences[self.condition].format(name=f"{self.name} ({self.needed})")


@dataclass(frozen=True, slots=True)
class GatedJob:
    """A queued job that may have to wait, or one that holds GPUs and counts towards its array's limit."""

    id: str  #: Unique
    array: str | None  #: Its array's id; None for a single job
    index: int  #: Its index in the array
    holds_gpus: bool  #: Whether it has a gang, even one that is stopping
    has_run: bool  #: Whether it ever had one: a task that was preempted keeps its turn
    blocked: str = ""  #: Why its engine will not start it, whatever GPUs are free; empty if only GPUs are missing
    paused: str = ""  #: Until when it pauses before starting again, in words; empty if it does not
    set_aside: bool = False  #: Whether it pauses as no round can be held with it


@dataclass(frozen=True, slots=True)
class Withheld:
    """A job that must not start yet, and why, as a code and a sentence."""

    id: str
    reason: Reason
    detail: str


def withheld(jobs: Sequence[GatedJob], limits: Mapping[str, int], needs: Iterable[Need]) -> list[Withheld]:
    """Return the jobs that must not start now, in their order.

    In an array with a limit, queued tasks may start up to the limit less the tasks that hold GPUs: first those that ran
    before, then those with the lowest indices.

    Args:
        jobs: All that hold GPUs or are queued; others do not matter.
        limits: The most tasks of an array that may hold GPUs at once, for arrays that have such a limit.
    """
    open_needs: dict[str, list[Need]] = defaultdict(list)
    for need in needs:
        if need.verdict is not Verdict.MET:
            open_needs[need.dependent].append(need)
    found: dict[str, Withheld] = {}
    tasks: dict[str, list[GatedJob]] = defaultdict(list)
    room = dict(limits)
    for job in jobs:
        if job.holds_gpus:
            if job.array in room:
                room[job.array] -= 1
        elif job.blocked:
            found[job.id] = Withheld(job.id, Reason.ENGINE_LIMIT, blocked_words(job.blocked))
        elif job.paused:
            reason = Reason.SET_ASIDE if job.set_aside else Reason.BACKING_OFF
            found[job.id] = Withheld(job.id, reason, PAUSED[reason].format(until=job.paused))
        elif waits_for := [*open_needs.get(job.id, ()), *open_needs.get(job.array or "", ())]:
            found[job.id] = Withheld(job.id, Reason.DEPENDENCY, _words(waits_for))
        elif job.array in room:
            tasks[job.array].append(job)
    for array, queued in tasks.items():
        queued.sort(key=lambda task: (not task.has_run, task.index, task.id))
        for task in queued[max(room[array], 0) :]:
            found[task.id] = Withheld(task.id, Reason.ARRAY_LIMIT, limit_words(limits[array]))
    return [found[job.id] for job in jobs if job.id in found]


def blocked_words(blocked: str) -> str:
    return f"Its engine does not start it: {blocked}."


def limit_words(limit: int) -> str:
    return f"At most {counted(limit, 'task')} of its array may run at once."


def never_met(needs: Sequence[Need]) -> dict[str, Need]:
    """Return the dependents that can never start, each with the dependency that prevents it.

    They will be cancelled, so anything that depends on them is decided as if they already were.
    """
    dependents: dict[str, list[Need]] = defaultdict(list)
    for need in needs:
        dependents[need.needed].append(need)
    found: dict[str, Need] = {}
    todo = list(needs)
    while todo:
        need = todo.pop()
        if need.dependent not in found and need.verdict is Verdict.IMPOSSIBLE:
            found[need.dependent] = need
            todo += [replace(each, ends=Ends(0, 1)) for each in dependents[need.dependent]]
    return found


def _words(needs: Sequence[Need]) -> str:
    more = len(needs) - 1
    return needs[0].words() + (f" And for {more} more." if more else "")
