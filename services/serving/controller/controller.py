"""The control loop: it makes the instances of pools and applications match the plans in force.

It is a loop in the service, for the same reasons as the sweeper; its state is in the database. Each pass reads the
instances and their jobs, calls servers and admission over HTTP, and then, owner by owner, under the row lock of the
pool or application, writes the states of its instances and what has to change. Any number of services may run it: an
owner that another one is working on is skipped, each write names the state it expects, and an instance leaves
``wanted`` only with the answer to its submission, whose key is its id, so that it never has two jobs and never leaves
one behind.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial

from services.contracts.nodes import Listener
from services.contracts.serving import InstanceState, ServerProbes
from services.core.domain.jobs import JobState
from services.core.domain.reasons import Reason
from services.db.sealing import Sealer, SealError, new_instance_key, open_instance_key
from services.kit.ids import new_id
from services.kit.logging import Log
from services.kit.repeating import each_apart, repeat
from services.kit.tasks import end_tasks
from services.serving.controller.advance import Change, Seen, advance, drain, give_up, one_by_one, recall
from services.serving.controller.diff import (
    ANY_GPUS,
    STAYING,
    Combination,
    Difference,
    Failures,
    Gpus,
    Member,
    Outlook,
    Pending,
    diff,
    drainable,
    failures,
    recalled,
)
from services.serving.controller.probes import KEYED_PATH, KeyCheck, Prober
from services.serving.controller.server_jobs import ServerJobs
from services.serving.instances import APP_PREFIX, Instance, InstanceReason, InstanceTerms
from services.serving.repository import Queries, ServingRepository
from services.serving.repository.instances import InstanceOwner, InstanceRows, NewInstance, PlanInForce
from services.serving.settings import ServingSettings

log = Log(__name__)

PATIENCE_S = 5.0  #: A job that has waited longer than this for GPUs waits for GPUs that others hold
SUBMISSIONS = "submissions"


class Controller:
    """Starts, watches, drains and ends instances."""

    def __init__(
        self,
        repository: ServingRepository,
        jobs: ServerJobs,
        prober: Prober,
        settings: ServingSettings,
        held: Callable[[str], int] = lambda _: 0,
        sealer: Sealer | None = None,
    ) -> None:
        """Take what each pass needs.

        ``held`` returns how many requests routers hold at an instance, by its id; ``sealer`` seals new instances' keys.
        """
        self._sealer = sealer or Sealer("")
        self._held, self._repository, self._jobs = held, repository, jobs
        self._prober, self._settings = prober, settings
        self._plans: dict[str, PlanInForce | None] = {}
        self._streaks: dict[tuple[str, InstanceState], int] = {}
        self._asked_s: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[dict[str, Seen]]] = {}

    async def run(self) -> None:
        """Repeat until cancelled; if a pass fails (the database does not answer), the next one tries again."""
        try:
            await repeat(
                self.look,
                self._settings.instance_look_s,
                failed="controller.not_looked",
                when=self._repository.presence.wait,
            )
        finally:
            await end_tasks(self._asking.values())

    async def look(self) -> None:
        """Observe all instances, and bring every owner a step closer to its plan."""
        async with self._repository.reading() as queries:
            owners, instances = await queries.instances.owners(), await queries.instances.live()
            now = await queries.now()
        self._forget_gone(owners, instances)
        seen = await self._ask({owner.key: owner for owner in owners}, instances, now)

        async def control(owner: InstanceOwner) -> None:
            async with self._repository.writing() as queries:
                await self._control(queries, owner, seen)

        await each_apart(owners, control, failed="controller.pool_failed", name=lambda owner: owner.key)

    def _forget_gone(self, owners: Sequence[InstanceOwner], instances: Sequence[Instance]) -> None:
        plans = {owner.plan_id for owner in owners}
        live = {(each.id, each.state) for each in instances}
        self._plans = {plan_id: plan for plan_id, plan in self._plans.items() if plan_id in plans}
        self._streaks = {key: count for key, count in self._streaks.items() if key in live}
        self._asked_s = {key: at_s for key, at_s in self._asked_s.items() if (key, InstanceState.READY) in live}

    # What is asked over HTTP, outside of any transaction.

    async def _ask(
        self, owners: Mapping[str, InstanceOwner], instances: Sequence[Instance], now: datetime
    ) -> dict[str, Seen]:
        """Send due requests, and return the answers that arrive before the next pass; later ones are left to it."""
        wanted = [
            each for each in instances if each.state is InstanceState.WANTED and each.job_id is None and not each.is_pod
        ]
        if wanted and SUBMISSIONS not in self._asking:
            self._asking[SUBMISSIONS] = asyncio.create_task(self._jobs.submit(wanted))
        for each in instances:
            if each.pool in owners and each.id not in self._asking:
                question = self._question(each, _probes(owners[each.pool], each), now)
                if question is not None:
                    self._asking[each.id] = asyncio.create_task(_alone(each, question))
        # Whether a pod takes requests is its cluster's to say.
        seen = {each.id: Seen(each.state, url, answers=True) for each in instances if (url := _pod_url(each))}
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=self._settings.instance_look_s)
        for key, task in list(self._asking.items()):
            if not task.done():
                continue
            del self._asking[key]
            if error := task.exception():
                log.warning("controller.not_asked", id=key, error=str(error) or type(error).__name__)
            else:
                seen |= task.result()
        return seen

    def _question(
        self, each: Instance, probes: ServerProbes, now: datetime
    ) -> Callable[[], Awaitable[Seen | None]] | None:
        """Return the request due at an instance, not yet begun, so that a task cancelled first never begins it."""
        if each.is_pod and each.state is not InstanceState.DRAINING:
            return None
        match each.state:
            case InstanceState.STARTING if each.job and each.job.url:
                return partial(self._ask_health, each, each.job.url, probes)
            case InstanceState.READY if each.url and time.monotonic() >= self._asked_s.get(each.id, 0.0):
                self._asked_s[each.id] = time.monotonic() + self._settings.instance_probe_s * random.uniform(0.8, 1.0)
                return partial(self._ask_health, each, each.url, probes)
            case InstanceState.DRAINING if each.url and each.draining_at and probes.load_path:
                is_heard_of = (now - each.draining_at).total_seconds() >= probes.drain_min_s
                return partial(self._ask_load, each, each.url + probes.load_path, probes) if is_heard_of else None
            case InstanceState.STOPPING if each.job and not each.job_has_ended and not each.job.cancel_requested:
                return partial(self._jobs.cancel, each)
            case _:
                return None

    async def _ask_health(self, each: Instance, url: str, probes: ServerProbes) -> Seen:
        answers = await self._prober.answers(url + probes.health_path)
        key = await self._check_key(each, url) if answers and each.state is InstanceState.STARTING else None
        return Seen(each.state, url, answers=answers, silences=self._count(each, not answers), key=key)

    async def _check_key(self, each: Instance, url: str) -> KeyCheck | None:
        """Return how a server treats its key; do not send the key where another process may be listening."""
        known = each.job and each.job.listener
        if each.sealed_key is None or known in (Listener.FOREIGN, Listener.NONE):
            return None
        try:
            key = open_instance_key(self._sealer, each.sealed_key, each.tenant_id, each.id)
        except SealError:
            return None
        found = await self._prober.key_check(url + KEYED_PATH, key)
        # An application's server need not have such a path, and may refuse it for reasons of its own.
        is_app = each.pool.startswith(APP_PREFIX)
        return KeyCheck.UNCHECKED if is_app and found is KeyCheck.REFUSED else found

    async def _ask_load(self, each: Instance, url: str, probes: ServerProbes) -> Seen:
        held = await self._prober.held(url, frozenset(probes.load_metrics))
        return Seen(each.state, each.url, empties=self._count(each, held == 0))

    def _count(self, each: Instance, is_so: bool) -> int:
        """Return how many times in a row the observation was made."""
        count = self._streaks.get((each.id, each.state), 0) + 1 if is_so else 0
        self._streaks[each.id, each.state] = count
        return count

    # What is written, under the owner's lock.

    async def _control(self, queries: Queries, known: InstanceOwner, seen: Mapping[str, Seen]) -> None:
        rows = queries.instances
        owner = await rows.lock(known)
        if owner is None:
            return
        now = await queries.now()
        moves = [
            (each, advance(each, seen.get(each.id), _probes(owner, each), now, held_by_routers=self._held(each.id)))
            for each in await rows.live_of(owner)
        ]
        moved = await _write(rows, one_by_one(moves))
        instances = [each for each in moved if each.state is not InstanceState.ENDED]
        if owner.is_deleted and not instances:
            await (queries.apps if owner.is_app else queries.pools).remove(owner.name)
            log.info("app.removed" if owner.is_app else "pool.removed", name=owner.name)
            return
        plan = PlanInForce(owner.revision, "", {}) if owner.is_deleted else await self._plan_in_force(rows, owner)
        if plan is not None:
            await self._fit(rows, owner, plan, instances, now)

    async def _plan_in_force(self, rows: InstanceRows, pool: InstanceOwner) -> PlanInForce | None:
        if pool.is_app:
            return pool.target
        if pool.plan_id is None:
            return None
        if pool.plan_id not in self._plans:
            self._plans[pool.plan_id] = await rows.plan(pool.plan_id)
        return self._plans[pool.plan_id]

    async def _fit(
        self, rows: InstanceRows, owner: InstanceOwner, plan: PlanInForce, instances: Sequence[Instance], now: datetime
    ) -> None:
        """Create, recall, reassign, stop and drain instances according to the plan."""
        # Until a plan is made for the owner as it is now, it is kept as it was.
        is_planned = plan.revision == owner.revision

        def member(each: Instance) -> Member:
            return Member(
                id=each.id,
                at=each.at,
                request_class=each.request_class,
                state=each.state,
                is_current=not is_planned or owner.blueprint.is_current(each.at, each.process),
                up_s=(now - (each.ready_at or each.created_at)).total_seconds(),
                leaves_first=each.id in owner.leave,
                ordinal=each.pod.ordinal if each.pod else 0,  # of what has no pod, its cluster says one, too
            )

        members = [member(each) for each in instances if each.state in STAYING]
        if not owner.is_app:  # of those, the GPU may be about to be cut anew
            instances = await _recalled(rows, plan, members, instances, member)
            members = [member(each) for each in instances if each.state in STAYING]
        changes, failed = diff(plan.target, members), dict[Combination, Failures]()
        if changes.make or any(each.state is not InstanceState.READY for each in members):
            failed = failures(await rows.lives(owner.key, owner.changed_at))
            changes = diff(plan.target, members, {at for at, each in failed.items() if each.retry_at > now})
        await self._make(rows, owner, plan, changes)
        by_id = {each.id: each for each in instances}
        go = _may_go(owner, changes, instances, failed, now) | owner.leave
        writes: list[tuple[Instance, Change]] = []
        for each in members:
            instance = by_id[each.id]
            if each.id not in changes.leave:
                name = changes.reassign.get(each.id, each.request_class)
                writes.append((instance, {"partition": plan.partition, "request_class": name}))
                continue
            reason = _why(owner, each)
            writes.append((instance, drain(now, reason) if each.id in go else give_up(instance, now, reason)))
        await _write(rows, writes)

    async def _make(self, rows: InstanceRows, owner: InstanceOwner, plan: PlanInForce, changes: Difference) -> None:
        # What is gone from the spec, as the plan is of an earlier one, has no terms.
        wanted = [(terms, at, name) for at, name in changes.make if (terms := owner.blueprint.terms(at)) is not None]
        made: list[NewInstance] = []
        # Small ones first could leave no node for a large one.
        for terms, at, request_class in sorted(wanted, key=lambda each: -each[0].mode.gpus):
            name = new_id("instance")
            key = None if terms.mode.workload else new_instance_key(self._sealer, owner.tenant_id, name)
            made.append(NewInstance(name, owner, *at, plan.partition, request_class, terms, key))
        if made:
            await rows.add(made)
            log.info("instances.wanted", pool=owner.key, count=len(made))


def _pod_url(each: Instance) -> str | None:
    return each.job.url if each.is_pod and each.state is InstanceState.STARTING and each.job else None


def _probes(owner: InstanceOwner, instance: Instance) -> ServerProbes:
    """Return how an instance is probed: by its owner's present spec, unless the instance was made from another one."""
    is_current = owner.blueprint.is_current(instance.at, instance.process)
    return owner.blueprint.probes if is_current else instance.terms.probes


def _may_go(
    owner: InstanceOwner,
    changes: Difference,
    instances: Sequence[Instance],
    failed: Mapping[Combination, Failures],
    now: datetime,
) -> frozenset[str]:
    """Return which of the ready instances that leave may be drained now."""
    by_id = {each.id: each for each in instances}
    leaving = [(each, _gpus(by_id[each].terms)) for each in changes.leave if by_id[each].state is InstanceState.READY]
    pending = [
        _pending(each, each.at in failed, now)
        for each in instances
        if each.state in (InstanceState.WANTED, InstanceState.STARTING) and each.id not in changes.leave
    ]
    pending += [
        Pending(_gpus(terms), outlook)
        for missing, outlook in ((changes.make, Outlook.COMES), (changes.wait, Outlook.STUCK))
        for at, _ in missing
        if (terms := owner.blueprint.terms(at))
    ]
    releasing = [_gpus(each.terms) for each in instances if each.state not in STAYING]
    return frozenset(drainable(leaving, pending, releasing))


def _pending(each: Instance, has_failed: bool, now: datetime) -> Pending:
    gpus, job = _gpus(each.terms), each.job
    if job and job.state is JobState.QUEUED and job.queued_at and (now - job.queued_at).total_seconds() > PATIENCE_S:
        match job.reason:
            case Reason.NOT_ENOUGH_FREE_GPUS | Reason.NOT_ENOUGH_FREE_SLICES:
                return Pending(gpus, Outlook.WAITS)
            case Reason.TENANT_QUOTA:
                return Pending(Gpus(ANY_GPUS, gpus.count), Outlook.WAITS)
            case Reason.NO_ELIGIBLE_NODE | Reason.NO_SUCH_SLICE | Reason.NODE_CLOSED:
                return Pending(gpus, Outlook.STUCK)
            case _:
                pass
    is_late = (now - each.created_at).total_seconds() > each.terms.probes.ready_timeout_s
    return Pending(gpus, Outlook.STUCK if has_failed or is_late else Outlook.COMES)


def _gpus(terms: InstanceTerms) -> Gpus:
    if terms.fleet is not None:
        return Gpus((f"fleet:{terms.fleet}", terms.slice or terms.mode.gpu_model), terms.mode.gpus)
    return Gpus((terms.place.cluster or terms.place.zone, terms.mode.gpu_model), terms.mode.gpus)


def _why(owner: InstanceOwner, leaving: Member) -> InstanceReason:
    if owner.is_deleted:
        return InstanceReason.APP_DELETED if owner.is_app else InstanceReason.POOL_DELETED
    if leaving.leaves_first:
        return InstanceReason.REPARTITIONED
    return InstanceReason.NOT_NEEDED if leaving.is_current else InstanceReason.TERMS_CHANGED


async def _alone(each: Instance, question: Callable[[], Awaitable[Seen | None]]) -> dict[str, Seen]:
    seen = await question()
    return {} if seen is None else {each.id: seen}


async def _recalled(
    rows: InstanceRows,
    plan: PlanInForce,
    members: Sequence[Member],
    instances: Sequence[Instance],
    member: Callable[[Instance], Member],
) -> list[Instance]:
    """Return draining instances to service where the plan would otherwise start new ones; return all instances."""
    back = {each.id: recall(each) for each in instances if each.state is InstanceState.DRAINING}
    draining = [member(each) for each in instances if back.get(each.id)]
    names = {each.id for each in recalled(diff(plan.target, members).make, draining)} if draining else set[str]()
    return await _write(rows, [(each, back[each.id] if each.id in names else {}) for each in instances])


async def _write(rows: InstanceRows, changes: Sequence[tuple[Instance, Change]]) -> list[Instance]:
    """Write the changes that have an effect, and return all instances as changed."""
    real = [
        (each, change)
        for each, change in changes
        if any(getattr(each, name) != value for name, value in change.items())
    ]
    await rows.change(real)
    for each, change in real:
        if "state" in change:
            reason = change.get("reason", each.reason)
            log.info(f"instance.{change['state']}", pool=each.pool, id=each.id, reason=reason)
    return [replace(each, **change) for each, change in changes]
