"""The part of the bridge that nominates MultiKueue's worker clusters, running in the manager cluster.

No state is stored: after a restart, the time of nominated clusters starts again.
"""

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from services.contracts.engines import EngineMode, ZoneOutlook
from services.engines.kueue import dispatching
from services.engines.kueue.cluster import Cluster
from services.engines.kueue.reading import Json, as_dict, name_of
from services.engines.kueue.settings import KueueSettings
from services.kit.ids import utc_now
from services.kit.logging import Log
from services.kit.metrics import counter

log = Log(__name__)

NOMINATIONS = counter(
    "wattshift_kueue_nominations_total",
    "Workloads for which a first worker cluster was picked, or would have been in a dry run.",
    ["cluster", "mode"],
)


class Dispatcher:
    """Nominates clusters for the workloads of one manager cluster."""

    def __init__(self, settings: KueueSettings, cluster: Cluster) -> None:
        self._settings = settings
        self._cluster = cluster
        self._documents: dict[str, Json] = {}
        self._clusters: dict[str, tuple[dispatching.WorkerCluster, ...]] = {}
        self._outlooks: dict[str, ZoneOutlook] | None = None
        self._asked_at_s = -1e9
        self._since_s: dict[str, tuple[tuple[str, ...], float]] = {}

    def take_event(self, kind: str, found: Any) -> None:
        """Take in an event of a workload; ``ALL`` replaces all workloads."""
        if kind == "ALL":
            self._documents = {_uid(each): each for each in found}
        elif kind == "DELETED":
            self._documents.pop(_uid(found), None)
        else:
            self._documents[_uid(found)] = found

    async def read(self, checks: Sequence[Json]) -> None:
        lists = [await self._cluster.listed(kind) for kind in ("multikueueconfigs", "multikueueclusters")]
        self._clusters = dispatching.worker_clusters_of(checks, *lists)

    def zones_to_ask(self) -> list[str]:
        """Return the zones whose outlooks should be requested now; none if it is too early."""
        if time.monotonic() - self._asked_at_s < self._settings.outlook_interval_s:
            return []
        return sorted({each.zone for clusters in self._clusters.values() for each in clusters if each.zone})[:100]

    def take_outlooks(self, outlooks: Iterable[ZoneOutlook]) -> None:
        self._outlooks = {each.zone: each for each in outlooks}
        self._asked_at_s = time.monotonic()

    async def look(self, *, heard: bool) -> int:
        """Make the nominations that are due; return how many workloads were changed."""
        if heard and self._outlooks is None and self.zones_to_ask():
            return 0  # they are asked for with this very look
        read = partial(dispatching.nominee_of, checks=self._clusters, resource=self._settings.resource)
        nominees = [each for each in map(read, self._documents.values()) if each is not None]
        loads = dispatching.loads_of(nominees)
        self._since_s = {uid: since for uid, since in self._since_s.items() if uid in self._documents}
        written = 0
        for each in sorted(nominees, key=lambda each: (each.namespace, each.name)):
            written += await self._nominate(each, loads, steers=heard and self._settings.mode is EngineMode.CONTROL)
        return written

    async def _nominate(self, nominee: dispatching.Nominee, loads: dict[str, int], *, steers: bool) -> bool:
        settings, now_s, clusters = self._settings, utc_now().timestamp(), self._clusters.get(nominee.check, ())
        waited = self._waited_s(nominee) >= settings.dispatch_wait_s
        if not nominee.waits:
            return False
        ranked = dispatching.ranking(nominee, clusters, self._outlooks or {}, loads, settings, now_s)
        wanted = dispatching.nomination_of(nominee, ranked, steers=steers, waited=waited)
        if wanted is None or not await self._cluster.nominate(wanted):
            return False
        for name in set(wanted.clusters) - set(nominee.nominated):
            loads[name] = loads.get(name, 0) + (nominee.gpus or nominee.pods)
        if not nominee.nominated and not nominee.left_alone:
            first, grams = ranked[0]
            NOMINATIONS.labels(first.name, settings.mode.value).inc()
            log.info(
                "kueue.nominated" if steers else "kueue.would_nominate",
                workload=f"{nominee.namespace}/{nominee.name}",
                cluster=first.name,
                gco2=None if grams is None else round(grams),
            )
        return True

    def _waited_s(self, nominee: dispatching.Nominee) -> float:
        """Return how long a workload has been nominated for exactly its present clusters."""
        now_s = time.monotonic()
        names, since_s = self._since_s.get(nominee.uid, ((), now_s))
        if names != nominee.nominated or not nominee.waits:
            names, since_s = nominee.nominated, now_s
        self._since_s[nominee.uid] = names, since_s
        return now_s - since_s


def _uid(document: Json) -> str:
    meta = as_dict(document.get("metadata"))
    return str(meta.get("uid") or f"{meta.get('namespace')}/{name_of(document)}")
