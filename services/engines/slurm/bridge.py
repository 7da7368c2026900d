"""The loop: look at Slurm, tell the control plane what has changed, and change in Slurm what is otherwise than decided.

Nothing has to survive this process. What Slurm must know of us is in the jobs' admin comments; decisions are repeated
by the control plane to a bridge that starts; and a hold that nobody renews ends by itself.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

from services.contracts.engines import (
    MAX_JOBS_OF_A_REPORT,
    EngineAction,
    EngineDecision,
    EngineJob,
    EngineJobState,
    EngineNode,
    EngineReply,
    EngineReport,
)
from services.engines.slurm.commands import SlurmSilentError
from services.engines.slurm.identities import Identities
from services.engines.slurm.reading import Rows, SlurmJob, SlurmNode
from services.engines.slurm.settings import SlurmSettings
from services.engines.slurm.steering import Changes, Memory, changes_of, is_same_run, report_of
from services.kit.bridge_energy import ModelledEnergy
from services.kit.control_plane import ControlPlane
from services.kit.logging import Log
from services.kit.problems import ProblemError

log = Log(__name__)

UNREAD = "Slurm's row of it cannot be read"
"""Why a node takes no work that was read before."""
PRESENT_EVERY_S = 30.0
"""How often all jobs are named, so that those that Slurm has lost are noticed."""


class Slurm(Protocol):
    """Slurm, by its commands; errors of all are ``SlurmSilentError``."""

    async def jobs(self) -> tuple[Rows[SlurmJob], str]:
        """Return all jobs that ask for GPUs, and Slurm's version."""
        ...

    async def nodes(self) -> Rows[SlurmNode]:
        """Return the nodes with GPUs."""
        ...

    async def change(self, changes: Changes) -> dict[int, str]:
        """Do what is to be done; return what was refused, by number."""
        ...

    async def ended(self, numbers: Sequence[int]) -> dict[tuple[int, int], tuple[str, int | None]]:
        """Return how jobs ended, by number and submission, as accounting has it."""
        ...


class Bridge:
    """One Slurm and the control plane."""

    def __init__(self, settings: SlurmSettings, slurm: Slurm, control_plane: ControlPlane) -> None:
        self._settings = settings
        self._slurm = slurm
        self._control_plane = control_plane
        self._boot_id = secrets.token_hex(8)
        self._identities = Identities()
        self._memories: dict[str, Memory] = {}
        self._decisions: dict[str, EngineDecision] = {}
        self._sent: dict[str, EngineJob] = {}
        self._older: dict[str, tuple[EngineJob, EngineAction]] = {}
        self._jobs: dict[str, SlurmJob] = {}
        self._nodes: dict[str, SlurmNode] = {}
        self._unread: dict[str, Collection[str]] = {"jobs": (), "nodes": ()}
        self._nodes_at_s = self._present_at_s = self._heard_at_s = -1e9
        self._gone_since_s: dict[str, float] = {}
        self._told = False
        self._version = ""
        self._problem: str | None = None
        self._woken = asyncio.Event()
        self._energy = ModelledEnergy(settings.energy_interval_s)

    def take(self, decisions: Sequence[EngineDecision]) -> None:
        """Take decisions; of two on a job the newer one is in force."""
        for decision in decisions:
            known = self._decisions.get(decision.external_id)
            if known is None or known.revision < decision.revision:
                self._decisions[decision.external_id] = decision
                self._woken.set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            began_s = time.monotonic()
            self._woken.clear()
            try:
                await self.look()
            except ProblemError as error:
                log.warning("control_plane.silent", error=error.detail)
            except Exception:  # whatever Slurm has answered, the next look begins anew
                log.exception("look.failed")
            pause_s = max(self._settings.interval_s - (time.monotonic() - began_s), 0.05)
            try:
                async with asyncio.timeout(pause_s):
                    await self._woken.wait()
                await asyncio.sleep(0.05)  # decisions of one round come in several commands
            except TimeoutError:
                pass

    async def look(self) -> Changes:
        """Look once; return what was changed.

        Raises:
            ProblemError: The control plane does not answer, or refuses; what Slurm needs was done before.
        """
        now_s = time.time()
        try:
            rows, version = await self._slurm.jobs()
            if now_s - self._nodes_at_s >= self._settings.nodes_interval_s:
                nodes = await self._slurm.nodes()
                closed = [replace(node, closed=UNREAD) for name, node in self._nodes.items() if name in nodes.unread]
                self._nodes = {node.name: node for node in (*nodes, *closed)}
                self._note_unread("nodes", nodes.unread)
        except SlurmSilentError as error:
            await self._complain(str(error))
            return Changes()
        self._version, self._problem = version or self._version, None
        # What cannot be read now is as it was when last read, and nothing is done to it.
        kept = {number: self._jobs[number] for number in rows.unread if number in self._jobs}
        self._jobs = {str(job.number): job for job in rows} | kept
        named = self._identities.named(self._jobs.values())
        live = [(job, name) for job, name in named if job.state in ("pending", "running")]
        for _, name in live:
            self._memories.setdefault(name, Memory())
        ended = {name for _, name in live if name in self._sent and self._sent[name].state.is_over}
        for name in ended:
            self._decisions.pop(name, None)  # what was decided of a run that has ended says nothing of another
        # What is to become of a run that ends and is there again, the control plane says once it is told.
        readable = [(job, name) for job, name in live if name not in ended and str(job.number) not in rows.unread]
        changes = await self._change(readable, now_s)
        await self._report(named, live, rows.unread, now_s)
        self._forget({name for _, name in named})
        if self._settings.energy:
            running = [self._sent[name] for _, name in live if name in self._sent and name not in self._older]
            await self._energy.book(self._control_plane, list(map(self._node, self._nodes.values())), running, now_s)
        return changes

    async def _complain(self, problem: str) -> None:
        if problem != self._problem:
            log.error("slurm.silent", error=problem)
        self._problem = problem
        await self._say(
            EngineReport(boot_id=self._boot_id, kind="slurm", mode=self._settings.mode, problem=problem[:500])
        )

    async def _change(self, live: Sequence[tuple[SlurmJob, str]], now_s: float) -> Changes:
        heard = now_s - self._heard_at_s < self._settings.silence_s
        older = {
            name: self._older[name][1]
            for job, name in live
            if name in self._older and is_same_run(job, self._older[name][0])
        }
        changes = changes_of(live, self._decisions, self._memories, self._settings, now_s, heard=heard, older=older)
        if not changes.size:
            return changes
        names = {job.number: name for job, name in live}
        try:
            refused = await self._slurm.change(changes)
        except SlurmSilentError as error:
            log.error("slurm.silent", error=str(error))
            return changes
        for number, _ in changes.signals:
            decision = self._decisions[names[number]]
            memory = self._memories[names[number]]
            memory.signalled, memory.signalled_s = decision.revision, now_s
        for number, words in refused.items():
            if (decision := self._decisions.get(names.get(number, ""))) is not None:
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
        """Tell the control plane what has changed, in reports of limited size; what it has not taken is told again."""
        reports: dict[str, EngineJob] = {}
        unread = {**unread}
        for job, name in named:
            if job.state in ("pending", "running") or name in self._sent or not self._told:
                memory = self._memories.get(name, Memory())
                try:
                    reports[name] = report_of(job, name, self._decisions.get(name), memory, self._settings, now_s)
                except (ValueError, OverflowError, OSError) as error:  # of what no job can have
                    unread[str(job.number)] = f"{error!r}"[:200]
        self._note_unread("jobs", unread)
        changed = [report for name, report in reports.items() if self._sent.get(name) != report]
        for at in range(0, len(changed), MAX_JOBS_OF_A_REPORT):
            part = changed[at : at + MAX_JOBS_OF_A_REPORT]
            reply = await self._say(self._report_with(jobs=part))
            self._sent |= {report.external_id: report for report in part}
            for report in part:
                self._older.pop(report.external_id, None)
            self._older |= {name: (self._sent[name], EngineAction.CANCEL) for name in reply.ended}
            self._older |= {name: (self._sent[name], EngineAction.REQUEUE) for name in reply.stopped}
        fields: dict[str, object] = {}
        if now_s - self._nodes_at_s >= self._settings.nodes_interval_s:
            fields["nodes"] = [self._node(node) for node in self._nodes.values()]
        asks = not self._told or now_s - self._present_at_s >= PRESENT_EVERY_S
        if asks:
            fields["present"] = [name for _, name in live]
        reply = await self._say(self._report_with(wants_decisions=not self._told, **fields))
        if "nodes" in fields:
            self._nodes_at_s = now_s
        if asks:
            self._present_at_s = now_s
            await self._look_for(reply.unreported, {name for _, name in named}, unread, now_s)
        self._told = True

    async def _look_for(self, unreported: Sequence[str], seen: set[str], unread: Collection[str], now_s: float) -> None:
        """Say how jobs ended that Slurm does not show any more: as its accounting has it, or that nobody knows."""
        missing = [name for name in unreported if name not in seen and name.partition("@")[0] not in unread]
        self._gone_since_s = {name: self._gone_since_s.get(name, now_s) for name in missing}
        if not missing:
            return
        self._present_at_s = -1e9  # until it is known what became of them
        keys = {name: self._identities.key_of(name) for name in missing}
        try:
            ended = await self._slurm.ended(sorted({key[0] for key in keys.values() if key}))
        except SlurmSilentError as error:
            log.error("slurm.silent", error=str(error))
            ended = {}
        reports: list[EngineJob] = []
        for name in missing:
            key = keys[name]
            found = ended.get(key) if key else None
            if found is not None:
                reports.append(self._over(name, EngineJobState(found[0]), found[1]))
            elif now_s - self._gone_since_s[name] >= self._settings.missing_after_s:
                reports.append(self._over(name, EngineJobState.MISSING, None))
        if reports:
            log.warning("slurm.jobs_gone", jobs=len(reports))
            await self._say(self._report_with(jobs=reports[:MAX_JOBS_OF_A_REPORT]))

    def _over(self, name: str, state: EngineJobState, exit_code: int | None) -> EngineJob:
        key = self._identities.key_of(name) or (0, 0)
        known = self._sent.pop(name, None) or self._identities.unknown(name, key)
        return known.model_copy(update={"state": state, "exit_code": exit_code, "shares": []})

    def _report_with(self, **fields: object) -> EngineReport:
        document = {
            **{"boot_id": self._boot_id, "kind": "slurm", "version": self._version, "mode": self._settings.mode},
            **{"queues": self._settings.partitions, "zone": self._settings.own_zone, **fields},
        }
        return EngineReport.model_validate(document)

    async def _say(self, report: EngineReport) -> EngineReply:
        reply = await self._control_plane.call("engine", report, EngineReply, 30.0)
        self._heard_at_s = time.time()
        self.take(reply.decisions)
        return reply

    def _node(self, node: SlurmNode) -> EngineNode:
        return EngineNode(
            name=node.name,
            gpus=node.gpus,
            gpu_model=self._settings.gpu_models.get(node.gpu_type, node.gpu_type) or "GPU",
            memory_gib=self._settings.gpu_memory_gib,
            queues=list(node.partitions),
            closed=node.closed,
        )

    def _forget(self, seen: set[str]) -> None:
        """Forget jobs that Slurm has forgotten and that were told to be over."""
        for known in (self._memories, self._decisions, self._sent, self._older):
            kept: Mapping[str, object] = known
            for name in [name for name in kept if name not in seen and name not in self._gone_since_s]:
                if name not in self._sent or self._sent[name].state.is_over:
                    known.pop(name, None)  # pyright: ignore[reportArgumentType, reportUnknownMemberType]

    def _note_unread(self, what: str, unread: Mapping[str, str]) -> None:
        """Log rows that cannot be read, once for each."""
        if any(name not in self._unread[what] for name in unread):
            log.warning("slurm.rows_unread", rows=what, count=len(unread), why=dict(islice(unread.items(), 10)))
        self._unread[what] = unread
