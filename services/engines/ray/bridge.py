"""The loop: look at Ray, tell the control plane what has changed, and have jobs ask what they are to do.

Nothing has to survive this process: jobs' entry points say how they are whenever they ask, decisions are repeated to a
bridge that starts, and an entry point that nobody answers starts its command by itself.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

from services.contracts.engines import (
    MAX_JOBS_OF_A_REPORT,
    EngineAction,
    EngineDecision,
    EngineJob,
    EngineJobState,
    EngineMode,
    EngineReply,
    EngineReport,
)
from services.engines.ray.entries import Entry, Told, listening
from services.engines.ray.head import Head, RaySilentError
from services.engines.ray.reading import Holdings, RayJob, RayNode
from services.engines.ray.settings import RaySettings
from services.engines.ray.steering import NOT_OURS, Seen, devices_of, nodes_of, report_of, told_of
from services.kit.bridge_energy import ModelledEnergy
from services.kit.control_plane import ControlPlane
from services.kit.ids import utc_now
from services.kit.logging import Log
from services.kit.problems import ProblemError

log = Log(__name__)

PRESENT_EVERY_S = 30.0
"""How often all jobs are named, so that those that Ray has lost are noticed."""
FIRST_ASKS_S = 15.0
"""For how long after a bridge's start a job that has not asked yet may still be one of ``wattshift.ray``."""


class Bridge:
    """One Ray cluster and the control plane."""

    def __init__(self, settings: RaySettings, head: Head, control_plane: ControlPlane) -> None:
        self._settings = settings
        self._head = head
        self._control_plane = control_plane
        self._boot_id = secrets.token_hex(8)
        self._jobs: dict[str, RayJob] = {}
        self._nodes: list[RayNode] = []
        self._holdings = Holdings()
        self._entries: dict[str, tuple[Entry, float]] = {}
        self._devices: dict[str, dict[str, list[int]]] = {}
        self._decisions: dict[str, EngineDecision] = {}
        self._sent: dict[str, EngineJob] = {}
        self._gone_since_s: dict[str, float] = {}
        self._began_s = self._heard_at_s = time.monotonic()
        self._nodes_at_s = self._present_at_s = -1e9
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

    def told(self, submission: str, entry: Entry) -> Told:
        """Take note of how a job's entry point is, and return what it is to do."""
        now_s = time.monotonic()
        before = self._entries.get(submission)
        self._entries[submission] = entry, now_s
        if before is None or before[0] != entry:
            self._woken.set()
        job = self._jobs.get(submission)
        decision = self._decisions.get(job.external_id) if job else None
        zones = {node.zone for node in self._nodes if node.zone}
        heard = now_s - self._heard_at_s < self._settings.silence_s
        return told_of(entry, decision, self._settings, zones, len(self._entries), heard=heard)

    async def run(self) -> None:
        """Look, and answer entry points, until cancelled."""
        async with listening(self._settings.listen_address, self.told):
            while True:
                began_s = time.monotonic()
                self._woken.clear()
                try:
                    await self.look()
                except ProblemError as error:
                    log.warning("control_plane.silent", error=error.detail)
                except Exception:  # whatever Ray has answered, the next look begins anew
                    log.exception("look.failed")
                pause_s = max(self._settings.interval_s - (time.monotonic() - began_s), 0.05)
                try:
                    async with asyncio.timeout(pause_s):
                        await self._woken.wait()
                    await asyncio.sleep(0.2)  # what changes together is reported together
                except TimeoutError:
                    pass

    async def look(self) -> None:
        """Look once.

        Raises:
            ProblemError: The control plane does not answer, or refuses.
        """
        now_s = time.monotonic()
        try:
            if not self._version:
                self._version = await self._head.version()
            if fresh := now_s - self._nodes_at_s >= self._settings.nodes_interval_s:
                self._nodes = await self._head.nodes()
            self._holdings = await self._head.holdings()
            jobs = await self._head.jobs()
        except RaySilentError as error:
            self._version = ""  # it may be another one when it answers again
            await self._complain(str(error))
            return
        self._problem = None
        self._jobs = {job.number: job for job in sorted(jobs, key=lambda job: job.submitted_at)}
        self._entries = {
            name: (entry, asked_s)
            for name, (entry, asked_s) in self._entries.items()
            if name in self._jobs or now_s - asked_s < self._settings.missing_after_s
        }
        await self._cancel()
        seen = self._seen(now_s)
        reports = {each.job.external_id: self._report_of(each) for each in seen}
        await self._report({name: report for name, report in reports.items() if report is not None}, now_s, fresh=fresh)
        if self._settings.energy:
            nodes, running = (
                nodes_of(self._nodes, self._settings),
                [each for each in self._sent.values() if each.shares],
            )
            await self._energy.book(self._control_plane, nodes, running, time.time())

    def _seen(self, now_s: float) -> list[Seen]:
        """Return the jobs that wait or run, and those that were told to and are over."""
        wanted: dict[str, Any] = {}
        found: list[tuple[RayJob, Entry | None]] = []
        for job in self._jobs.values():
            if job.state.is_over and (job.external_id not in self._sent or self._sent[job.external_id].state.is_over):
                continue
            entry = self._entries[job.number][0] if job.number in self._entries else None
            if entry is None and now_s - self._began_s < FIRST_ASKS_S:
                continue
            if not job.state.is_over:
                holds = self._holdings.gpus.get(job.driver, {}) if entry is None else entry.nodes
                if entry is None or entry.is_running:
                    wanted[job.external_id] = {node: gpus for node, gpus in holds.items() if gpus}
            found.append((job, entry))
        self._devices = devices_of(wanted, self._nodes, self._devices)
        return [Seen(job, entry, self._devices.get(job.external_id)) for job, entry in found]

    def _report_of(self, seen: Seen) -> EngineJob | None:
        name = seen.job.external_id
        if seen.entry is None and seen.job.state.is_over:
            return self._over(name, seen.job)
        return report_of(seen, self._decisions.get(name), self._settings)

    async def _cancel(self) -> None:
        """Have Ray stop what is cancelled here."""
        if self._settings.mode is not EngineMode.CONTROL:
            return
        for number, job in self._jobs.items():
            decision = self._decisions.get(job.external_id)
            if decision is None or decision.action is not EngineAction.CANCEL or job.state.is_over:
                continue
            entry = self._entries.get(number)
            if job.submission and entry is not None and entry[0].steer:
                try:
                    await self._head.stop(job.submission)
                    log.info("ray.stopped", job=number)
                except RaySilentError as error:
                    log.error("ray.silent", error=str(error))

    async def _report(self, reports: dict[str, EngineJob], now_s: float, *, fresh: bool) -> None:
        """Tell the control plane what has changed, in reports of limited size; what it has not taken is told again."""
        changed = [report for name, report in reports.items() if self._sent.get(name) != report]
        for at in range(0, len(changed), MAX_JOBS_OF_A_REPORT):
            part = changed[at : at + MAX_JOBS_OF_A_REPORT]
            await self._say(self._report_with(jobs=part))
            self._sent |= {report.external_id: report for report in part}
        fields: dict[str, Any] = {"nodes": nodes_of(self._nodes, self._settings)} if fresh or not self._told else {}
        if asks := now_s - self._present_at_s >= PRESENT_EVERY_S and now_s - self._began_s >= FIRST_ASKS_S:
            fields["present"] = [name for name, report in reports.items() if not report.state.is_over]
        reply = await self._say(self._report_with(wants_decisions=not self._told, **fields))
        self._told = True
        if fresh:
            self._nodes_at_s = now_s
        if asks:
            self._present_at_s = now_s
            await self._look_for(reply.unreported, now_s)
        self._forget()

    async def _look_for(self, unreported: Sequence[str], now_s: float) -> None:
        """Say how jobs ended of which no report speaks: as Ray remembers it, or that nobody knows."""
        self._gone_since_s = {name: self._gone_since_s.get(name, now_s) for name in unreported}
        known = {job.external_id: job for job in self._jobs.values()}
        over: list[EngineJob] = []
        for name, since_s in self._gone_since_s.items():
            if (job := known.get(name)) is None:
                is_over = now_s - since_s >= self._settings.missing_after_s
            else:  # the entry point of one that lives may not have asked this process yet
                is_over = job.state.is_over or (name in self._sent and self._sent[name].why_not == NOT_OURS)
            if is_over:
                over.append(self._over(name, job))
        if unreported:
            self._present_at_s = -1e9  # until it is known what became of them
        if over:
            log.warning("ray.jobs_gone", jobs=len(over))
            await self._say(self._report_with(jobs=over[:MAX_JOBS_OF_A_REPORT]))
            self._sent |= {report.external_id: report for report in over}

    def _over(self, name: str, job: RayJob | None) -> EngineJob:
        """Return the report of a job that neither waits nor runs any more; one that lives holds no GPUs any more."""
        state, detail = EngineJobState.MISSING, ""
        if job is not None:
            state, detail = job.state, job.message if job.state is not EngineJobState.SUCCEEDED else ""
        if not state.is_over:
            state, detail = EngineJobState.SUCCEEDED, "It holds no GPUs any more."
        known = self._sent.get(name) or EngineJob(
            external_id=name,
            number=name[:100],
            name="",
            user="",
            state=state,
            steered=False,
            gpus=1,
            submitted_at=job.submitted_at if job else utc_now(),
        )
        ended = {"ended_at": job.ended_at, "exit_code": job.exit_code} if job else {}
        return known.model_copy(update={"state": state, "shares": [], "detail": detail, **ended})

    def _forget(self) -> None:
        """Forget jobs that Ray has forgotten and that were told to be over."""
        names = {job.external_id for job in self._jobs.values()} | set(self._gone_since_s)
        for name in [name for name, report in self._sent.items() if report.state.is_over]:
            self._decisions.pop(name, None)
            if name not in names:
                del self._sent[name]

    async def _complain(self, problem: str) -> None:
        if problem != self._problem:
            log.error("ray.silent", error=problem)
        self._problem = problem
        await self._say(
            EngineReport(boot_id=self._boot_id, kind="ray", mode=self._settings.mode, problem=problem[:500])
        )

    def _report_with(self, **fields: Any) -> EngineReport:
        return EngineReport(
            boot_id=self._boot_id,
            kind="ray",
            version=self._version,
            mode=self._settings.mode,
            zone=self._settings.own_zone,
            **fields,
        )

    async def _say(self, report: EngineReport) -> EngineReply:
        reply = await self._control_plane.call("engine", report, EngineReply, 30.0)
        self._heard_at_s = time.monotonic()
        self.take(reply.decisions)
        return reply
