"""Instances of model servers from wanted to ended: the real controller, before admission, servers and its rows.

What its repository says in SQL is said of rows in memory: an owner that another transaction holds is left out, a change
counts if the instance is in the state that it was read in, a transaction is kept whole or not at all, and its answer
may be lost. Controllers are killed, end and begin again, and for a while there are two. Plans and specs change,
owners are deleted, GPUs are few, jobs fail, are queued again and disappear, servers are silent or somebody else's.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import orjson

from services.contracts.clusters import ClusterOrders, ClusterPod, ClusterReport, WorkloadReport
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity, Role
from services.contracts.jobs import SubmissionAnswer, SubmissionAnswers, SubmissionRequest, SubmittedJob
from services.contracts.nodes import Listener
from services.contracts.serving import InstancePod, InstanceState, PoolSpec
from services.core.domain.jobs import JobState
from services.core.domain.reasons import Reason
from services.db.sealing import Sealer
from services.kit.ids import utc_now
from services.kit.problems import ProblemError, unavailable
from services.kit.tasks import end_tasks
from services.serving.clusters import Clusters
from services.serving.controller import controller, probes
from services.serving.controller.controller import PATIENCE_S, Controller
from services.serving.controller.diff import FIRST_S, LONGEST_S, STAYING, Life
from services.serving.controller.probes import KEYED_PATH, Prober
from services.serving.controller.server_jobs import ServerJobs
from services.serving.instances import (
    APP_PREFIX,
    LEFT_AS_PLANNED,
    Blueprint,
    Instance,
    InstanceJob,
    InstanceReason,
    pool_blueprint,
)
from services.serving.repository.instances import (
    InstanceOwner,
    InstanceRows,
    NewInstance,
    PlanInForce,
    _pod_job,
)
from tests.simulation.loop import EPOCH_S, Process, Simulation
from tests.support.pools import a_pool

LOOK_S, PROBE_S = 1.0, 2.0
READY_S, UNHEALTHY_S, DRAIN_MIN_S, DRAIN_S = 20.0, 6.0, 3.0, 12.0
"""Time limits of the probes, shorter than anybody would have them."""
ANSWER_S, LARGEST_ANSWER = 1.6, 200
"""How long a server is waited for, which is longer than a pass, and the bytes of metrics that are read."""
LATEST_S = 4.0
"""Within this time after its last chance to answer an instance is stopped."""
CALM_S = 260.0
"""Within this time every owner has what its plan wants, if nothing fails any more."""
CLASSES = ("S", "L")
PODS, CLUSTERS, WORKLOADS = "pods", ("east", "west"), ("Deployment/one", "LeaderWorkerSet/other")
"""A pool whose instances are pods, and where."""
LIVE = frozenset(InstanceState) - {InstanceState.ENDED}


OF_PLANS = (InstanceReason.NOT_NEEDED, InstanceReason.TERMS_CHANGED, InstanceReason.REPARTITIONED)
OF_OWNERS = (InstanceReason.POOL_DELETED, InstanceReason.APP_DELETED, *OF_PLANS)
"""Reasons why an instance leaves that serves, by its owner."""


@dataclass(eq=False)
class _Job:
    """A job at admission, and the server that it runs.

    Attributes:
        answers_at_s: When the server answers first, of the present run.
        silent_s: Between which times it does not answer.
        answered: Runs in which its server answered, by when they began.
        failed_s: When it did not answer, since it last did.
        lists: Who listens on its port.
        makes_of_key: The statuses of the path that needs the key, with it and without.
    """

    id: str
    instance: str
    place: str  #: The zone and kind of what it runs on
    ends_at_s: float
    runs_at_s: float = 0.0
    state: JobState = JobState.QUEUED
    reason: str | None = Reason.NOT_ENOUGH_FREE_GPUS.value
    queued_at: datetime = field(default_factory=utc_now)
    running_at: datetime | None = None
    cancel_requested: bool = False
    url: str | None = None
    answers_at_s: float = 0.0
    silent_s: tuple[float, float] = (0.0, 0.0)
    answered: set[datetime] = field(default_factory=set[datetime])
    failed_s: list[float] = field(default_factory=list[float])
    listener: Listener | None = None
    makes_of_key: tuple[int, int] = (200, 200)
    empties_s: list[float] = field(default_factory=list[float])
    held: int = 0


class _Admission:
    """Admission, the scheduler and its nodes: jobs by the keys of their submissions, which run while GPUs are free."""

    def __init__(self, simulation: Simulation, gpus: int) -> None:
        self._simulation = simulation
        self.gpus = gpus
        self.jobs: dict[str, _Job] = {}
        self.keyed: dict[str, str] = {}
        self.refused: set[str] = set()
        self.has_failed = False
        self.removed: set[str] = set()
        self.pods: set[str] = set()
        self.under_way: set[Any] = set()

    async def call(self, method: str, path: str, answer: Any, *, body: SubmissionRequest) -> SubmissionAnswers:
        """Answer submissions, as ``ServiceClient.call``."""
        keys = {(self._simulation.loop.process_now(), each.idempotency_key) for each in body.entries}
        self._simulation.check("nothing is asked for nobody", bool(keys))
        self._simulation.check("what is under way is not submitted again", not keys & self.under_way, str(keys))
        self.under_way |= keys
        try:
            return await self._reach(lambda: SubmissionAnswers(answers=[self._submit(each) for each in body.entries]))
        finally:
            self.under_way -= keys

    async def request(self, method: str, path: str, *, identity: Any) -> None:
        """Cancel a job, as ``ServiceClient.request``."""
        job = self.jobs.get(path.split("/")[3])

        def cancel() -> None:
            if job is None or job.state.is_final:
                raise ProblemError(409, ProblemCode.CONFLICT, "It has ended.")
            job.cancel_requested = True

        await self._reach(cancel)

    async def _reach(self, work: Callable[[], Any]) -> Any:
        away = unavailable("Admission")

        def reached() -> Any:
            if self._simulation.choices.below(2, often=0.2):  # meanwhile jobs have gone on
                self.go_on()
            return work()

        if self._simulation.choices.below(2, often=0.05):  # so late that a pass goes on without it
            await asyncio.sleep(2.5 * LOOK_S)
        try:
            return await self._simulation.boundary(reached, away, may_repeat=True)
        except ProblemError as error:
            self.has_failed |= error is away
            raise

    def _submit(self, entry: Any) -> SubmissionAnswer:
        draw = self._simulation.choices.below
        document = orjson.loads(entry.body)
        instance = str(document["environment"]["WATTSHIFT_INSTANCE"])
        known = self.keyed.get(entry.idempotency_key)
        if known is None and not self._simulation.is_calm:
            outcome = draw(3, often=0.2)
            if outcome == 1 or instance in self.refused:
                self.refused.add(instance)
                return _refusal(422, ProblemCode.INVALID_REQUEST)
            if outcome == 2:
                return _refusal((429, 503)[draw(2)], ProblemCode.QUOTA_EXCEEDED)
        if known is None:
            now_s = self._simulation.loop.time()
            job_id = f"job_{len(self.keyed)}"  # of which none is given twice
            ends_at_s = now_s + (1e9 if draw(4, often=0.5) != 1 else float(draw(40)))
            # Slices are no GPUs that others hold: who cuts a GPU anew has it emptied first.
            place = f"{document['service']['zone']} {document['gpus'].get('slice') or ''}"
            self.jobs[job_id] = _Job(job_id, instance, place, ends_at_s, now_s + draw(6))
            known = self.keyed[entry.idempotency_key] = job_id
        told = SubmittedJob(id=known, name=entry.idempotency_key, state=JobState.QUEUED, submitted_at=utc_now())
        return SubmissionAnswer(status=201, body=told.model_dump_json())

    def go_on(self) -> None:
        """Have jobs run, as far as GPUs go, end, be queued again, and be forgotten."""
        now_s, draw, is_calm = self._simulation.loop.time(), self._simulation.choices.below, self._simulation.is_calm
        running = Counter(job.place for job in self.jobs.values() if job.state is JobState.RUNNING)
        for job in list(self.jobs.values()):
            if job.state.is_final:
                if not is_calm and draw(2, often=0.1):
                    self._remove(job)
            elif job.cancel_requested or (now_s >= job.ends_at_s and not is_calm):
                running[job.place] -= job.state is JobState.RUNNING
                job.state = JobState.CANCELLED if job.cancel_requested else JobState.FAILED
                job.reason, job.url = "exited", None
                if not is_calm and draw(2, often=0.1):  # and is deleted, before anybody has looked
                    self._remove(job)
            elif job.state is JobState.RUNNING and not is_calm and draw(2, often=0.02):  # its node is lost
                running[job.place] -= 1
                job.state, job.reason, job.url = JobState.QUEUED, Reason.NODE_CLOSED.value, None
                job.queued_at, job.running_at, job.listener = utc_now(), None, None
                job.runs_at_s = now_s + draw(8)
            elif job.state is JobState.QUEUED and now_s >= job.runs_at_s:
                if running[job.place] < self.gpus:
                    running[job.place] += 1
                    self._run(job)
                else:  # whatever it waited for before
                    job.reason = Reason.NOT_ENOUGH_FREE_GPUS.value

    def _run(self, job: _Job) -> None:
        draw, now_s, is_calm = self._simulation.choices.below, self._simulation.loop.time(), self._simulation.is_calm
        job.state, job.reason, job.running_at = JobState.RUNNING, None, utc_now()
        job.url = f"http://{job.id}" if draw(2) else f"http://{job.id}:{now_s}"
        job.answers_at_s = now_s + (0.0, 1.0, 4.0, 1e9)[draw(3 if is_calm else 4)]
        job.failed_s, job.silent_s, job.empties_s = [], (0.0, 0.0), []
        if not is_calm and draw(4) == 1:
            begin_s = now_s + draw(30)
            job.silent_s = begin_s, begin_s + (1.0, 4.0, 1e9)[draw(3)]
        kinds = (None, Listener.OWN, Listener.UNCHECKED, Listener.FOREIGN)
        job.listener = kinds[draw(3 if is_calm else 4, often=0.5)]
        if job.listener is Listener.OWN and draw(2):
            job.listener = Listener.NONE  # until it answers
        job.makes_of_key = ((200, 200), (200, 401), (404, 404), (401, 401), (503, 200))[draw(3 if is_calm else 5)]

    def _remove(self, job: _Job) -> None:
        if self.keyed.get(job.instance) == job.id:
            self.removed.add(job.instance)
            del self.jobs[job.id]


def _refusal(status: int, code: ProblemCode) -> SubmissionAnswer:
    problem = ProblemError(status, code, "It is refused.").document("request")
    return SubmissionAnswer(status=status, body=problem.model_dump_json())


class _Session:
    """Servers, in the place of an ``aiohttp.ClientSession``: they answer when their jobs run, mostly."""

    def __init__(self, simulation: Simulation, admission: _Admission) -> None:
        self._simulation, self._admission = simulation, admission
        self.asked = 0

    @asynccontextmanager
    async def get(self, url: str, *, headers: Any = None, timeout: Any = None, **_: Any) -> AsyncIterator[Any]:
        """Answer health, load, and the path that needs a key."""
        address, path = url.removeprefix("http://").split("/", 1)
        job = self._admission.jobs.get(address.partition(":")[0])
        self.asked += 1
        self._simulation.check("no more servers are asked at once than may be", self.asked <= 2, str(self.asked))
        try:
            async with asyncio.timeout(timeout.total):
                status, body = await self._simulation.boundary(
                    lambda: self._answer(job, address, f"/{path}", headers),
                    ConnectionError("refused"),
                    may_be_silent=True,
                )
        except (ConnectionError, TimeoutError):
            if job is not None and path == "health":
                self._note_failure(job)
            raise
        finally:
            self.asked -= 1

        async def chunks(_: int) -> AsyncIterator[bytes]:
            yield body

        yield SimpleNamespace(status=status, content=SimpleNamespace(iter_chunked=chunks))

    def _answer(self, job: _Job | None, address: str, path: str, headers: Any) -> tuple[int, bytes]:
        now_s, is_calm = self._simulation.loop.time(), self._simulation.is_calm
        if address in self._admission.pods and path == "/metrics":
            return 200, b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
        fails = not is_calm and self._simulation.choices.below(2, often=0.1)
        is_silent = job is not None and not is_calm and job.silent_s[0] <= now_s < job.silent_s[1]
        if job is None or job.url != f"http://{address}" or now_s < job.answers_at_s or fails or is_silent:
            if job is not None and path == "/health":
                self._note_failure(job)
            return 503, b""
        if job.listener is Listener.NONE:
            job.listener = Listener.OWN
        if path == KEYED_PATH:
            has_key = "authorization" in (headers or {})
            own = job.listener is not Listener.FOREIGN or not has_key
            self._simulation.check("a key is shown to nobody else", own, job.instance)
            return job.makes_of_key[0 if has_key else 1], b""
        if path == "/metrics":
            told = b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\n" % job.held
            if not is_calm and self._simulation.choices.below(4, often=0.3) == 1:
                return 200, told + b"# " + b"x" * LARGEST_ANSWER
            if not job.held:
                job.empties_s.append(now_s)
            return 200, told
        assert job.running_at is not None
        job.answered.add(job.running_at)
        return 200, b""

    def _note_failure(self, job: _Job) -> None:
        job.failed_s.append(self._simulation.loop.time())


@dataclass(eq=False)
class _Transaction:
    """What a transaction has locked, and will change."""

    process: Process
    changes: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    added: list[NewInstance] = field(default_factory=list[NewInstance])
    removed: list[str] = field(default_factory=list[str])
    moves: list[tuple[Instance, dict[str, Any]]] = field(default_factory=list[tuple[Instance, dict[str, Any]]])


class _World:
    """The rows: owners, plans and instances; and what is asked of each change to them."""

    def __init__(self, simulation: Simulation, admission: _Admission) -> None:
        self.simulation, self.admission = simulation, admission
        self.owners: dict[str, InstanceOwner] = {}
        self.plans: dict[str, PlanInForce] = {}
        self.former: dict[str, PlanInForce | None] = {}
        self.rows: dict[str, Instance] = {}
        self.made_at: dict[str, float] = {}
        self.locks: dict[str, _Transaction] = {}
        self.held: dict[str, int] = {}
        self.calm_s = math.inf

    @property
    def now_s(self) -> float:
        """Virtual seconds."""
        return self.simulation.loop.time()

    def is_locked(self, key: str, by: _Transaction | None = None) -> bool:
        """Whether another transaction, of a process that lives, holds an owner."""
        holder = self.locks.get(key)
        return holder is not None and holder is not by and holder.process.is_alive

    def live(self, key: str | None = None) -> list[Instance]:
        """Return the instances that have not ended, with their jobs."""
        found = [each for each in self.rows.values() if each.state in LIVE and key in (None, each.pool)]
        return [self._read(each) for each in sorted(found, key=lambda each: each.id)]

    def job_of(self, row: Instance) -> _Job | None:
        """Return the job of an instance, which is found by the key of its submission, too."""
        return self.admission.jobs.get(row.job_id or self.admission.keyed.get(row.id, ""))

    def _read(self, row: Instance) -> Instance:
        if row.is_pod:
            return replace(row, job=_pod_job(row.pod) if row.pod else None)
        found = self.admission.keyed.get(row.id)
        job = self.job_of(row)
        seen = job and InstanceJob(
            job.state,
            reason=job.reason,
            cancel_requested=job.cancel_requested,
            queued_at=job.queued_at,
            url=job.url,
            running_at=job.running_at,
            listener=job.listener,
        )
        return replace(row, job_id=row.job_id or found, job=seen)

    @asynccontextmanager
    async def transaction(self, process: Process) -> AsyncIterator[_Transaction]:
        """Yield a transaction, which is kept at its end or not."""
        mine = _Transaction(process)
        await asyncio.sleep(0)
        try:
            yield mine
            if mine.changes:
                await self.simulation.boundary(lambda: self._commit(mine), ConnectionError("lost"))
        finally:
            for key in [key for key, each in self.locks.items() if each is mine]:
                del self.locks[key]

    def _commit(self, mine: _Transaction) -> None:
        review = _Review(self, mine)
        for change in mine.changes:
            change()
        review.look()

    def move(self, each: Instance, change: dict[str, Any]) -> None:
        """Change a row that is in the state in which it was read."""
        row = self.rows.get(each.id)
        self.simulation.check("what is changed is as it was read", row is not None and row.state is each.state, each.id)
        if row is not None and row.state is each.state:
            pod = {"pod": InstancePod.as_stored(change["pod"])} if "pod" in change else {}
            self.rows[each.id] = replace(row, **(change | pod))

    def make(self, new: NewInstance) -> None:
        """Add a row."""
        self.rows[new.id] = Instance(
            new.id,
            new.owner.key,
            new.owner.tenant_id,
            new.place,
            new.mode,
            InstanceState.WANTED,
            new.terms,
            utc_now(),
            partition=new.partition,
            request_class=new.request_class,
            process=new.terms.process(),
            sealed_key=new.sealed_key,
        )
        self.made_at[new.id] = self.now_s


class _Review:
    """What is asked of a transaction: whether what it did was right by what is true of jobs and servers."""

    def __init__(self, world: _World, mine: _Transaction) -> None:
        self._world, self._mine = world, mine
        self._before = dict(world.rows)
        self._check = world.simulation.check

    def look(self) -> None:
        """Check everything that was changed."""
        for each, change in self._mine.moves:
            if "state" in change:
                self._look_at(each, change)
        for name in {each.pool for each, _ in self._mine.moves}:
            self._look_at_all(name)
        if self._mine.added:
            self._look_at_new(self._mine.added[0].owner)
        for key in self._mine.removed:
            left = [each.id for each in self._world.rows.values() if each.pool == key and each.state in LIVE]
            owner = self._world.owners.get(key)
            self._check("nobody is removed who is wanted", owner is None, key)
            self._check("an owner is removed when nothing of it is left", not left, f"{key}: {left}")

    def _look_at(self, each: Instance, change: dict[str, Any]) -> None:
        world, job, now_s = self._world, self._world.job_of(each), self._world.now_s
        row = world.rows.get(each.id, each)
        reason = row.reason
        what = f"{each.id}: {each.state.value} to {row.state.value}, {reason}"
        if row.state is InstanceState.READY and each.state is InstanceState.STARTING:
            self._check("who is ready has answered", job is None or bool(job.answered), what)
            self._check("who is ready has an address", row.url is not None and row.ready_at is not None, what)
            if job is not None and each.job is not None and row.checks_key is not None:
                with_key, without = job.makes_of_key
                is_known = with_key < 400 or with_key == 404 or each.pool.startswith(APP_PREFIX)
                is_true = is_known and (not row.checks_key or without == 401)
                is_same = job.running_at == each.job.running_at
                self._check("who is ready takes its key", is_true or not is_same, f"{what}: {job.makes_of_key}")
        if row.state is InstanceState.READY:
            self._check("who is ready has no reason not to be", reason is None and row.draining_at is None, what)
        if row.state is InstanceState.ENDED:
            is_over = job is None or job.state.is_final
            self._check("an instance ends after its job", is_over, what)
            self._check("what has ended keeps no secret", row.sealed_key is None or job is None, what)
        if each.state is InstanceState.READY and row.state is InstanceState.STARTING:
            self._check("who starts again does not get requests", row.url is None and row.ready_at is None, what)
        if each.state is InstanceState.DRAINING and row.state is InstanceState.STOPPING:
            self._look_at_drained(each, job, what)
        if each.state is InstanceState.DRAINING and each.pool.startswith(APP_PREFIX):
            is_kept = row.state is not InstanceState.READY and row.draining_at == each.draining_at
            self._check("of a fleet nobody who drains is taken back", is_kept, what)
        if reason == each.reason:
            return
        is_true = {
            InstanceReason.PORT_TAKEN.value: lambda: job is not None,
            InstanceReason.NOT_READY.value: lambda: (
                each.job is not None
                and each.job.running_at is not None
                and now_s - _s(each.job.running_at) >= READY_S - 1e-3
            ),
            InstanceReason.UNHEALTHY.value: lambda: (
                job is None or (len(job.failed_s) > 1 and now_s - job.failed_s[0] >= UNHEALTHY_S)
            ),
            InstanceReason.LOADING.value: lambda: each.job is not None and each.job.running_at is not None,
            InstanceReason.JOB_MISSING.value: lambda: each.id in world.admission.removed,
            InstanceReason.REFUSED.value: lambda: each.id in world.admission.refused,
            InstanceReason.ADMISSION_UNAVAILABLE.value: lambda: world.admission.has_failed,
        }.get(reason or "", lambda: True)()
        self._check("an instance is told a reason that is true", is_true, what)
        keeps = row.state is InstanceState.ENDED and each.state in (InstanceState.DRAINING, InstanceState.STOPPING)
        self._check("what was stopped keeps its reason", not keeps, what)
        owner = world.owners.get(each.pool)
        if owner is not None and reason in OF_OWNERS:
            true = InstanceReason.APP_DELETED if owner.is_app else InstanceReason.POOL_DELETED
            is_right = (reason == true) is owner.is_deleted and reason in (true, *OF_PLANS)
            leaves = each.id in owner.leave and not owner.is_deleted
            is_right &= (reason == InstanceReason.REPARTITIONED) is leaves
            self._check("an instance is told a reason that is true", is_right, f"{what} {owner.leave}")

    def _look_at_drained(self, each: Instance, job: _Job | None, what: str) -> None:
        assert each.draining_at is not None
        drained_s = self._world.now_s - _s(each.draining_at)
        runs = job is not None and job.url == each.url and job.running_at is not None and each.job is not None
        if not runs or each.job is None or each.job.running_at != job.running_at or drained_s >= DRAIN_S - 1e-3:  # type: ignore[union-attr]
            return
        if each.ready_at is None or job.running_at > each.ready_at:  # type: ignore[union-attr, operator]
            return
        is_empty = job is not None and len(job.empties_s) >= 2
        self._check("who drains has nothing to do when it is stopped", is_empty, what)
        self._check("routers may hear of it before it is stopped", drained_s >= DRAIN_MIN_S - 1e-3, what)

    def _look_at_all(self, name: str) -> None:
        """Not all that serve are given up at once, and none is drained before another one is there."""
        rows = self._world.rows
        before = {key for key, each in self._before.items() if each.pool == name and each.state is InstanceState.READY}
        after = {key for key, each in rows.items() if each.pool == name and each.state is InstanceState.READY}
        gone = [key for key in sorted(before - after) if key in rows and rows[key].reason != self._before[key].reason]
        silent = [key for key in gone if rows[key].reason == InstanceReason.UNHEALTHY.value]
        is_some_left = len(before) < 2 or len(silent) < len(before)
        self._check("not all are given up at once", is_some_left, f"{name}: {silent}")
        drained = [key for key in gone if rows[key].state is InstanceState.DRAINING]
        owner = self._world.owners.get(name)
        if owner is None or owner.is_deleted or after or set(drained) <= owner.leave or before == set(silent):
            return
        wants = self._wanted(owner)
        starts = [key for key, each in rows.items() if each.pool == name and each.state in STAYING]
        waits = any(self._waits(rows[key]) for key in starts)
        self._check("one is there before another leaves", not sum(wants.values()) or waits, f"{name}: {drained}")

    def _waits(self, row: Instance) -> bool:
        """Whether it waits for GPUs, or did when the transaction read it."""
        job = self._world._read(row).job
        if job is None or job.state is not JobState.QUEUED or job.queued_at is None:
            return job is not None and job.running_at is not None and self._world.now_s - _s(job.running_at) < LOOK_S
        return utc_now() - job.queued_at >= timedelta(seconds=PATIENCE_S)

    def _wanted(self, owner: InstanceOwner) -> Counter[tuple[str, str]]:
        plan = owner.target if owner.is_app else self._world.plans.get(owner.plan_id or "")
        if plan is None or owner.is_deleted:
            return Counter()
        makeable = {at: classes for at, classes in plan.target.items() if owner.blueprint.terms(at) is not None}
        return Counter({at: sum(n for name, n in classes.items() if name) for at, classes in makeable.items()})

    def _look_at_new(self, owner: InstanceOwner) -> None:
        """No more are made than are wanted, and none just after one of its kind has failed."""
        world = self._world
        present = world.owners.get(owner.key)
        self._check("nothing is made for who is deleted", present is None or not owner.is_deleted, owner.key)
        plan = owner.target if owner.is_app else world.plans.get(owner.plan_id or "")
        target = plan.target if plan is not None else {}
        for at in {(each.place, each.mode) for each in self._mine.added}:
            mine = [each for each in world.rows.values() if each.pool == owner.key and each.at == at]
            current = [
                each
                for each in mine
                if each.state in STAYING
                and (plan is None or plan.revision != owner.revision or owner.blueprint.is_current(at, each.process))
            ]
            wanted = sum(target.get(at, {}).values())
            self._check("no more are made than are wanted", len(current) <= wanted, f"{owner.key}: {len(current)}")
            new = {each.id for each in self._mine.added}
            lives = sorted((world.made_at[each.id], each.id, each) for each in mine if each.id not in new)
            if not lives:
                continue
            *_, last = lives[-1]
            failed_at = _failed_at(last)
            if failed_at is None or last.created_at <= owner.changed_at:
                continue
            served_s = (failed_at - last.ready_at).total_seconds() if last.ready_at else 0.0
            is_soon = (utc_now() - failed_at).total_seconds() < FIRST_S - 1e-3 and served_s < LONGEST_S
            self._check("nothing is made again at once that has failed", not is_soon, f"{owner.key} {at}")


def _s(at: datetime) -> float:
    return at.timestamp() - EPOCH_S


def _failed_at(row: Instance) -> datetime | None:
    planned = [reason.value for reason in LEFT_AS_PLANNED]
    if row.state in (InstanceState.STOPPING, InstanceState.ENDED) and (row.reason or "") not in planned:
        return row.stopping_at or row.ended_at
    return None


class _Rows:
    """The statements of ``InstanceRows``, and those of pools and applications."""

    def __init__(self, world: _World, transaction: _Transaction) -> None:
        self._world, self._mine = world, transaction
        self.instances = self.pools = self.apps = self

    async def now(self) -> datetime:
        """As of the real one."""
        return utc_now()

    async def owners(self) -> list[InstanceOwner]:
        """As of the real one."""
        await asyncio.sleep(0)
        return list(self._world.owners.values())

    async def lock(self, owner: InstanceOwner) -> InstanceOwner | None:
        """As of the real one, which skips what is locked."""
        await asyncio.sleep(0)
        if self._world.is_locked(owner.key, self._mine) or owner.key not in self._world.owners:
            return None
        self._world.locks[owner.key] = self._mine
        return self._world.owners[owner.key]

    async def live(self) -> list[Instance]:
        """As of the real one."""
        await asyncio.sleep(0)
        return self._world.live()

    async def live_of(self, owner: InstanceOwner) -> list[Instance]:
        """As of the real one."""
        await asyncio.sleep(0)
        return self._world.live(owner.key)

    async def plan(self, plan_id: str) -> PlanInForce | None:
        """As of the real one."""
        await asyncio.sleep(0)
        return self._world.plans.get(plan_id)

    async def lives(self, key: str, since: datetime) -> list[Life]:
        """As of the real one."""
        await asyncio.sleep(0)
        rows = dict(self._world.rows)
        for each, change in self._mine.moves:
            rows[each.id] = replace(rows.get(each.id, each), **change)
        mine = [each for each in rows.values() if each.pool == key and each.created_at > since]
        newest = sorted(mine, key=lambda each: (each.created_at, each.id), reverse=True)
        return [Life(each.at, each.created_at, each.ready_at, _failed_at(each)) for each in newest]

    async def change(self, changes: Sequence[tuple[Instance, dict[str, Any]]]) -> None:
        """As of the real one."""
        await asyncio.sleep(0)
        for each, change in changes:
            self._world.simulation.check("nothing is written in vain", bool(change), each.id)
            is_mine = self._world.locks.get(each.pool) is self._mine
            self._world.simulation.check("who is changed is locked", is_mine, each.id)
            self._mine.moves.append((each, change))
            self._mine.changes.append(lambda each=each, change=change: self._world.move(each, change))

    async def add(self, instances: Sequence[NewInstance]) -> None:
        """As of the real one."""
        await asyncio.sleep(0)
        self._world.simulation.check("nothing is written in vain", bool(instances))
        for each in instances:
            self._mine.added.append(each)
            self._mine.changes.append(lambda each=each: self._world.make(each))

    set_pods = InstanceRows.set_pods

    async def lock_in(self, cluster: str, tenant_id: str) -> tuple[list[InstanceOwner], bool]:
        """As of the real one, which waits for what is locked."""
        while self._world.is_locked(PODS, self._mine):  # noqa: ASYNC110, nobody says when it is not
            await asyncio.sleep(0.01)
        owner = self._world.owners.get(PODS)
        if owner is not None:
            self._world.locks[PODS] = self._mine
        return [owner] if owner is not None else [], True

    async def remove(self, name: str) -> None:
        """As of the real ones."""
        await asyncio.sleep(0)
        key = next(key for key, each in self._world.locks.items() if each is self._mine)
        self._mine.removed.append(key)
        self._mine.changes.append(lambda: cast(Any, self._world.owners.pop(key, None)))


class _Repository:
    """In the place of ``ServingRepository``."""

    def __init__(self, world: _World, process: Process) -> None:
        self._world, self._process = world, process
        self.presence = SimpleNamespace(wait=self._until_somebody_is_there)

    async def _until_somebody_is_there(self) -> None:
        while not self._world.owners and not self._world.live():  # noqa: ASYNC110, nobody says that one is there
            await asyncio.sleep(LOOK_S)

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[_Rows]:
        """Yield queries."""
        if not self._world.simulation.is_calm and self._world.simulation.choices.below(2, often=0.02):
            raise ConnectionError("refused")
        async with self._world.transaction(self._process) as mine:
            yield _Rows(self._world, mine)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[_Rows]:
        """Yield statements."""
        async with self._world.transaction(self._process) as mine:
            yield _Rows(self._world, mine)


class _Service:
    """A process of serving, with its controller."""

    def __init__(self, world: _World) -> None:
        self.process: Process = world.simulation.process()
        settings = SimpleNamespace(instance_look_s=LOOK_S, instance_probe_s=PROBE_S)
        self._session = _Session(world.simulation, world.admission)
        jobs: Any = ServerJobs(cast(Any, world.admission))
        jobs.submit = world.simulation.judged(jobs.submit)  # whose failures the controller only logs
        networks = SimpleNamespace(endpoint_networks="10.0.0.0/8")
        self.clusters = Clusters(cast(Any, _Repository(world, self.process)), cast(Any, networks))
        prober = Prober(cast(Any, self._session), timeout_s=ANSWER_S, at_once=2)
        self.controller = Controller(
            cast(Any, _Repository(world, self.process)),
            jobs,
            prober,
            cast(Any, settings),
            lambda instance: world.held.get(instance, 0),
            Sealer("s" * 40),
        )
        judged: Any = self.controller
        judged.look = world.simulation.judged(self.controller.look, ConnectionError)
        self.running = self.process.start(self.controller.run())

    async def end(self, simulation: Simulation) -> None:
        """End it; nothing of it is left."""
        await end_tasks([self.running])
        left = [key for key, each in self.controller._asking.items() if not each.done()]
        is_quiet = not left and not self._session.asked
        simulation.check("a controller that has ended asks nothing", is_quiet, str(left))


@cache
def _specs() -> tuple[PoolSpec, PoolSpec]:
    """Return a pool's spec, and the one that takes its place."""
    probes = {
        "ready_timeout_s": READY_S,
        "unhealthy_timeout_s": UNHEALTHY_S,
        "drain_min_s": DRAIN_MIN_S,
        "drain_timeout_s": DRAIN_S,
    }
    modes = [
        {"name": name, "gpu_model": "A100-SXM4-40GB", "gpus": 1, "command": ["serve"]} for name in ("one", "other")
    ]
    first = a_pool(modes=modes, probes=probes)
    second = a_pool(modes=[modes[0] | {"command": ["serve", "--again"]}], probes=probes)
    return PoolSpec.model_validate(first), PoolSpec.model_validate(second)


class _Cluster:
    """A Kubernetes cluster, which has pods for its workloads, and its process, which says so and scales them."""

    def __init__(self, world: _World, name: str) -> None:
        self._world, self.name = world, name
        draw = world.simulation.choices.below
        self.made = {each: draw(3) for each in WORKLOADS}
        self.replicas = dict(self.made)
        self.pods: dict[str, dict[str, ClusterPod]] = {each: {} for each in WORKLOADS}
        self._leave: dict[str, list[str]] = {each: [] for each in WORKLOADS}
        self._numbers = itertools.count(1)
        self._ready_s: dict[str, float] = {}

    def go_on(self) -> None:
        """Have pods die, begin and be ready, and as many be there as there are to be."""
        draw, now_s, is_calm = self._world.simulation.choices.below, self._world.now_s, self._world.simulation.is_calm
        for workload, pods in self.pods.items():
            if pods and not is_calm and draw(2, often=0.05):
                self._end(workload, list(pods.values())[draw(len(pods))])
            while len(pods) > self.replicas[workload]:
                ends = [each for each in pods.values() if each.name in self._leave[workload]]
                last = max(pods.values(), key=lambda each: each.ordinal)
                each = last if "Leader" in workload else (ends or list(pods.values()))[0]
                serves = [row.id for row in self._world.live() if row.url and row.pod and row.pod.uid == each.uid]
                serves = [name for name in serves if self._world.rows[name].state is InstanceState.READY]
                self._world.simulation.check("a pod that serves is not ended", not serves, f"{each}: {serves}")
                self._end(workload, each)
            while len(pods) < self.replicas[workload]:
                number = next(self._numbers)
                taken = {each.ordinal for each in pods.values()}
                ordinal = next(at for at in itertools.count() if at not in taken) if "Leader" in workload else 0
                uid = f"{self.name}.{number}"
                pods[uid] = ClusterPod(uid=uid, name=f"pod-{number}", ordinal=ordinal, unschedulable="no GPU is free")
                self._ready_s[uid] = now_s + draw(8)
            for uid, each in pods.items():
                if not each.ready and now_s >= self._ready_s[uid]:
                    address = f"10.0.{CLUSTERS.index(self.name)}.{uid.rpartition('.')[2]}"
                    self._world.admission.pods.add(f"{address}:8000")
                    pods[uid] = each.model_copy(update={"unschedulable": "", "ready": True, "address": address})

    def _end(self, workload: str, pod: ClusterPod) -> None:
        self._world.admission.pods.discard(f"{pod.address}:8000")
        del self.pods[workload][pod.uid]

    async def report(self, services: list[_Service]) -> None:
        """Say how workloads are, and do as is said, again and again; either may be lost."""
        simulation = self._world.simulation
        draw, lost = simulation.choices.below, ConnectionError("lost")
        caller = Identity(tenant_id="acme", role=Role.OPERATOR, key_id="key")
        while True:
            await asyncio.sleep(1.0 + draw(2))
            left_alone = "an autoscaler" if not simulation.is_calm and draw(8, often=0.3) == 1 else ""
            told = ClusterReport(
                workloads=[
                    WorkloadReport(
                        kind=cast(Any, each.partition("/")[0]),
                        name=each.partition("/")[2],
                        replicas=self.replicas[each],
                        pods=list(pods.values()),
                        left_alone=left_alone,
                    )
                    for each, pods in self.pods.items()
                ]
            )
            if not services:
                continue
            process, clusters = services[-1].process, services[-1].clusters
            work = process.start(clusters.report(self.name, told, caller))
            while not work.done() and process.is_alive:
                await asyncio.wait([work], timeout=0.1)
            if not process.is_alive or isinstance(work.exception(), ConnectionError):
                continue
            with suppress(ConnectionError):
                orders = await simulation.boundary(work.result, lost)
                self._obey(orders, left_alone)

    def _obey(self, orders: ClusterOrders, left_alone: str) -> None:
        for each in orders.workloads:
            name = str(each)
            is_scaled = not left_alone or each.replicas is None
            self._world.simulation.check("a workload that others scale is left alone", is_scaled, name)
            self.replicas[name] = self.made[name] if each.replicas is None else each.replicas
            self._leave[name] = each.leave

    def check_end(self) -> None:
        """Check that each pod is an instance's, where a pool has the workload, and else that all are as before.

        One that a pool had is as it is until a plan without it has its instances gone.
        """
        owner, check = self._world.owners.get(PODS), self._world.simulation.check
        rows = [each for each in self._world.live() if each.terms.place.cluster == self.name]
        for name, pods in self.pods.items():
            mine = [each.pod and each.pod.uid for each in rows if str(each.terms.mode.workload) == name]
            plan = self._world.plans.get(owner.plan_id or "") if owner is not None else None
            modes = owner.blueprint.modes.values() if owner is not None else ()
            is_ours = any(str(each.workload) == name for each in modes)
            if not is_ours and not mine:
                check("a workload of nobody is as it was", len(pods) == self.made[name], f"{self.name} {name}: {pods}")
            elif is_ours and (mine or (plan is not None and owner is not None and plan.revision == owner.revision)):
                check("every pod has an owner", sorted(map(str, mine)) == sorted(pods), f"{name}: {mine}, {list(pods)}")


def _shared(world: _World) -> str | None:
    """Say which pod two instances have that have not been stopped."""
    states = (InstanceState.STARTING, InstanceState.READY, InstanceState.DRAINING)
    pods = [each.pod.uid for each in world.rows.values() if each.state in states and each.pod and each.pod.uid]
    return next((each for each, count in Counter(pods).items() if count > 1), None)


@cache
def _blueprints(key: str) -> tuple[Any, Any]:
    """Return how instances are made by the two specs, those of an application on slices; the second has one mode."""
    if key == PODS:
        first, second = map(pool_blueprint, _specs_of_pods())
        return first, second
    if not key.startswith(APP_PREFIX):
        first, second = map(pool_blueprint, _specs())
        return first, second
    first, second = (Blueprint(each.probes, each.places, each.modes, "fleet", {"one": "3g"}) for each in _specs())
    return first, second


@cache
def _specs_of_pods() -> tuple[PoolSpec, PoolSpec]:
    """Return the specs of a pool whose instances are pods of two clusters."""
    first, second = (each.model_dump(exclude_unset=True) for each in _specs())
    for spec in (first, second):
        for place, cluster in zip(spec["places"], CLUSTERS, strict=True):
            place |= {"cluster": cluster, "gpus": {"A100-SXM4-40GB": 8}}
        for mode, workload in zip(spec["modes"], WORKLOADS, strict=False):
            mode.pop("command")
            kind, _, name = workload.partition("/")
            mode["workload"] = {"kind": kind, "name": name}
    return PoolSpec.model_validate(first), PoolSpec.model_validate(second)


def _plan(simulation: Simulation, revision: int, most: int) -> PlanInForce:
    draw = simulation.choices.below
    target: dict[tuple[str, str], dict[str | None, int]] = {}
    left = most
    places = (("here", "one"), ("there", "one"), ("here", "other"))
    first = draw(3)
    for at in (*places[first:], *places[:first])[: 1 + draw(3)]:
        for name in (*CLASSES, None)[: 1 + draw(3)]:
            count = min(draw(3), left)
            left -= count
            target.setdefault(at, {})[name] = count
    return PlanInForce(revision, "halves", target)


def _owner(key: str, number: int, plan: PlanInForce, plan_id: str) -> InstanceOwner:
    is_app = key.startswith(APP_PREFIX)
    return InstanceOwner(
        key=key,
        name=key.removeprefix(APP_PREFIX),
        tenant_id="acme",
        blueprint=_blueprints(key)[0],
        revision=1,
        plan_id=None if is_app else plan_id,
        is_deleted=False,
        changed_at=utc_now(),
        is_app=is_app,
        target=plan if is_app else None,
    )


def _is_over(error: Any) -> str | None:
    return "its job had ended" if error.status == 409 else None


async def pods(simulation: Simulation) -> None:
    """The same of a pool whose instances are pods of two Kubernetes clusters."""
    await play(simulation, (PODS,))


async def play(simulation: Simulation, keys: Sequence[str] = ()) -> None:
    """Owners want instances, others, and none, while services die and return; then each has what it wants."""
    draw = simulation.choices.below
    simulation.most_steps = 30_000
    clusters = CLUSTERS if keys else ()
    keys = keys or ("chat", "app:vision")[: 1 + draw(2)]
    admission = _Admission(simulation, gpus=2 * len(keys) + draw(3, often=0.5))
    world = _World(simulation, admission)
    alone = simulation.judged(controller._alone, ConnectionError, ProblemError)
    simulation.instead(probes, LARGEST_ANSWER=LARGEST_ANSWER)
    simulation.instead(controller, _alone=alone, one_by_one=_spared(simulation, controller.one_by_one))
    simulation.says("instance.not_cancelled", lambda _: _is_over(sys.exception()))
    simulation.holds("an instance has one job", lambda: _doubled(admission))
    simulation.holds("who does not answer in time is stopped", lambda: _late(world))
    numbers = iter(range(1_000))
    for number, key in enumerate(keys):
        _set_plan(world, key, _plan(simulation, 1, 2), f"plan_{next(numbers)}", number)
        if draw(4) == 1:  # until it is planned first
            world.owners[key] = replace(world.owners[key], plan_id=None, target=None)
    services = [_Service(world)]
    kubernetes = [_Cluster(world, name) for name in clusters]
    reporting = [simulation.loop.create_task(each.report(services)) for each in kubernetes]
    simulation.holds("a pod is one instance at most", lambda: _shared(world))

    def go_on() -> None:
        admission.go_on()
        for each in kubernetes:
            each.go_on()

    for _ in range(1 + draw(5)):
        if draw(3) == 1:
            services.append(_Service(world))
        if draw(3) == 1:
            leaving = services.pop(0)
            if draw(2):
                leaving.process.kill()
            else:
                await leaving.end(simulation)
        if not services:
            services.append(_Service(world))
        for _ in range(draw(30)):
            await asyncio.sleep(1.0)
            go_on()
            _use(world)
        await _change(world, numbers)
    for each in services[1:]:
        each.process.kill()
    del services[1:]
    simulation.calm_down()
    world.calm_s = world.now_s
    for _ in range(int(CALM_S)):
        await asyncio.sleep(1.0)
        go_on()
        _recover(world)
    _check_end(world)
    for each in kubernetes:
        each.check_end()
    for each in reporting:
        each.cancel()
    live = {each.id for each in world.rows.values() if each.state in LIVE}
    known = services[0].controller
    names = {name for name, _ in known._streaks} | set(known._asked_s)
    plans = {each.plan_id for each in world.owners.values()}
    if world.owners or live:  # else nobody has looked since
        simulation.check("nothing is kept of who has gone", names <= live, str(names - live))
        simulation.check("nothing is kept of who has gone", set(known._plans) <= plans, str(known._plans))
    await services[0].end(simulation)


def _set_plan(world: _World, key: str, plan: PlanInForce, plan_id: str, number: int) -> None:
    owner = world.owners.get(key) or _owner(key, number, plan, plan_id)
    world.former[key] = owner.target if owner.is_app else world.plans.get(owner.plan_id or "")
    world.plans[plan_id] = plan
    kept = {"target": plan} if owner.is_app else {"plan_id": plan_id}
    world.owners[key] = replace(owner, **kept)  # type: ignore[arg-type]


def _use(world: _World) -> None:
    """Have routers send requests to instances that are ready; those of others end after a while."""
    draw = world.simulation.choices.below
    for row in world.rows.values():
        job = world.job_of(row)
        is_used = row.state is InstanceState.READY or (row.state is InstanceState.DRAINING and job and job.held)
        if job is not None and is_used and draw(2, often=0.2):
            job.held = draw(3)
            world.held[row.id] = draw(2) * job.held


async def _change(world: _World, numbers: Iterator[int]) -> None:
    """Change a plan, a spec, or delete an owner, whose rows nobody holds."""
    draw = world.simulation.choices.below
    for key in list(world.owners):
        for _ in range(10_000):
            if not world.is_locked(key):
                break
            await asyncio.sleep(0.01)
        owner = world.owners.get(key)
        if owner is None or owner.is_deleted:
            continue
        match draw(6):
            case 0 | 1:
                plan = _plan(world.simulation, owner.revision, 2)
                _set_plan(world, key, plan, f"plan_{next(numbers)}", 0)
            case 2:
                both = _blueprints(key)
                blueprint = both[1 if owner.blueprint is both[0] else 0]
                revision = owner.revision + 1
                world.owners[key] = replace(owner, blueprint=blueprint, revision=revision, changed_at=utc_now())
                if draw(2):  # a plan follows
                    _set_plan(world, key, _plan(world.simulation, revision, 2), f"plan_{next(numbers)}", 0)
            case 3:
                if draw(2):
                    world.owners[key] = replace(owner, is_deleted=True, changed_at=utc_now())
            case 4:
                mine = [each.id for each in world.rows.values() if each.pool == key and each.state in STAYING]
                world.owners[key] = replace(owner, leave=frozenset(mine[:1])) if owner.is_app else owner
            case _ if (plan := world.former[key]) is not None and plan.revision == owner.revision:
                _set_plan(world, key, plan, f"plan_{next(numbers)}", 0)  # as it was before
            case _:
                pass


def _recover(world: _World) -> None:
    """Have what is silent, or somebody else's, be so no longer; and the requests end."""
    for job in world.admission.jobs.values():
        job.silent_s = (0.0, 0.0)
        job.held = 0
    world.held.clear()


def _check_end(world: _World) -> None:
    check = world.simulation.check
    for key, owner in world.owners.items():
        check("an owner that is deleted is removed", not owner.is_deleted, key)
        plan = owner.target if owner.is_app else world.plans.get(owner.plan_id or "")
        rows = [each for each in world.rows.values() if each.pool == key and each.state in LIVE]
        for at, classes in plan.target.items() if plan is not None else ():
            if owner.blueprint.terms(at) is None:  # nothing of it can be made any more
                continue
            ready = [each for each in rows if each.at == at and each.state is InstanceState.READY]
            has = Counter(each.request_class for each in ready)
            named = {name: count for name, count in classes.items() if name is not None and count}
            most = sum(classes.values())
            is_right = sum(named.values()) <= len(ready) <= most and all(has[k] >= n for k, n in named.items())
            what = f"{key} {at}: {classes}, and {[(e.id, e.state.value, e.request_class, e.reason) for e in rows]}"
            check("who is wanted serves", is_right, what)
        others = [each.id for each in rows if plan is not None and each.at not in plan.target]
        check("who is not wanted has gone", not others, f"{key}: {others}")
    live = {each.id for each in world.rows.values() if each.state in LIVE}
    orphans = [each.id for each in world.rows.values() if each.id in live and each.pool not in world.owners]
    check("nothing is left of who is gone", not orphans, str(orphans))
    refused = {row.id for row in world.rows.values() if row.reason == InstanceReason.REFUSED.value}
    check("only what is refused for good ends so", refused <= world.admission.refused, str(refused))
    foreign = [row.id for row in world.rows.values() if row.id in live and _is_foreign(world.job_of(row))]
    check("where another listens nobody serves", not foreign, str(foreign))
    waits = [each for each in live if each in world.admission.refused]
    check("what is refused for good ends", not waits, str(waits))
    running = [job.id for job in world.admission.jobs.values() if not job.state.is_final and job.instance not in live]
    check("no job is left behind", not running, str(running))


def _is_foreign(job: _Job | None) -> bool:
    return job is not None and job.listener is Listener.FOREIGN


def _late(world: _World) -> str | None:
    """Say whose server runs for longer than it may until it answers, where nothing keeps its controller."""
    if not world.simulation.is_calm:
        return None
    for row in world.rows.values():
        job = world.job_of(row) if row.state is InstanceState.STARTING else None
        if job is None or job.running_at is None or job.running_at in job.answered:
            continue
        runs_s = world.now_s - max(_s(job.running_at), world.calm_s - READY_S)
        if runs_s > READY_S + LATEST_S and world.admission.jobs.get(job.id) is job:
            return f"{row.id}, {row.reason}: for {runs_s:.1f} s"
    return None


def _spared(simulation: Simulation, one_by_one: Any) -> Any:
    """Have nobody who is silent spared unless all are who serve."""

    def judge(moves: Sequence[tuple[Instance, dict[str, Any]]]) -> Any:
        found = one_by_one(moves)
        spared = [each.id for (each, change), (_, left) in zip(moves, found, strict=True) if change and not left]
        serving = [(each, change) for each, change in moves if each.state is InstanceState.READY]
        speak = [each.id for each, change in serving if change.get("silent_since", each.silent_since) is None]
        is_so = not spared or (len(serving) > 1 and not speak)
        simulation.check("nobody who is silent is spared unless all are", is_so, f"{spared}, and {speak} answer")
        return found

    return judge


def _doubled(admission: _Admission) -> str | None:
    seen: dict[str, str] = {}
    for job in admission.jobs.values():
        if (other := seen.setdefault(job.instance, job.id)) != job.id:
            return f"{job.instance}: {other}, {job.id}"
    return None
