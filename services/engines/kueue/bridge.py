"""Watches workloads, reports changes to the control plane, and answers Kueue's checks as decided.

Nothing has to survive this process: answers are in Kueue's own objects.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from services.contracts.engines import EngineDecision, EngineJob, EngineJobState, EngineMode, EngineShare
from services.engines.kueue.cluster import Cluster
from services.engines.kueue.dispatcher import Dispatcher
from services.engines.kueue.reading import Queues, Workload, queues_of, workload_of
from services.engines.kueue.settings import KueueSettings
from services.engines.kueue.steering import Held, changes_of, devices_of, nodes_of, report_of, shares_of
from services.kit.bridges.silent import EngineSilentError
from services.kit.bridges.talk import Talk
from services.kit.control_plane import ControlPlane
from services.kit.ids import utc_now
from services.kit.logging import Log
from services.kit.tasks import end_tasks

log = Log(__name__)

_AGAIN_S = 1.0


class Bridge:
    """One cluster and the control plane; without a control plane, all workloads are admitted."""

    def __init__(self, settings: KueueSettings, cluster: Cluster, control_plane: ControlPlane | None) -> None:
        self._settings = settings
        self._cluster = cluster
        self._is_alone = control_plane is None
        self._talk = Talk("kueue", settings, control_plane)
        self._talk.orders = settings.order and settings.mode is EngineMode.CONTROL
        self._order: Sequence[str] = ()
        self._workloads: dict[str, Workload] = {}
        self._queues = Queues()
        self._held: Held = {}
        self._shares: dict[str, list[EngineShare]] = {}
        self._dispatcher = Dispatcher(settings, cluster) if settings.dispatch else None
        self._listed = asyncio.Event()
        self._queues_at_s = -1e9

    def take(self, decisions: Sequence[EngineDecision]) -> None:
        self._talk.take(decisions)

    async def run(self) -> None:
        watching = asyncio.create_task(self._watch())
        try:
            await self._talk.keep_looking(self.look)
        finally:
            await end_tasks([watching])

    async def look(self) -> int:
        """Look once; return how many workloads were changed.

        Raises:
            EngineSilentError: The API server does not answer.
            ProblemError: The control plane does not answer, or refuses; by then Kueue has its answers.
        """
        try:
            async with asyncio.timeout(30):
                await self._listed.wait()
        except TimeoutError:
            raise EngineSilentError("Its workloads could not be listed so far.") from None
        await self._read_queues()
        written = await self._answer()
        if self._dispatcher is not None:
            written += await self._dispatcher.look(heard=self._talk.is_heard)
        if not self._is_alone:
            await self._cluster.renew_lease()
            await self._report()
        return written

    async def _watch(self) -> None:
        while True:
            try:
                async for kind, found in self._cluster.watched("workloads"):
                    self._take_event(kind, found)
            except EngineSilentError as error:
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
            self._talk.ask_again()
        elif (workload := workload_of(found, resource)) is not None:
            self._workloads[workload.uid] = workload
        self._talk.woken.set()

    async def _read_queues(self) -> None:
        now_s = time.monotonic()
        if now_s - self._queues_at_s < self._settings.queues_interval_s:
            return
        kinds = ("clusterqueues", "localqueues", "resourceflavors", "admissionchecks")
        found = [await self._cluster.listed(kind) for kind in kinds]
        if self._dispatcher is not None:
            await self._dispatcher.read(found[3])
        self._queues = queues_of(found[0], found[1], found[2], found[3], self._settings)
        self._talk.queues, self._talk.version = sorted(self._queues.checked)[:1_000], self._cluster.version
        for check in found[3]:
            if check["metadata"]["name"] in self._queues.checks and not self._is_alone:
                await self._cluster.acknowledge(check)
        self._queues_at_s = now_s
        self._talk.is_known = False

    def _live(self) -> list[Workload]:
        return [each for each in self._workloads.values() if not each.state.is_over]

    async def _answer(self) -> int:
        now = utc_now()
        decisions, heard = self._talk.decisions, self._talk.is_heard
        order = self._order if self._talk.orders else ()
        changes = changes_of(self._live(), self._queues, decisions, self._settings, now, heard=heard, order=order)
        written = 0
        for change in changes:
            # One that is another by now comes again, by the watch, and is compared anew.
            written += await self._cluster.write(change)
        if written:
            log.info("kueue.changed", workloads=written, conflicts=len(changes) - written)
        return written

    async def _report(self) -> None:
        live, sent = self._live(), self._talk.sent
        self._held = devices_of(live, self._queues, self._held)
        self._shares = shares_of(self._held, self._queues)
        reports = {
            each.uid: self._talk.said(each.uid, partial(self._report_of, each))
            for each in self._workloads.values()
            if not each.state.is_over or each.uid in sent
        }
        await self._talk.tell({uid: report for uid, report in reports.items() if report is not None})
        nodes = None if self._talk.is_known else nodes_of(self._queues, self._settings)
        zones = [] if self._dispatcher is None else self._dispatcher.zones_to_ask()
        reply = await self._talk.tell_all(nodes, [each.uid for each in live], wants_outlooks=zones)
        self._order = reply.order
        if self._dispatcher is not None and zones:
            self._dispatcher.take_outlooks(reply.outlooks)
        await self._talk.tell_ends([self._over(uid) for uid in reply.unreported])
        self._talk.forget(self._workloads)

    def _report_of(self, workload: Workload) -> EngineJob:
        decision, shares = self._talk.decisions.get(workload.uid), self._shares.get(workload.uid, ())
        report = report_of(workload, self._queues, decision, shares)
        if decision is None or report.revision == decision.revision or not (why := self._cluster.refusal(workload.uid)):
            return report
        return report.model_copy(update={"revision": decision.revision, "refused": why})

    def _over(self, uid: str) -> EngineJob:
        """Return how a workload that no longer runs or waits ended: as Kueue last had it, or by its deletion."""
        if (workload := self._workloads.get(uid)) is not None:
            return report_of(workload, self._queues, None, ())
        if uid in self._talk.sent:
            return self._talk.ended(uid, EngineJobState.CANCELLED, number=uid, detail="Its workload was deleted.")
        return self._talk.ended(uid, EngineJobState.MISSING, number=uid)
