"""The router's composition root: ``python -m services.router.app``."""

import asyncio
import contextlib
import gc
import multiprocessing
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path

import aiohttp
import orjson
from starlette.types import Receive, Scope, Send

from services.contracts.identity import Role
from services.contracts.routing import RoutingTable
from services.contracts.streams import ROUTER_LIMITS_HASH
from services.kit import access, heads, traces, tracing
from services.kit.app import end_with_parent, say_what_is_trusted
from services.kit.edge.exchange import Exchange
from services.kit.edge.keys import keys_of
from services.kit.edge.shared_limits import LIMITS_S, SharedLimits
from services.kit.heads import ServerConfig
from services.kit.http import client_of, new_session
from services.kit.logging import Log, configure_logging
from services.kit.networks import read_networks
from services.kit.problems import ProblemError
from services.kit.pulse import EVERY_S, Pulse
from services.kit.redis import connect
from services.kit.repeating import repeat
from services.kit.settings import settings_or_exit
from services.kit.sockets import handed_over
from services.kit.tasks import end_tasks
from services.kit.tokens import outgoing
from services.router.answers import AnswerPasser, Outcomes
from services.router.apps.asked import is_apps
from services.router.apps.coordination import Coordinator
from services.router.apps.door import AppDoor
from services.router.apps.queue import Assigner
from services.router.dispatch import Dispatcher
from services.router.door import BatchDoor, Door, route_of
from services.router.expectations import Expectations
from services.router.fleet import Fleet
from services.router.gate import Gate
from services.router.kinds import KINDS
from services.router.lanes import LaneRules, Lanes
from services.router.latency import LatencyReporter
from services.router.metrics import Metrics, MetricsFolder
from services.router.openai import JSON, error_body
from services.router.outgoing import RequestWriter
from services.router.overview import Overview
from services.router.peers import Peers
from services.router.probes import Trials, probe, read_load
from services.router.reports import ObservationReporter, TrafficReporter, UsageReporter
from services.router.settings import RouterSettings
from services.router.stored_answers import StoredAnswers
from services.router.table import TableReader
from services.router.upstream import CHECK_S, Limits
from services.router.upstream_keys import UpstreamKeys

log = Log(__name__)

PEERS_S = 2.0
LATENCY_S = METRICS_S = 1.0
TRAFFIC_S = 5.0
USAGE_S = 10.0
REPORTS_S = 5.0  #: For the last reports of a process that ends
BACKLOG = 4_096
YOUNG = 10_000
"""Objects that a collection of garbage waits for: at Python's 700 it comes every dozen requests, for a tenth of their
time, and finds nothing but those that are under way."""
TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


class Router:
    """One router process; an ASGI app."""

    def __init__(
        self, settings: RouterSettings, name: str | None = None, shared_metrics: MetricsFolder | None = None
    ) -> None:
        """Take the folder for the metrics of processes that share the port; None for a process that is alone."""
        self.settings, self._shared_metrics = settings, shared_metrics
        self.name = name or f"router-{secrets.token_hex(4)}"
        self.metrics = Metrics()
        self.fleet = Fleet(read_networks(settings.endpoint_networks))
        self.assigner = Assigner(settings.max_queue, settings.queue_timeout_s)
        self.coordinator = Coordinator(self.name, settings.credential.peers_secret(), self.assigner, self.fleet)
        self.lanes = Lanes(LaneRules(settings.order, settings.placement, settings.max_queue, settings.preemptions))
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._stop_picking: Callable[[float], Awaitable[None]] | None = None

    async def start(self) -> None:
        """Connect to the other processes, load the last known table, and start the loops."""
        settings = self.settings
        session: aiohttp.ClientSession = await self._stack.enter_async_context(new_session(tls=settings.tls))
        serving = client_of(session, settings, "serving")
        telemetry = client_of(session, settings, "telemetry")
        redis = connect(settings.redis_url, settings)
        self._stack.push_async_callback(redis.aclose)
        keys = keys_of(client_of(session, settings, "admission", timeout_s=3), settings)
        self.traffic = TrafficReporter(serving, self.fleet, self.name)
        self.usage = UsageReporter(telemetry, self.name)
        self.latency = LatencyReporter(redis, self.fleet, self.lanes, self.name, self.metrics)
        self.observations = ObservationReporter(serving, self.name, self.assigner.waiting)
        self.peers = Peers(redis, self.fleet, self.coordinator, self.name, settings.workers)
        self.limits = Limits(
            settings.connect_timeout_s,
            settings.first_byte_timeout_s,
            settings.silence_timeout_s,
            settings.total_timeout_s,
        )
        self.expectations = Expectations()
        self.upstream_keys = UpstreamKeys(settings.keys_dir, serving)
        outcomes = Outcomes(self.expectations, self.metrics, self.latency, self.usage)
        writer = RequestWriter(settings.order, self.upstream_keys)
        self.trials = Trials(self.fleet, self.lanes, writer)
        self.gate = gate = Gate(settings, keys)
        stored = StoredAnswers(settings.credential.own_keys("stored answers"))
        dispatcher = Dispatcher(
            settings,
            self.fleet,
            self.lanes,
            gate.rules,
            self.expectations,
            self.upstream_keys,
            writer,
            AnswerPasser(outcomes, settings, stored),
            stored,
            self.metrics,
            self.traffic.arrived,
            self.limits,
        )
        known = ROUTER_LIMITS_HASH, gate.limiter, gate.at_once, self.name, self.coordinator.started_at_s
        self.shared_limits = SharedLimits(redis, *known, months=gate.months)
        self.overview = Overview(
            self.name, self.peers, self.fleet, self.lanes, self.assigner, self.coordinator, self.gate
        )
        batches = BatchDoor(session, settings.serving_url, outgoing(settings.credential, "serving"))
        self.door = Door(self.fleet, self.gate, dispatcher, batches, settings.flex_wait_s)
        self.app_door = AppDoor(
            settings,
            self.gate,
            self.fleet,
            self.coordinator,
            self.observations,
            self.metrics,
            self.limits,
            self.upstream_keys,
            self.usage,
        )
        await self.coordinator.listen(settings.peer_host)
        path = settings.data_dir / "router" / "table.json"
        self.table = TableReader(serving, path, self.name, self._adopt, self._draining)
        self.table.read_kept()
        loops: list[tuple[Callable[[], Awaitable[object]], float, str]] = [
            (self._look, settings.table_poll_s, "table.not_read"),
            (self._renew_keys, settings.table_poll_s, "keys.not_read"),
            (self._check, CHECK_S, "connections.not_checked"),
            (self.probe_servers, settings.probe_s, "servers.not_probed"),
            (self.peers.look, PEERS_S, "peers.not_read"),
            (self.shared_limits.look, LIMITS_S, "limits.not_shared"),
            (self.traffic.send, TRAFFIC_S, "traffic.not_reported"),
            (lambda: self.observations.send(self.fleet.apps), TRAFFIC_S, "observations.not_reported"),
            (self.usage.send, USAGE_S, "usage.not_reported"),
            (self._write_metrics, METRICS_S, "metrics.not_written"),
        ]
        self._tasks = [
            asyncio.create_task(repeat(work, every_s, failed=failed, once=True)) for work, every_s, failed in loops
        ]
        each_second = repeat(self.latency.send, LATENCY_S, failed="latency.not_sent", once=True, spread=0.0)
        self._tasks.append(asyncio.create_task(each_second))
        if settings.picker_port is not None:
            from services.router.picking.picker import Picker  # most routers do without its packages

            picker = Picker(access.AccessLog(self._answer), settings.picker_key_file)
            self.picker_port = await picker.start(settings.host, settings.picker_port, settings.tls)
            self._stop_picking = picker.stop
            self._stack.push_async_callback(picker.stop, 0)

    async def stop(self) -> None:
        """Finish requests for a while, send the remaining reports, and disconnect."""
        self.gate.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_s):
                if self._stop_picking is not None:
                    await self._stop_picking(self.settings.drain_s)
                await self.gate.is_empty.wait()
        await end_tasks(self._tasks)
        await self.trials.end()
        soon_s = time.time() + TRAFFIC_S
        reports = (
            self.traffic.send(soon_s),
            self.observations.send((), soon_s),
            self.usage.send(all_windows=True),
        )
        with contextlib.suppress(TimeoutError):  # at once: while serving is silent, telemetry hears what was used
            async with asyncio.timeout(REPORTS_S):
                await asyncio.gather(*reports, return_exceptions=True)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(1):
                await self.peers.leave()
        await self.shared_limits.leave()
        await self.coordinator.stop()
        for server in self.fleet.everyone():
            server.origin.close()
        await self._stack.aclose()

    def _adopt(self, table: RoutingTable) -> None:
        self.fleet.adopt(table, self.peers.processes)
        self.lanes.rearrange(self.fleet)
        self.expectations.keep(self.fleet.pools)
        self.assigner.adopt(table)

    def _draining(self) -> dict[str, int]:
        """Return the requests at draining servers and instances, including those that other processes sent."""
        found = self.fleet.draining()
        for name, held in self.assigner.draining().items():
            found[name] = max(held, found.get(name, 0))
        return found

    async def _look(self) -> None:
        await self.table.look()
        if self.table.is_empty:  # nobody can be routed, and what comes first takes longer to start
            await asyncio.sleep(4 * self.settings.table_poll_s)

    async def _renew_keys(self) -> None:
        await self.upstream_keys.renew((*self.fleet.servers.values(), *self.fleet.instances.values()))

    async def _check(self) -> None:
        now_s = time.monotonic()
        for server in self.fleet.everyone():
            server.origin.check(self.limits, now_s)
        self.assigner.check()
        self.trials.begin(self.limits, now_s)
        for lane in self.lanes.all():
            if len(lane.queue):  # a server may have been taken back
                lane.pump()
                lane.fail_waiting()

    async def probe_servers(self) -> None:
        """Probe all servers once, and note how fast they are."""
        self.upstream_keys.forget_files()
        servers = [each for each in self.fleet.servers.values() if each.is_ready]
        await asyncio.gather(*(probe(server, self.limits) for server in servers))
        await asyncio.gather(*(read_load(each) for each in servers if each.breaker.opened_s is None))
        for server in servers:
            server.costs.fade()
        for lane in self.lanes.all():
            lane.retime()
            lane.pump()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path.startswith("/v1/") or path in KINDS:
                await self._answer(scope, receive, send)
            elif is_apps(path):
                traces.name_request(scope["method"], "/apps/{app}")
                access.note_route("/apps/{app}")
                await self.app_door.handle(scope, receive, send)
            else:
                await self._page(path, Exchange.open(scope, receive, send))
        elif scope["type"] == "lifespan":
            await self._live(receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for models, whoever carries it."""
        traces.name_request(scope["method"], route := route_of(scope["path"]))
        access.note_route(route)
        await self.door.handle(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _page(self, path: str, exchange: Exchange) -> None:
        """Answer requests that are neither part of OpenAI's API nor an application's."""
        if path == "/healthz":
            await exchange.answer(200, [JSON], b'{"status":"ok"}')
        elif path == "/readyz":
            if self.table.is_known:
                await exchange.answer(200, [JSON], b'{"status":"ready"}')
            else:
                await exchange.answer(503, [JSON], b'{"status":"not ready","detail":"no routing table yet"}')
        elif path not in ("/metrics", "/status"):
            await exchange.answer(404, [JSON], error_body(404, "unknown_url", f"There is no {path[:200]}."))
        elif not await self._is_operator(exchange):
            return
        elif path == "/metrics":
            await self._show_metrics(exchange)
        else:
            await exchange.answer(200, [JSON], orjson.dumps(self.overview.status()))

    async def _is_operator(self, exchange: Exchange) -> bool:
        """Return whether the caller is an operator; refuse everybody else."""
        try:
            key = await self.gate.keys.caller(exchange.headers.get(b"authorization"), exchange.scope)
        except ProblemError as problem:
            await exchange.answer(problem.status, [JSON], error_body(problem.status, "unauthenticated", str(problem)))
            return False
        if not key.identity.role.includes(Role.OPERATOR):
            await exchange.answer(403, [JSON], error_body(403, "forbidden", "This is for operators."))
            return False
        return True

    async def _write_metrics(self) -> None:
        if self._shared_metrics is not None:
            self._shared_metrics.write(self.name, self.metrics, self.overview.gauges())

    async def _show_metrics(self, exchange: Exchange) -> None:
        metrics, gauges = self.metrics, self.overview.gauges()
        if self._shared_metrics is not None:
            try:
                await self._write_metrics()
                metrics, gauges = self._shared_metrics.read(gauges)
            except OSError as error:
                detail = f"The metrics of all processes cannot be added up: {error}"
                await exchange.answer(503, [JSON], error_body(503, "unavailable", detail))
                return
        text = "\n".join(metrics.lines(gauges)) + "\n"
        await exchange.answer(200, [TEXT], text.encode())


def listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """Return a listening socket; with ``shared``, the kernel spreads connections over all processes that have one."""
    is_v6 = ":" in host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    found = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared, dualstack_ipv6=is_v6)
    found.setblocking(False)
    return found


def server_config(router: Router) -> ServerConfig:
    """Return how a router is served.

    Unused connections are kept for longer than clients keep theirs (httpx: 5 s), so that none is closed under a
    request.
    """
    return ServerConfig(
        traces.traced(access.AccessLog(router)),
        lifespan="on",
        loop="auto",
        timeout_graceful_shutdown=max(1, int(router.settings.drain_s)),
        timeout_keep_alive=75,
        backlog=BACKLOG,
        server_header=False,
        proxy_headers=False,  # no client's address is read
        callback_notify=Pulse().beat_async,
        timeout_notify=int(EVERY_S),
        **router.settings.tls.server(),
    )


def run_worker(
    settings: RouterSettings, sockets: Sequence[socket.socket], name: str | None = None, metrics: Path | None = None
) -> None:
    """Run one router process until SIGTERM, on the given sockets or else on its own.

    With a name and a folder for metrics, it is one of several on a port.
    """
    configure_logging("router", log_format=settings.log_format, level=settings.log_level)
    end_with_parent()
    tracing.start("router", settings)
    listening = sockets or [listen(settings.host, settings.port, shared=settings.workers > 1)]
    say_what_is_trusted(settings, listening, settings.host, settings.port)
    router = Router(settings, name, None if metrics is None else MetricsFolder(metrics))
    if settings.picker_port is not None:
        import_module("services.router.picking.picker")
    gc.collect()
    gc.freeze()  # what is loaded by now stays: no collection looks through it again
    gc.set_threshold(YOUNG)
    heads.Server(server_config(router)).run(sockets=list(listening))
    traces.stop()


def main() -> None:
    """Run the router: one process, or as many as ``ROUTER_WORKERS`` says, each started again if it dies."""
    settings = settings_or_exit(RouterSettings)
    if settings.workers == 1:
        run_worker(settings, handed_over())
        return
    configure_logging("router", log_format=settings.log_format, level=settings.log_level)
    end_with_parent()
    supervise(settings)


def supervise(settings: RouterSettings) -> None:
    """Run the workers until SIGTERM."""
    sockets = handed_over()
    context = multiprocessing.get_context("spawn")
    is_ending = False

    def end(*_: object) -> None:
        nonlocal is_ending
        is_ending = True
        for worker in workers:
            if worker.is_alive():
                worker.terminate()

    path = settings.data_dir / "router" / f"metrics-{settings.port}"
    folder = MetricsFolder(path)
    try:
        folder.begin()
    except OSError as error:
        sys.exit(f"router: {path} cannot be written to, where its processes add up their metrics: {error}")

    def begin() -> BaseProcess:
        name = f"router-{secrets.token_hex(4)}"
        worker = context.Process(target=run_worker, args=(settings, sockets, name, path), name=name, daemon=True)
        worker.start()
        return worker

    workers: list[BaseProcess] = []
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    workers += [begin() for _ in range(settings.workers)]
    while not is_ending:
        for at, worker in enumerate(workers):
            worker.join(0.2)
            if not worker.is_alive() and not is_ending:
                log.error("worker.died", pid=worker.pid, exit_code=worker.exitcode)
                try:
                    folder.end(worker.name)
                except OSError as error:  # a full disk: what it counted is shown as before, with its last gauges
                    log.warning("metrics.not_added", process=worker.name, error=str(error))
                time.sleep(0.5)
                workers[at] = begin()
    for worker in workers:
        worker.join(settings.drain_s + 10)
    sys.exit(0)


if __name__ == "__main__":
    main()
