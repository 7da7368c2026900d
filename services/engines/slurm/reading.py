"""Slurm's JSON, from ``squeue --json`` and slurmrestd alike, as jobs and nodes.

The fields are those of the data parsers v0.0.36 to v0.0.38, with which this was tested on a real Slurm, and of the
later ones (v0.0.39 to v0.0.44), which write numbers as ``{"set", "infinite", "number"}`` and states as lists.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from services.contracts.engines import closest_name
from services.kit.bridges.silent import EngineSilentError

TURN = frozenset({"", "None", "Resources", "Priority", "BeginTime", "SchedDefer", "Cleaning"})
"""Reasons of a job that starts as soon as there are GPUs and it is its turn; for any other it takes none in plans.
Begin times are read of the job itself."""
_LIMITS = r"Max\w+RunMinsPer(?:User|Account)|Max\w+PerAccount"
MEANINGS = {
    rf"QOS\w+|InvalidQOS|{_LIMITS}": "its QOS",
    r"Assoc\w+|AccountingPolicy|AccountNotAllowed|InvalidAccount": "its account or user",
    r"Partition\w+|MaxMemPerLimit": "its partition",
    r"Licenses|BurstBuffer\w+|MpiPortsBusy|NvidiaImexChannels|MaxPoweredUpNodes|Power\w+": "what is used up",
    r"ReqNodeNotAvail|NodeDown|FrontEndDown|(?:Bad)?Constraints|Reservation\w*|Block\w+": "nodes that it cannot have",
    r"Dependency\w*|JobArrayTaskLimit|FedJobLock": "other jobs",
    r"JobHeld\w+|JobHoldMaxRequeue": "its release",
    r"JobLaunchFailure|NonZeroExitCode|OutOfMemory|RaisedSignal|SystemFailure": "its last run's end",
    r"TimeLimit|InactiveLimit|DeadLine|Prolog": "its last run's end",
}
"""What jobs wait for, by the reasons of 22.05 to 25.11 that say so."""


def waits_for(reason: str) -> str:
    """Return what else than GPUs and its turn a job waits for, in Slurm's word and ours; empty if nothing."""
    if reason in TURN:
        return ""
    return next((f"{reason}: {what}" for said, what in MEANINGS.items() if re.fullmatch(said, reason)), reason)


T = TypeVar("T")

TAG = re.compile(r"wattshift:(?P<id>[^\s;]+)")  #: In the admin comment: our name for the job
HOLD = re.compile(r"wattshift-hold:(?P<until>\d+)(?:/(?P<own>\d+))?")
"""In the admin comment: the begin time that we set, UTC seconds, and the one still ahead that it replaced, if any. Also
written by ``deploy/slurm/job_submit.lua``. Any other begin time is the user's or Slurm's."""
NICE = re.compile(r"wattshift-nice:(?P<ours>-?\d+)/(?P<own>-?\d+)")
"""In the admin comment: the nice value that we set, and the one that it replaced."""
NOTE = "[wattshift]"  #: In the comment: what stands before it is the user's
_OPTION = re.compile(r"wattshift:(?P<options>\S+)")
_GPUS = re.compile(r"(?:gres[:/])?gpu(?::(?P<type>[^:,=()]*[^:,=()\d][^:,=()]*))?(?:[:=](?P<count>\d+))?(?=[,(]|$)")
_INDEX = re.compile(r"gpu(?::(?P<type>[^:,()]+))?:(?P<count>\d+)(?:\((?:IDX|S):(?P<numbers>[\d,-]+)[^)]*\))?")
_TYPED = re.compile(r"gres/gpu(?::(?P<type>[^=,]+))?=(?P<count>\d+)")

ENDED = {
    "COMPLETED": "succeeded",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "PREEMPTED": "cancelled",
    "REVOKED": "cancelled",
}
"""States in which a job does not run again by itself."""
HOLDING = ("RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "RESIZING")
MIG = re.compile(r"\d+g\.\d+gb")
"""In a GRES type: it is of slices, such as ``gpu:1g.10gb`` or ``gpu:a100_1g.5gb``. They are no GPUs, and neither are
shards and ``mps``: what asks for them is Slurm's own, and their GPUs are not in plans."""
DEPENDS, ARRAY_FULL = "it depends on other jobs", "its array runs as many tasks as it may"
TASKS = 500  #: How many waiting tasks of one array are told apart; the decision on the last of them holds for the rest
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job as Slurm has it; times are UTC seconds, 0 for none.

    Attributes:
        admin_comment, comment: The comments, unchanged.
        hold_s, own_begin_s: The begin time that we set last, and the job's own one, which holds even without ours.
        gpus, gpu_type, per_node, nodes_wanted: What it asks for; ``per_node`` is 0 if it names a total.
        tasks: Of a task that has no record of its own yet: all tasks of its array that wait in the record, in order.
    """

    number: str  #: Its id, which Slurm may reuse; of an array's task ``ARRAY_TASK``
    record: str  #: The id of the record in which Slurm has it
    tasks: tuple[int, ...]
    tag: str  #: Our name for it, in its admin comment; empty before it has one
    admin_comment: str
    hold_s: int
    own_begin_s: int
    nice: int
    our_nice: int | None  #: The one that we set last; None: none
    own_nice: int  #: The one that it has without us
    comment: str
    name: str
    user: str
    account: str
    partition: str
    qos: str
    state: str  #: One of ``contracts.engines.EngineJobState``
    reason: str  #: Why it waits
    priority: int
    gpus: int
    gpu_type: str
    per_node: int
    nodes_wanted: int
    shares: Mapping[str, tuple[int, ...]]  #: The GPUs that it holds, by node
    time_limit_s: float | None
    deadline_s: int
    submit_s: int
    start_s: int
    eligible_s: int  #: The earliest moment at which it may start
    end_s: int
    exit_code: int | None
    restarts: int
    requeue: bool
    batch: bool
    special: str  #: Why we could not steer it: it is part of a heterogeneous job, and so on
    waits_for: str  #: What of its own must be over first: ``DEPENDS``, ``ARRAY_FULL`` or nothing

    @property
    def waits(self) -> bool:
        return self.state == "pending"

    @property
    def is_held(self) -> bool:
        """Whether its begin time is one that we have set, and that nobody has changed since."""
        return self.waits and self.hold_s > 0 and self.eligible_s == self.hold_s

    @property
    def is_taken_back(self) -> bool:
        """Whether somebody has changed what we had set: begun it before the end of our hold, or given it a priority."""
        begun = not self.waits_for and 0 < self.eligible_s < self.hold_s
        return begun or self.our_nice not in (None, self.nice)

    @property
    def others_begin_s(self) -> int:
        """The moment before which it must not start whatever we do, because its user or Slurm has set it."""
        return self.own_begin_s if self.is_held else self.eligible_s

    @property
    def own_comment(self) -> str:
        """The user's own part of the comment."""
        return self.comment.partition(NOTE)[0]

    @property
    def options(self) -> Mapping[str, str]:
        """The options for us in its user's comment: ``wattshift:off`` or ``wattshift:gpus=2-8,grace=60``."""
        found = _OPTION.search(self.own_comment)
        pairs = found["options"].split(",") if found else []
        return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}

    @property
    def by_node(self) -> bool:
        """Whether its user lets it run on fewer nodes, and lose some while it runs."""
        return "shrink" in self.options and self.per_node > 0


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """A node with GPUs; ``closed`` says why it takes no work."""

    name: str
    types: tuple[tuple[str, int], ...]  #: The types of its GPUs, and how many of each there are, by their indices
    partitions: tuple[str, ...]
    closed: str | None

    @property
    def gpus(self) -> int:
        return sum(count for _, count in self.types)

    @property
    def parts(self) -> list[tuple[str, str, int, int]]:
        """Its GPUs by type, each as a node to plans: name, type, the first index, and how many.

        The first part has the node's own name.
        """
        found: list[tuple[str, str, int, int]] = []
        for at, (kind, count) in enumerate(self.types):
            first = sum(each for _, each in self.types[:at])
            found.append((closest_name(f"{self.name}.{kind}" if at else self.name), kind, first, count))
        return found


class Rows(list[T]):
    """The readable rows of an answer. ``unread`` says why others could not be read, by their number or name."""

    def __init__(self, read: Iterable[T], unread: Mapping[str, str]) -> None:
        super().__init__(read)
        self.unread = unread


def read_jobs(document: Any) -> Rows[SlurmJob]:
    """Return the jobs of an answer that ask for GPUs.

    Raises:
        EngineSilentError: It is not such an answer, says that it is incomplete, or is entirely unreadable.
    """
    records, unread = _read(document, "jobs", "job_id", _job)
    room = {job.number.partition("_")[0]: limit for job, limit in records if limit}
    for job, _ in records:
        array = job.number.partition("_")[0]
        if array in room and job.state == "running":
            room[array] -= 1
    jobs: list[SlurmJob] = []
    for job, _ in records:
        array = job.number.partition("_")[0]
        for each in _told_apart(job) if job.gpus else ():
            if each.waits and array in room:
                room[array] -= 1
                each = replace(each, waits_for=each.waits_for or (ARRAY_FULL if room[array] < 0 else ""))
            jobs.append(each)
    return Rows(jobs, unread)


def _told_apart(job: SlurmJob) -> list[SlurmJob]:
    """Return a job, or the tasks of an array that wait in one record."""
    return [replace(job, number=f"{job.record}_{task}") for task in job.tasks[:TASKS]] if job.tasks else [job]


def read_nodes(document: Any) -> Rows[SlurmNode]:
    """Return the nodes of an answer that have GPUs."""
    nodes, unread = _read(document, "nodes", "name", _node)
    return Rows((node for node in nodes if node.gpus), unread)


def _read(document: Any, name: str, key: str, read: Callable[[Any], T]) -> tuple[list[T], dict[str, str]]:
    if not isinstance(document, dict) or not isinstance(document.get(name), list):
        raise EngineSilentError(f"Slurm's answer has no {name}")
    if errors := document.get("errors"):
        raise EngineSilentError(f"Slurm says: {str(errors)[:300]}")
    found: list[T] = []
    unread: dict[str, str] = {}
    for row in document[name]:
        try:
            found.append(read(row))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            unread[str(row.get(key) if isinstance(row, dict) else None)] = f"{error!r}"[:200]
    if unread and not found:
        raise EngineSilentError(f"the {name} in Slurm's answer cannot be read: {next(iter(unread.values()))}")
    return found, unread


def number_of(value: Any) -> float | None:
    """Return a number in any version's notation; None if it is not set, infinity for infinite ones."""
    if isinstance(value, dict):
        if value.get("infinite"):
            return math.inf
        return float(value["number"]) if value.get("set") else None
    return None if value is None or value == "" else float(value)


def _int(value: Any) -> int:
    found = number_of(value)
    return 0 if found is None or math.isinf(found) else int(found)


def _states(value: Any) -> list[str]:
    return [str(each).upper() for each in (value if isinstance(value, list) else str(value).split(","))]


def _job(row: Mapping[str, Any]) -> tuple[SlurmJob, int]:
    """Return a job, and how many tasks of its array may run at once; 0: of none, or any number."""
    states = _states(row["job_state"])
    admin, comment = str(row.get("admin_comment") or ""), row.get("comment") or ""
    if isinstance(comment, dict):  # later parsers have all comments in one place
        admin, comment = str(comment.get("administrator") or ""), comment.get("job") or ""
    tag, hold, ours = TAG.search(admin), HOLD.search(admin), NICE.search(admin)
    nice = _int(row.get("nice"))
    nice -= 2**32 if nice >= 2**31 else 0  # as which 22.05 and 23.02 write negative ones
    gpus, gpu_type, per_node, special = _asked(row)
    hosts = hosts_of(str(row.get("nodes") or ""))
    held = _held(row.get("gres_detail") or [], hosts)
    holding = sum(map(len, held.values()))
    state = _state(states)
    limit_min = number_of(row.get("time_limit"))
    array, task = _int(row.get("array_job_id")), number_of(row.get("array_task_id"))
    listed = str(row.get("array_task_string") or "").partition("%")[0] if array and task is None else ""
    if "..." in listed:
        special = "Slurm does not name all tasks of its array"
    record = str(int(row["job_id"]))
    job = SlurmJob(
        number=f"{array}_{int(task)}" if array and task is not None else record,
        record=record,
        tasks=() if "..." in listed else tuple(range_of(listed)) if listed else (),
        tag=tag["id"] if tag else "",
        admin_comment=admin,
        hold_s=int(hold["until"]) if hold else 0,
        own_begin_s=int(hold["own"] or 0) if hold else 0,
        nice=nice,
        our_nice=int(ours["ours"]) if ours else None,
        own_nice=int(ours["own"]) if ours else nice,
        comment=str(comment),
        name=str(row.get("name") or ""),
        user=str(row.get("user_name") or row.get("user_id") or ""),
        account=str(row.get("account") or ""),
        partition=str(row.get("partition") or ""),
        qos=str(row.get("qos") or ""),
        state=state,
        reason=str(row.get("state_reason") or ""),
        priority=_int(row.get("priority")),
        gpus=holding or gpus,
        gpu_type=gpu_type,
        per_node=per_node,
        nodes_wanted=max(_int(row.get("node_count")), 1),
        shares=held if state == "running" else {},
        time_limit_s=limit_min * 60 if limit_min and math.isfinite(limit_min) else None,
        deadline_s=_int(row.get("deadline")),
        submit_s=_int(row["submit_time"]),
        start_s=_int(row.get("start_time")),
        eligible_s=_int(row.get("eligible_time")),
        end_s=_int(row.get("end_time")),
        exit_code=_exit_code(row.get("exit_code")) if state in ENDED.values() else None,
        restarts=_int(row.get("restart_cnt")),
        requeue=bool(row.get("requeue")),
        batch=bool(row.get("batch_flag", True)),
        special=special or _special(row),
        waits_for=DEPENDS if state == "pending" and row.get("dependency") else "",
    )
    return job, _int(row.get("array_max_tasks")) if array else 0


def _state(states: list[str]) -> str:
    # Flags come with a state: what completes still holds its GPUs, and what is requeued waits.
    if any(each in WAITING for each in states) and "COMPLETING" not in states:
        return "pending"
    if any(each in HOLDING for each in states):
        return "running"
    known = [ENDED[each] for each in states if each in ENDED]
    if not known:
        raise ValueError(f"state {states}")
    return known[0]


def _special(row: Mapping[str, Any]) -> str:
    if _int(row.get("het_job_id")):
        return "it is part of a heterogeneous job"
    if row.get("resv_name"):
        return "it runs in a reservation"
    return ""


def _exit_code(value: Any) -> int | None:
    if isinstance(value, dict) and "return_code" in value:
        return _int(value["return_code"])
    found = number_of(value)
    return None if found is None else int(found) >> 8 if found > 255 else int(found)


def _asked(row: Mapping[str, Any]) -> tuple[int, str, int, str]:
    """Return how many GPUs a job asks for, of which type, how many per node if it says so, and why it is special."""
    nodes, tasks = max(_int(row.get("node_count")), 1), max(_int(row.get("tasks")), 1)
    for name, times in (("tres_per_job", 1), ("tres_per_node", nodes), ("tres_per_task", tasks)):
        found = list(_GPUS.finditer(str(row.get(name) or "")))
        if counts := _counted((each["type"], int(each["count"] or 1)) for each in found):
            count = sum(counts.values())
            return count * times, next(iter(counts)), count if name == "tres_per_node" else 0, _mixed(counts)
        if found:
            return 0, "", 0, ""  # slices
    for name in ("tres_alloc_str", "tres_req_str"):
        totals = {each["type"] or "": int(each["count"]) for each in _TYPED.finditer(str(row.get(name) or ""))}
        total = totals.pop("", 0)
        counts = _counted(totals.items())
        if totals and (len(counts) < len(totals) or not total):  # not all are GPUs
            total = sum(counts.values())
        if total:
            return total, next(iter(counts), ""), 0, _mixed(counts)
    return 0, "", 0, ""


def _mixed(counts: Mapping[str, int]) -> str:
    return "it asks for several types of GPU" if len(counts) > 1 else ""


def _counted(found: Iterable[tuple[str | None, int]]) -> dict[str, int]:
    """Return whole GPUs by type."""
    counts: dict[str, int] = {}
    for kind, count in found:
        if not MIG.search(kind or ""):
            counts[kind or ""] = counts.get(kind or "", 0) + count
    return counts


def _held(detail: list[Any], hosts: list[str]) -> dict[str, tuple[int, ...]]:
    """Return the indices of GPUs on each node, from ``gres_detail``, which has one entry for each node."""
    held: dict[str, tuple[int, ...]] = {}
    for host, text in zip(hosts, detail, strict=False):
        numbers: list[int] = []
        for found in _INDEX.finditer(str(text)):
            if MIG.search(found["type"] or ""):
                continue
            numbers += range_of(found["numbers"]) if found["numbers"] else range(int(found["count"]))
        if numbers:
            held[host] = tuple(sorted(set(numbers)))
    return held


def range_of(text: str) -> list[int]:
    """Return the numbers of ``0-2,5,8-12:2``."""
    numbers: list[int] = []
    for part in text.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        numbers += range(int(first), int(last or first) + 1, int(step or 1))
    return numbers


def hosts_of(text: str) -> list[str]:
    """Return the names of ``gpu[01-03,7],login``, in their order."""
    names: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text):
        found = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if not found:
            names.append(part)
            continue
        before, inside, after = found.groups()
        for piece in inside.split(","):
            first, _, last = piece.partition("-")
            for number in range(int(first), int(last or first) + 1):
                names += [before + str(number).zfill(len(first)) + rest for rest in hosts_of(after) or [""]]
    return names


_OPEN = {"IDLE", "MIXED", "ALLOCATED", "COMPLETING", "PLANNED", "POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "CLOUD"}
_FLAGS = {"POWER_DOWN", "POWER_UP", "DYNAMIC_NORM", "DYNAMIC_FUTURE", "BLOCKED", "PERFCTRS", "UNKNOWN"}


def _node(row: Mapping[str, Any]) -> SlurmNode:
    states = [*_states(row["state"]), *_states(row.get("state_flags") or [])]
    found = _INDEX.finditer(str(row.get("gres") or ""))
    bad = [state for state in states if state not in _OPEN | _FLAGS]
    if not bad and "UNKNOWN" in states:
        bad = ["UNKNOWN"]
    reason = str(row.get("reason") or "")
    partitions = row.get("partitions") or []
    return SlurmNode(
        name=str(row["name"]),
        types=tuple(_counted((each["type"], int(each["count"])) for each in found).items()),
        partitions=tuple(partitions if isinstance(partitions, list) else str(partitions).split(",")),
        closed=f"{'+'.join(bad).lower()}{': ' + reason if reason else ''}"[:500] if bad else None,
    )
