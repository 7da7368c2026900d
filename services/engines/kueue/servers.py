"""Keeps the pods of inference pools registered as endpoints: ``python -m services.engines.kueue.servers``.

Beside the router as endpoint picker, this is all that a gateway needs: who serves which model, and which of them are
ready. It holds a key of an operator and speaks the public API; what it registers begins with its cluster's name and a
dot, so that it knows its own again after a restart, and touches nothing else.
"""

import asyncio
import contextlib
import time
from http import HTTPStatus
from pathlib import Path

import aiohttp
import orjson
from pydantic import Field, ValidationError

from services.contracts.clusters import ClusterOrders, ClusterReport, WorkloadName, WorkloadOrder, WorkloadReport
from services.contracts.routing import EndpointList, EndpointSpec
from services.contracts.schema import Name, said
from services.engines.kueue.cluster import Cluster, RefusedError
from services.engines.kueue.inference import PREFIX, PodServer, models_in, servers_of
from services.engines.kueue.reading import Json
from services.engines.kueue.scaling import COST, change_of, marks_of, report_of
from services.engines.kueue.settings import KueueSettings
from services.kit.bridges.figures import shown_at
from services.kit.http import ServiceClient, new_session
from services.kit.logging import Log, configure_logging
from services.kit.metrics import Metrics
from services.kit.problems import ProblemError
from services.kit.repeating import repeat
from services.kit.settings import settings_or_exit
from services.kit.text import visible

log = Log(__name__)

PAGE, MOST_BYTES = 200, 1024 * 1024
ASK_S = 3.0  #: For a server to say which models it has
KNOWN_S = 60.0  #: How long what is registered counts as known: others may change it


class ServersSettings(KueueSettings):
    """`ENGINE_KUEUE_...` of the bridge, as far as they are of use here, and these."""

    control_plane_url: str = said("The installation's gateway.", default="http://127.0.0.1:8000")
    key_file: Path = Field(description="File with the API key of an operator of the tenant whose servers they are.")
    namespace: str = Field("default", description="Where the inference pools are.")
    location: Name | None = Field(None, description="Where the servers are; by default the cluster's name.")
    scales: list[WorkloadName] = said(
        'Workloads whose replicas pools\' plans may set, as JSON: `[{"kind": "Deployment", "name": "llama"}]`.',
        default_factory=list[WorkloadName],
    )


class Registrar:
    """Compares what is registered with the pods that there are."""

    def __init__(self, settings: ServersSettings, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self._settings, self._cluster, self._session = settings, cluster, session
        self._gateway = ServiceClient(session, settings.control_plane_url, "The control plane", timeout_s=10)
        self._registered: dict[str, EndpointSpec] | None = None
        self._read_at_s = 0.0
        self._refused: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    async def look(self) -> None:
        """Register new pods, drain those that end, and remove what is gone; what one of them lacks stops no other.

        Raises:
            EngineSilentError: The API server does not answer; nothing was changed.
            ProblemError: The control plane does not answer, or does not accept the key.
            OSError: The key cannot be read.
        """
        settings = self._settings
        headers = {"authorization": f"Bearer {settings.key_file.read_text().strip()}"}
        instances = await self._scale(headers) if settings.scales else []
        servers: list[PodServer] = []
        are_known = True
        for pool, pods in await self._cluster.inference(settings.namespace):
            try:
                others = [pod for pod in pods if pod["metadata"]["name"] not in instances]
                servers += servers_of(settings.node_id, pool, others)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                are_known = False
                self._refuse(str(pool.get("metadata")), f"its pool cannot be read: {error!r}")
        known, self._registered = self._registered, None  # it is read again after a write whose outcome is not known
        if known is None or time.monotonic() >= self._read_at_s + KNOWN_S:
            known, self._read_at_s = await self._own(headers), time.monotonic()
        specs = await asyncio.gather(*(self._spec(server, known.get(server.name)) for server in servers))
        for server, spec in zip(servers, specs, strict=True):
            if spec is not None and known.get(server.name) != spec and await self._put(server.name, spec, headers):
                known[server.name] = spec
        for name in known.keys() - {each.name for each in servers} if are_known else ():
            try:
                await self._gateway.request("DELETE", f"/v1/endpoints/{name}", headers=headers)
            except ProblemError as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
            del known[name]
            log.info("server.removed", endpoint=name)
        self._registered = known
        if are_known:
            there = {each.name for each in servers}
            self._refused = {name: why for name, why in self._refused.items() if name in there}

    async def _scale(self, headers: dict[str, str]) -> list[str]:
        """Report the workloads that may be scaled, and scale them as ordered; return the pods that are instances."""
        found: dict[str, tuple[WorkloadReport, Json | None, list[Json]]] = {}
        scalers = await self._cluster.autoscalers(self._settings.namespace)
        for each in self._settings.scales:
            try:
                workload, pods = await self._cluster.workload(self._settings.namespace, each)
                found[str(each)] = report_of(each, workload, pods, scalers), workload, pods
            except (RefusedError, KeyError, TypeError, ValueError, AttributeError) as error:
                self._fail(each, error)
        orders = await self._gateway.call(
            *("POST", f"/v1/clusters/{self._settings.node_id}/workloads", ClusterOrders),
            body=ClusterReport(workloads=[report for report, _, _ in found.values()]),
            headers=headers,
        )
        for order in orders.workloads:
            report, workload, pods = found[str(order)]
            try:
                if workload is not None:
                    await self._carry_out(order, report, workload, pods)
                    self._failed.pop(str(order), None)
            except RefusedError as error:
                self._fail(order, error)
        return orders.instances

    async def _carry_out(self, order: WorkloadOrder, report: WorkloadReport, workload: Json, pods: list[Json]) -> None:
        namespace = self._settings.namespace
        if order.kind == "Deployment" and not report.left_alone:
            for pod, mark in marks_of(pods, order.leave).items():
                await self._cluster.annotate_pod(namespace, pod, {COST: mark})
        change = change_of(workload, order, report)
        if change is not None and await self._cluster.change_workload(namespace, order, change):
            count = change["spec"]["replicas"]
            log.info("workload.scaled", workload=str(order), before=report.replicas, replicas=count)

    def _fail(self, workload: WorkloadName, error: Exception) -> None:
        """Say once why a workload cannot be read or scaled."""
        if self._failed.get(str(workload)) != repr(error):
            self._failed[str(workload)] = repr(error)
            log.error("workload.not_scaled", workload=str(workload), why=visible(repr(error)))

    async def _own(self, headers: dict[str, str]) -> dict[str, EndpointSpec]:
        """Return what this cluster has registered so far."""
        found: dict[str, EndpointSpec] = {}
        cursor: str | None = ""
        while cursor is not None:
            params = {"limit": str(PAGE), **({"cursor": cursor} if cursor else {})}
            page = await self._gateway.call("GET", "/v1/endpoints", EndpointList, params=params, headers=headers)
            prefix = f"{self._settings.node_id}."
            found |= {each.name: each.spec for each in page.items if each.name.startswith(prefix)}
            cursor = page.next_cursor
        return found

    async def _spec(self, server: PodServer, known: EndpointSpec | None) -> EndpointSpec | None:
        """Return the endpoint that a server is to be; None as long as that is not known."""
        models: list[str] = []
        if "models" not in server.said:
            models = known.models if known is not None and known.url == server.url else await self._models_of(server)
            if not models:
                return None
        try:
            return server.spec(models, self._settings.location or self._settings.node_id, self._settings.own_zone)
        except ValidationError as error:
            first = error.errors()[0]
            self._refuse(server.name, f"{PREFIX}{'.'.join(map(str, first['loc'])).replace('_', '-')}: {first['msg']}")
            return None

    async def _models_of(self, server: PodServer) -> list[str]:
        """Ask a ready server which models it has; none if it does not say."""
        if not server.is_ready:
            return []
        try:
            timeout = aiohttp.ClientTimeout(total=ASK_S)
            async with self._session.get(f"{server.url}/v1/models", timeout=timeout) as answer:
                return models_in(orjson.loads(await answer.content.read(MOST_BYTES)))
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
            self._refuse(server.name, f"it does not say which models it has: {type(error).__name__}")
            return []

    async def _put(self, name: str, spec: EndpointSpec, headers: dict[str, str]) -> bool:
        try:
            await self._gateway.request("PUT", f"/v1/endpoints/{name}", body=spec, headers=headers)
        except ProblemError as error:
            if error.status not in (HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY):
                raise
            self._refuse(name, error.detail)
            return False
        self._refused.pop(name, None)
        log.info("server.registered", endpoint=name, url=spec.url, draining=spec.draining)
        return True

    def _refuse(self, name: str, why: str) -> None:
        """Say once why a server is not registered as it is."""
        if self._refused.get(name) != why:
            self._refused[name] = why
            log.warning("server.not_registered", endpoint=name, why=visible(why))


async def run(settings: ServersSettings) -> None:
    """Look again and again, until cancelled."""
    async with (
        Cluster.connected(settings) as cluster,
        new_session(tls=settings.tls) as session,
        shown_at(settings.metrics_address, Metrics()),
    ):
        registrar = Registrar(settings, cluster, session)
        await repeat(registrar.look, settings.interval_s, failed="servers.not_registered", once=True)


def main() -> None:
    settings = settings_or_exit(ServersSettings)
    configure_logging("engine_kueue_servers", log_format=settings.log_format, level=settings.log_level)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(settings))


if __name__ == "__main__":
    main()
