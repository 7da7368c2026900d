"""Watches Ray, reports changes to the control plane, and tells jobs that ask what to do.

Nothing has to survive this process: jobs' entry points state their own state whenever they ask, and one that gets no
answer starts its command by itself.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from services.contracts.engines import EngineAction, EngineDecision, EngineJob, EngineJobState, EngineMode
from services.engines.ray.entries import Entry, Told, listening
from services.engines.ray.head import Head
from services.engines.ray.reading import RayJob, RayNode
from services.engines.ray.settings import RaySettings
from services.engines.ray.steering import NOT_OURS, Seen, devices_of, nodes_of, report_of, told_of
from services.kit.bridges.energy import ModelledEnergy
from services.kit.bridges.silent import EngineSilentError
from services.kit.bridges.talk import Talk
from services.kit.control_plane import ControlPlane
from services.kit.logging import Log

log = Log(__name__)

FIRST_ASKS_S = 15.0
"""For how long after a bridge's start a job that has not asked yet may still be one of ``wattshift.ray``."""


class Bridge:
    """One Ray cluster and the control plane."""

    def __init__(self, settings: RaySettings, head: Head, control_plane: ControlPlane) -> None:
        self._settings = settings
        self._head = head
        self._control_plane = control_plane
        self._talk = Talk("ray", settings, control_plane)
        self._jobs: dict[str, RayJob] = {}
        self._nodes: list[RayNode] = []
        self._holdings: Mapping[str, Mapping[str, float]] = {}
        self._entries: dict[str, tuple[Entry, float]] = {}
        self._devices: dict[str, dict[str, list[int]]] = {}
        self._began_s = time.monotonic()
        self._nodes_at_s = -1e9
        self._energy = ModelledEnergy(settings.energy_interval_s)

    def take(self, decisions: Sequence[EngineDecision]) -> None:
        self._talk.take(decisions)

    def told(self, submission: str, entry: Entry) -> Told:
        """Record the state of a job's entry point, and return what it should do."""
        now_s = time.monotonic()
        before = self._entries.get(submission)
        self._entries[submission] = entry, now_s
        if before is None or before[0] != entry:
            self._talk.woken.set()
        job = self._jobs.get(submission)
        decision = self._talk.decisions.get(job.external_id) if job else None
        zones = {node.zone for node in self._nodes if node.zone}
        return told_of(entry, decision, self._settings, zones, len(self._entries), heard=self._talk.is_heard)

    async def run(self) -> None:
        """Repeat ``look``, and answer entry points, until cancelled."""
        async with listening(self._settings.listen_address, self.told):
            await self._talk.keep_looking(self.look)

    async def look(self) -> None:
        """Look once; ``EngineSilentError`` if Ray, ``ProblemError`` if the control plane does not answer."""
        now_s, version = time.monotonic(), self._talk.version
        self._talk.version = ""  # it may be another one when it answers again
        version = version or await self._head.version()
        if fresh := now_s - self._nodes_at_s >= self._settings.nodes_interval_s:
            self._nodes = await self._head.nodes()
        self._holdings = await self._head.holdings()
        jobs, self._talk.version = await self._head.jobs(), version
        self._jobs = {job.number: job for job in sorted(jobs, key=lambda job: job.submitted_at)}
        self._entries = {
            name: (entry, asked_s)
            for name, (entry, asked_s) in self._entries.items()
            if name in self._jobs or now_s - asked_s < self._settings.missing_after_s
        }
        await self._cancel()
        seen = self._seen(now_s)
        reports = {
            each.job.external_id: self._talk.said(each.job.external_id, partial(self._report_of, each)) for each in seen
        }
        await self._report({name: report for name, report in reports.items() if report is not None}, now_s, fresh=fresh)
        if self._settings.energy:
            running = [each for each in self._talk.sent.values() if each.shares]
            await self._energy.book(self._control_plane, nodes_of(self._nodes, self._settings), running, time.time())

    def _seen(self, now_s: float) -> list[Seen]:
        """Return the jobs that wait or run, and those reported as such that are now over."""
        wanted: dict[str, Any] = {}
        found: list[tuple[RayJob, Entry | None]] = []
        for job in self._jobs.values():
            told = self._talk.sent.get(job.external_id)
            if job.state.is_over and (told is None or told.state.is_over):
                continue
            entry = self._entries[job.number][0] if job.number in self._entries else None
            if entry is None and now_s - self._began_s < FIRST_ASKS_S:
                continue
            if not job.state.is_over:
                holds = self._holdings.get(job.driver, {}) if entry is None else entry.nodes
                if entry is None or entry.is_running:
                    wanted[job.external_id] = {node: gpus for node, gpus in holds.items() if gpus}
            found.append((job, entry))
        self._devices = devices_of(wanted, self._nodes, self._devices)
        return [Seen(job, entry, self._devices.get(job.external_id)) for job, entry in found]

    def _report_of(self, seen: Seen) -> EngineJob | None:
        name = seen.job.external_id
        if seen.entry is None and seen.job.state.is_over:
            return self._over(name, seen.job)
        return report_of(seen, self._talk.decisions.get(name), self._settings)

    async def _cancel(self) -> None:
        """Have Ray stop the jobs that were cancelled here."""
        if self._settings.mode is not EngineMode.CONTROL:
            return
        for number, job in self._jobs.items():
            decision = self._talk.decisions.get(job.external_id)
            if decision is None or decision.action is not EngineAction.CANCEL or job.state.is_over:
                continue
            entry = self._entries.get(number)
            if job.submission and entry is not None and entry[0].steer:
                try:
                    await self._head.stop(job.submission)
                    log.info("ray.stopped", job=number)
                except EngineSilentError as error:
                    log.error("ray.silent", error=str(error))

    async def _report(self, reports: dict[str, EngineJob], now_s: float, *, fresh: bool) -> None:
        """Report changes to the control plane, in reports of limited size; what it has not taken is repeated."""
        await self._talk.tell(reports)
        live = [name for name, report in reports.items() if not report.state.is_over]
        reply = await self._talk.tell_all(
            nodes_of(self._nodes, self._settings) if fresh or not self._talk.is_known else None,
            live if now_s - self._began_s >= FIRST_ASKS_S else None,
        )
        if fresh:
            self._nodes_at_s = now_s
        await self._look_for(reply.unreported)
        self._talk.forget({job.external_id for job in self._jobs.values()})

    async def _look_for(self, unreported: Sequence[str]) -> None:
        """Report how jobs ended that no report covers: as Ray remembers it, or as unknown."""
        known = {job.external_id: job for job in self._jobs.values()}
        over: list[EngineJob] = []
        for name, gone_s in self._talk.gone_for_s(unreported).items():
            if (job := known.get(name)) is None:
                is_over = gone_s >= self._settings.missing_after_s
            else:  # the entry point of one that lives may not have asked this process yet
                is_over = job.state.is_over or (name in self._talk.sent and self._talk.sent[name].why_not == NOT_OURS)
            if is_over:
                over.append(self._over(name, job))
        await self._talk.tell_ends(over)

    def _over(self, name: str, job: RayJob | None) -> EngineJob:
        """Return the report of a job that no longer waits or runs; one that is still alive has given up its GPUs."""
        state, detail = EngineJobState.MISSING, ""
        if job is not None:
            state, detail = job.state, job.message if job.state is not EngineJobState.SUCCEEDED else ""
        if not state.is_over:
            state, detail = EngineJobState.SUCCEEDED, "It holds no GPUs any more."
        ended = {"ended_at": job.ended_at, "exit_code": job.exit_code} if job else {}
        submitted_at = job.submitted_at if job else None
        return self._talk.ended(name, state, number=name, submitted_at=submitted_at, detail=detail, **ended)
