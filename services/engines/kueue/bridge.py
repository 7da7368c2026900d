"""The loop: watch workloads, tell the control plane what has changed, and answer Kueue's checks as is decided.

Nothing has to survive this process: answers are in Kueue's own objects, and decisions are repeated to a bridge that
starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from typing import Any

from services.contracts.engines import (
    MAX_JOBS_OF_A_REPORT,
    EngineDecision,
    EngineJob,
    EngineJobState,
    EngineReply,
    EngineReport,
)
from services.engines.kueue.cluster import Cluster, ClusterSilentError
from services.engines.kueue.dispatcher import Dispatcher
from services.engines.kueue.reading import Queues, Workload, queues_of, workload_of
from services.engines.kueue.settings import KueueSettings
from services.engines.kueue.steering import Slot, changes_of, nodes_of, report_of, slots_of
from services.kit.control_plane import ControlPlane
from services.kit.ids import utc_now
from services.kit.logging import Log
from services.kit.problems import ProblemError
from services.kit.tasks import end_tasks

log = Log(__name__)

PRESENT_EVERY_S = 30.0
"""How often all workloads are named, so that those that were deleted meanwhile are noticed."""
_AGAIN_S = 1.0


class Bridge:
    """One cluster and the control plane; without one, all workloads are admitted."""

    def __init__(self, settings: KueueSettings, cluster: Cluster, control_plane: ControlPlane | None) -> None:
        self._settings = settings
        self._cluster = cluster
        self._control_plane = control_plane
        self._boot_id = secrets.token_hex(8)
        self._workloads: dict[str, Workload] = {}
        self._queues = Queues()
        self._decisions: dict[str, EngineDecision] = {}
        self._slots: dict[str, list[Slot]] = {}
        self._sent: dict[str, EngineJob] = {}
        self._dispatcher = Dispatcher(settings, cluster) if settings.dispatch else None
        self._listed = asyncio.Event()
        self._woken = asyncio.Event()
        self._queues_at_s = self._present_at_s = -1e9
        self._heard_at_s = time.monotonic()
        self._told = False
        self._problem: str | None = None

    def take(self, decisions: Sequence[EngineDecision]) -> None:
        """Take decisions; of two on a job the newer one is in force."""
        for decision in decisions:
            known = self._decisions.get(decision.external_id)
            if known is None or known.revision < decision.revision:
                self._decisions[decision.external_id] = decision
        self._woken.set()

    async def run(self) -> None:
        """Look until cancelled."""
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                self._woken.clear()
                try:
                    await self.look()
                except (ClusterSilentError, TimeoutError) as error:
                    await self._complain(str(error) or "Its workloads could not be listed.")
                except ProblemError as error:
                    log.warning("control_plane.silent", error=error.detail)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.interval_s):
                        await self._woken.wait()
        finally:
            await end_tasks([watching])

    async def look(self) -> int:
        """Look once; return how many workloads were changed.

        Raises:
            ClusterSilentError: The API server does not answer.
            ProblemError: The control plane does not answer, or refuses; Kueue has its answers by then.
        """
        async with asyncio.timeout(30):
            await self._listed.wait()
        await self._read_queues()
        written = await self._answer()
        if self._dispatcher is not None:
            written += await self._dispatcher.look(heard=self._is_heard())
        self._problem = None
        if self._control_plane is not None:
            await self._cluster.renew_lease()
            await self._report()
        return written

    async def _watch(self) -> None:
        while True:
            try:
                async for kind, found in self._cluster.watched("workloads"):
                    self._take_event(kind, found)
            except ClusterSilentError as error:
                log.warning("kueue.silent", error=str(error))
            except Exception:  # whatever was answered, it is listed anew
                log.exception("watch.failed")
            await asyncio.sleep(_AGAIN_S)  # after an end without an error, too: it may come at once each time

    def _take_event(self, kind: str, found: Any) -> None:
        resource = self._settings.resource
        if self._dispatcher is not None:
            self._dispatcher.take_event(kind, found)
        if kind == "ALL":
            read = [workload_of(each, resource) for each in found]
            self._workloads = {each.uid: each for each in read if each is not None}
            self._listed.set()
        elif kind == "DELETED":
            self._workloads.pop(str(found.get("metadata", {}).get("uid")), None)
            self._present_at_s = -1e9
        elif (workload := workload_of(found, resource)) is not None:
            self._workloads[workload.uid] = workload
        self._woken.set()

    async def _read_queues(self) -> None:
        now_s = time.monotonic()
        if now_s - self._queues_at_s < self._settings.queues_interval_s:
            return
        kinds = ("clusterqueues", "localqueues", "resourceflavors", "admissionchecks")
        found = [await self._cluster.listed(kind) for kind in kinds]
        if self._dispatcher is not None:
            await self._dispatcher.read(found[3])
        self._queues = queues_of(found[0], found[1], found[2], found[3], self._settings)
        for check in found[3]:
            if check["metadata"]["name"] in self._queues.checks and self._control_plane is not None:
                await self._cluster.acknowledge(check)
        self._queues_at_s = now_s
        self._told = False

    def _live(self) -> list[Workload]:
        return [each for each in self._workloads.values() if not each.state.is_over]

    def _is_heard(self) -> bool:
        silent_s = time.monotonic() - self._heard_at_s
        return self._control_plane is not None and silent_s < self._settings.silence_s

    async def _answer(self) -> int:
        now = utc_now()
        changes = changes_of(self._live(), self._queues, self._decisions, self._settings, now, heard=self._is_heard())
        written = 0
        for change in changes:
            # One that is another by now comes again, by the watch, and is compared anew.
            written += await self._cluster.write(change)
        if written:
            log.info("kueue.changed", workloads=written, conflicts=len(changes) - written)
        return written

    async def _report(self) -> None:
        """Tell the control plane what has changed, in reports of limited size; what it has not taken is told again."""
        live = self._live()
        self._slots = slots_of(live, self._queues, self._slots)
        reports = {
            each.uid: report_of(
                each, self._queues, self._decisions.get(each.uid), self._slots.get(each.uid, ()), self._settings
            )
            for each in self._workloads.values()
            if not each.state.is_over or each.uid in self._sent
        }
        changed = [report for uid, report in reports.items() if self._sent.get(uid) != report]
        for at in range(0, len(changed), MAX_JOBS_OF_A_REPORT):
            part = changed[at : at + MAX_JOBS_OF_A_REPORT]
            await self._say(self._report_with(jobs=part))
            self._sent |= {report.external_id: report for report in part}
        now_s = time.monotonic()
        fields: dict[str, Any] = {} if self._told else {"nodes": nodes_of(self._queues, self._settings)}
        if self._dispatcher is not None:
            fields["wants_outlooks"] = self._dispatcher.zones_to_ask()
        if asks := now_s - self._present_at_s >= PRESENT_EVERY_S:
            fields["present"] = [each.uid for each in live]
        reply = await self._say(self._report_with(wants_decisions=not self._told, **fields))
        self._told = True
        if asks:
            self._present_at_s = now_s
            await self._end_deleted(reply.unreported)
        self._forget()

    async def _end_deleted(self, unreported: Sequence[str]) -> None:
        """Say of workloads that are no more how they ended: as Kueue had it last, or by their deletion."""
        over: list[EngineJob] = []
        for uid in unreported:
            if (workload := self._workloads.get(uid)) is not None:
                over.append(report_of(workload, self._queues, None, (), self._settings))
            elif (known := self._sent.pop(uid, None)) is not None:
                gone = {"state": EngineJobState.CANCELLED, "shares": [], "detail": "Its workload was deleted."}
                over.append(known.model_copy(update=gone))
            else:
                over.append(
                    EngineJob(
                        external_id=uid,
                        number=uid,
                        name="",
                        user="",
                        state=EngineJobState.MISSING,
                        steered=False,
                        gpus=1,
                        submitted_at=utc_now(),
                    )
                )
        if over:
            await self._say(self._report_with(jobs=over[:MAX_JOBS_OF_A_REPORT]))

    def _forget(self) -> None:
        for known in (self._decisions, self._sent):
            for uid in [uid for uid in known if uid not in self._workloads]:
                if known is self._decisions or self._sent[uid].state.is_over:
                    del known[uid]

    async def _complain(self, problem: str) -> None:
        if problem != self._problem:
            log.error("kueue.silent", error=problem)
        self._problem = problem
        if self._control_plane is not None:
            with contextlib.suppress(ProblemError):
                await self._say(
                    EngineReport(boot_id=self._boot_id, kind="kueue", mode=self._settings.mode, problem=problem[:500])
                )

    def _report_with(self, **fields: Any) -> EngineReport:
        return EngineReport(
            boot_id=self._boot_id,
            kind="kueue",
            version=self._cluster.version,
            mode=self._settings.mode,
            queues=sorted(self._queues.checked),
            zone=self._settings.own_zone,
            **fields,
        )

    async def _say(self, report: EngineReport) -> EngineReply:
        assert self._control_plane is not None
        reply = await self._control_plane.call("engine", report, EngineReply, 30.0)
        self._heard_at_s = time.monotonic()
        if self._dispatcher is not None and report.wants_outlooks:
            self._dispatcher.take_outlooks(reply.outlooks)
        self.take(reply.decisions)
        return reply
