"""Watches Slurm, reports changes to the control plane, and changes what differs from the decisions.

Nothing has to survive this process. What Slurm must know of us is in the jobs' admin comments, and a hold that nobody
renews ends by itself.
"""

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice

from services.contracts import engines
from services.engines.slurm import steering
from services.engines.slurm.commands import Commands
from services.engines.slurm.ordering import Priority, nice_values
from services.engines.slurm.reading import SlurmJob, SlurmNode
from services.engines.slurm.settings import SlurmSettings
from services.kit.bridges.energy import ModelledEnergy
from services.kit.bridges.figures import IDLED
from services.kit.bridges.silent import EngineSilentError
from services.kit.bridges.talk import REST, Talk
from services.kit.control_plane import ControlPlane
from services.kit.logging import Log
from services.kit.tasks import to_the_end

log = Log(__name__)

UNREAD = "Slurm's row of it cannot be read"  #: Why a node takes no work that was read before


_NAME = re.compile(r"(\d+(?:_\d+)?)@(\d+)")


class Identities:
    """Which Slurm job is which: slurmctld may lose a job that it had accepted, and give its number to another.

    A job's name is ``NUMBER@SUBMITTED`` (of an array's task ``ARRAY_TASK@SUBMITTED``), from when it was first seen; it
    is written into the job's admin comment, which survives a requeue, while the submission time does not. In a dry run
    nothing is written, and memory has to suffice.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, SlurmJob]] = {}

    def named(self, jobs: Iterable[SlurmJob]) -> list[tuple[SlurmJob, str]]:
        """Return jobs with their names, which are unique."""
        found: dict[str, SlurmJob] = {}
        known: dict[str, tuple[str, SlurmJob]] = {}
        for job in jobs:
            name = self._name(job)
            known[job.number] = (name, job)
            if name not in found or found[name].submit_s < job.submit_s:
                found[name] = job
        self._known = known
        return [(job, name) for name, job in found.items()]

    def _name(self, job: SlurmJob) -> str:
        fresh = f"{job.number}@{job.submit_s}"
        if (tag := _NAME.fullmatch(job.tag)) and tag[1] == job.number:
            return job.tag
        name, was = self._known.get(job.number, (fresh, job))
        is_same = was.submit_s == job.submit_s or (job.restarts > was.restarts and job.user == was.user)
        return name if is_same else fresh

    @staticmethod
    def key_of(name: str) -> tuple[str, int] | None:
        """Return the number and the submission time that a name was made of."""
        found = _NAME.fullmatch(name)
        return (found[1], int(found[2])) if found else None


class Bridge:
    """One Slurm cluster and the control plane."""

    def __init__(self, settings: SlurmSettings, slurm: Commands, control_plane: ControlPlane) -> None:
        self._settings = settings
        self._slurm = slurm
        self._control_plane = control_plane
        self._talk = Talk("slurm", settings, control_plane, heard=False)
        self._talk.queues = settings.partitions
        self._talk.orders = settings.order != "none" and settings.mode is engines.EngineMode.CONTROL
        self._identities = Identities()
        self._memories: dict[str, steering.Memory] = {}
        self._older: dict[str, tuple[engines.EngineJob, engines.EngineAction]] = {}
        self._jobs: dict[str, SlurmJob] = {}
        self._nodes: dict[str, SlurmNode] = {}
        self._parts: list[engines.EngineNode] = []
        self._unread: dict[str, Collection[str]] = {"jobs": (), "nodes": ()}
        self._nices: dict[str, int] = {}
        self._set_by_hand: set[str] = set()
        self._nodes_at_s = -1e9
        self._looked_at_s = 0.0
        self._energy = ModelledEnergy(settings.energy_interval_s)

    def take(self, decisions: Sequence[engines.EngineDecision]) -> None:
        self._talk.take(decisions)

    async def run(self) -> None:
        try:
            await self._talk.keep_looking(self.look)
        finally:
            self._await_jobs(until_s=0)
            if self._nices or any(job.our_nice is not None for job in self._jobs.values()):
                await to_the_end(self._give_back())

    def _await_jobs(self, until_s: float) -> None:
        """Say until when new jobs are to wait for a plan: while this bridge steers them and is heard."""
        file = self._settings.alive_file
        if file is None or self._settings.mode is not engines.EngineMode.CONTROL:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_name(f"{file.name}.new")
            new.write_text(f"{int(until_s)}\n", encoding="utf-8")
            new.chmod(0o644)  # Slurm's own user reads it
            new.replace(file)
        except OSError as error:
            log.warning("slurm.alive_file_unwritable", error=str(error))

    async def _give_back(self) -> None:
        """Give jobs their own nice values back; where Slurm is silent, the next start does."""
        try:
            rows, _ = await self._slurm.jobs()
            changes = steering.given_back(job for job in rows if job.number not in self._set_by_hand)
            if changes.size and self._settings.mode is engines.EngineMode.CONTROL:
                await self._slurm.change(changes)
                log.info("slurm.given_back", jobs=changes.size)
        except EngineSilentError as error:
            log.error("slurm.silent", error=str(error))

    async def look(self) -> steering.Changes:
        """Look once; return what was changed.

        Raises:
            ProblemError: The control plane does not answer, or refuses; by then Slurm's changes are made.
        """
        now_s = time.time()
        began_s = time.monotonic()
        try:
            rows, version = await self._slurm.jobs()
            if now_s - self._nodes_at_s >= self._settings.nodes_interval_s:
                nodes = await self._slurm.nodes()
                closed = [replace(node, closed=UNREAD) for name, node in self._nodes.items() if name in nodes.unread]
                self._nodes = {node.name: node for node in (*nodes, *closed)}
                self._parts, unread = [], {**nodes.unread}
                for node in self._nodes.values():
                    try:
                        self._parts += self._nodes_of(node)
                    except ValueError as error:  # of what no node can have
                        unread[node.name] = f"{error!r}"[:200]
                self._note_unread("nodes", unread)
        except EngineSilentError as error:
            await self._talk.complain(error)
            return steering.Changes()
        finally:
            self._talk.engine_s = time.monotonic() - began_s
        self._talk.version = version or self._talk.version
        # What cannot be read now is as it was when last read, and nothing is done to it.
        kept = {number: job for number, job in self._jobs.items() if job.record in rows.unread}
        self._jobs = {job.number: job for job in rows} | kept
        for number in self._set_by_hand & self._jobs.keys():
            self._jobs[number] = replace(self._jobs[number], special=steering.SET_BY_HAND)
        named = self._identities.named(self._jobs.values())
        live = [(job, name) for job, name in named if job.state in ("pending", "running")]
        for _, name in live:
            self._memories.setdefault(name, steering.Memory())
        ended = {name for _, name in live if name in self._talk.sent and self._talk.sent[name].state.is_over}
        for name in ended:
            self._talk.decisions.pop(name, None)  # what was decided of a run that has ended says nothing of another
        # What is to become of a run that ends and is there again, the control plane says once it is told.
        readable = [(job, name) for job, name in live if name not in ended and job.record not in rows.unread]
        self._note_idle(live, now_s)
        changes = await self._change(readable, now_s)
        await self._report(named, live, rows.unread, now_s)
        self._await_jobs(until_s=now_s + self._settings.silence_s + REST * self._talk.engine_s)
        self._talk.forget({name for _, name in named}, self._memories, self._older)
        if self._settings.energy:
            running = [self._talk.sent[name] for _, name in live if name in self._talk.sent and name not in self._older]
            await self._energy.book(self._control_plane, self._parts, running, now_s)
        return changes

    async def _change(self, live: Sequence[tuple[SlurmJob, str]], now_s: float) -> steering.Changes:
        older = {
            name: self._older[name][1]
            for job, name in live
            if name in self._older and steering.is_same_run(job, self._older[name][0])
        }
        decisions, heard = self._talk.decisions, self._talk.is_heard
        changes = steering.changes_of(
            live, decisions, self._memories, self._settings, now_s, heard=heard, older=older, nices=self._nices
        )
        if not changes.size:
            return changes
        names = {job.number: name for job, name in live}
        try:
            refused = await self._slurm.change(changes)
        except EngineSilentError as error:
            log.error("slurm.silent", error=str(error))
            return changes
        for number, _ in changes.signals:
            decision = self._talk.decisions[names[number]]
            memory = self._memories[names[number]]
            memory.signalled, memory.signalled_s = decision.revision, now_s
        for number, words in refused.items():
            if (decision := self._talk.decisions.get(names.get(number, ""))) is not None:
                memory = self._memories[decision.external_id]
                memory.refusals = {decision.revision: memory.refusals.get(decision.revision, 0) + 1}
                memory.refused = words
                log.warning("slurm.refused", job=number, action=decision.action.value, why=words)
        log.info(
            "slurm.changed",
            jobs=changes.size,
            requeued=len(changes.requeues),
            shrunk=len(changes.shrinks),
            refused=len(refused),
        )
        return changes

    async def _report(
        self,
        named: Sequence[tuple[SlurmJob, str]],
        live: Sequence[tuple[SlurmJob, str]],
        unread: Mapping[str, str],
        now_s: float,
    ) -> None:
        """Report what has changed to the control plane."""
        reports: dict[str, engines.EngineJob] = {}
        for job, name in named:
            if job.state in ("pending", "running") or name in self._talk.sent or not self._talk.is_known:
                decision, memory = self._talk.decisions.get(name), self._memories.get(name, steering.Memory())
                made = partial(steering.report_of, self._by_part(job), name, decision, memory, self._settings, now_s)
                if (report := self._talk.said(name, made)) is not None:
                    reports[name] = report
        self._note_unread("jobs", unread)
        await self._talk.tell(reports, self._note_older)
        fresh = now_s - self._nodes_at_s >= self._settings.nodes_interval_s
        reply = await self._talk.tell_all(self._parts if fresh else None, [name for _, name in live])
        if fresh:
            self._nodes_at_s = now_s
            await self._take_order(reply.order, live)
        await self._look_for(reply.unreported, {name for _, name in named}, unread)

    async def _take_order(self, order: Sequence[str], live: Sequence[tuple[SlurmJob, str]]) -> None:
        """Find the nice values that put released jobs into the plan's order, and the jobs that somebody has put first.

        Once it runs, such a job has no priority to be known by, and stays left alone.
        """
        if not self._talk.orders:
            return
        try:
            priorities = await self._slurm.priorities()
        except EngineSilentError as error:
            log.error("slurm.order_unknown", error=str(error))
            priorities = dict[str, Priority]()
        was_set = {job.number for job, _ in live} & self._set_by_hand - priorities.keys()
        self._set_by_hand = was_set | {number for number, each in priorities.items() if each.is_set}
        self._nices = nice_values(order, {name: job for job, name in live}, priorities, self._settings.order)

    def _note_older(self, part: Sequence[engines.EngineJob], reply: engines.EngineReply) -> None:
        for report in part:
            self._older.pop(report.external_id, None)
        sent = self._talk.sent
        self._older |= {name: (sent[name], engines.EngineAction.CANCEL) for name in reply.ended}
        self._older |= {name: (sent[name], engines.EngineAction.REQUEUE) for name in reply.stopped}

    async def _look_for(self, unreported: Sequence[str], seen: set[str], unread: Collection[str]) -> None:
        """Report how jobs ended that Slurm no longer shows: as its accounting has it, or as unknown."""
        missing = [name for name in unreported if name not in seen and name.partition("@")[0] not in unread]
        missing = [name for name in missing if name.partition("_")[0] not in unread]
        gone_s = self._talk.gone_for_s(missing)
        if not missing:
            return
        keys = {name: self._identities.key_of(name) for name in missing}
        try:
            ended = await self._slurm.ended(sorted({key[0] for key in keys.values() if key}))
        except EngineSilentError as error:
            log.error("slurm.silent", error=str(error))
            ended = {}
        over: list[engines.EngineJob] = []
        for name, key in keys.items():
            found = ended.get(key) if key else None
            if found is not None:
                over.append(self._over(name, engines.EngineJobState(found[0]), found[1]))
            elif gone_s[name] >= self._settings.missing_after_s:
                over.append(self._over(name, engines.EngineJobState.MISSING, None))
        await self._talk.tell_ends(over)

    def _note_idle(self, live: Sequence[tuple[SlurmJob, str]], now_s: float) -> None:
        """Count the GPUs that are free beside jobs which we hold, since the last look."""
        since_s, self._looked_at_s = self._looked_at_s, now_s
        held = [each for each in live if each[0].is_held and each[0].eligible_s > now_s and not each[0].waits_for]
        if not since_s or not held or self._settings.mode is not engines.EngineMode.CONTROL:
            return
        partitions = {name for job, _ in held for name in job.partition.split(",")}
        nodes = {name: node for name, node in self._nodes.items() if partitions & set(node.partitions)}
        free = sum(node.gpus for node in nodes.values() if not node.closed)
        for job, _ in live:
            free -= sum(len(gpus) for node, gpus in job.shares.items() if node in nodes and not nodes[node].closed)
        gpus = {"greener_hours": 0, "other": 0}
        for job, name in held:
            decision = self._talk.decisions.get(name)
            gpus["greener_hours" if decision and steering.is_for_hours(decision) else "other"] += job.gpus
        for reason in ("other", "greener_hours"):
            idle = max(min(free, gpus[reason]), 0)
            free -= idle
            IDLED.labels(reason).inc(idle * max(now_s - since_s, 0.0))

    def _over(self, name: str, state: engines.EngineJobState, exit_code: int | None) -> engines.EngineJob:
        number, submit_s = self._identities.key_of(name) or ("", 0)
        submitted_at = datetime.fromtimestamp(submit_s, UTC)
        return self._talk.ended(name, state, number=number, submitted_at=submitted_at, exit_code=exit_code)

    def _nodes_of(self, node: SlurmNode) -> list[engines.EngineNode]:
        """Return a node as plans see it: one for each type of its GPUs."""
        return [
            engines.EngineNode(
                name=name,
                gpus=count,
                gpu_model=self._settings.gpu_models.get(kind, kind) or "GPU",
                memory_gib=self._settings.gpu_memory_gib,
                queues=list(node.partitions),
                closed=node.closed,
            )
            for name, kind, _, count in node.parts
        ]

    def _by_part(self, job: SlurmJob) -> SlurmJob:
        """Return a job with the GPUs that it holds named as those of ``_nodes_of``."""
        shares: dict[str, tuple[int, ...]] = {}
        for host, numbers in job.shares.items():
            node = self._nodes.get(host)
            for name, _, first, count in node.parts if node else [(host, "", 0, 1_024)]:
                if held := tuple(number - first for number in numbers if first <= number < first + count):
                    shares[name] = held
        return replace(job, shares=shares) if shares != job.shares else job

    def _note_unread(self, what: str, unread: Mapping[str, str]) -> None:
        """Log rows that cannot be read, once for each."""
        if any(name not in self._unread[what] for name in unread):
            log.warning("slurm.rows_unread", rows=what, count=len(unread), why=dict(islice(unread.items(), 10)))
        self._unread[what] = unread
