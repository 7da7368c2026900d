"""Pods of inference pools as endpoints: the real `Registrar`, before an API server, a control plane and model servers.

Pods come, become ready, end and go; pools cannot be read, and others register and delete endpoints. A Deployment is
scaled as plans have it, unless others do so. The API server and the control plane refuse, are silent, or answer in
vain; the registrar is killed, and begins again.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import orjson

from services.contracts.clusters import ClusterOrders, WorkloadName, WorkloadOrder
from services.contracts.routing import Endpoint, EndpointList, EndpointSpec
from services.engines.kueue import servers
from services.engines.kueue.cluster import RefusedError
from services.engines.kueue.scaling import SET
from services.engines.kueue.servers import KNOWN_S, Registrar
from services.kit.bridges.silent import EngineSilentError
from services.kit.problems import ProblemError, unavailable
from services.kit.repeating import repeat
from tests.simulation.loop import EPOCH_S, Simulation

CLUSTER, EVERY_S, PAGE = "eu", 1.0, 2
FOREIGN = ("mine", "europe.x")
"""Endpoints of others, of which nothing may be touched."""
LOOKS_S = 2.0
"""A look takes no longer."""
CALM_S = KNOWN_S + 20.0
"""Within this time what is registered is what there is."""
SOON_S = 15.0
"""Within this time an endpoint is as its pod is."""
HAVE = "x-models", "y-models"
LLAMA = WorkloadName(name="llama")
BEFORE = 2
"""Replicas that the workload has before any plan."""
SCALER = {"metadata": {"name": "a"}, "spec": {"scaleTargetRef": {"kind": LLAMA.kind, "name": LLAMA.name}}}


@dataclass
class _World:
    """What there is: pods by their pools, and endpoints.

    Attributes:
        seen: The pods of the last answer of the API server, by the names of their endpoints; whether each is ready.
        broken, unread: Pools that cannot be read, and that could not at the last answer.
        refused: Endpoints that the control plane does not accept.
        silent: Pods whose servers do not say which models they have.
        workload: What is scaled, as the API server has it; None while there is none.
        marks: Of its pods, by their names: what they are annotated with.
        order: What is to become of it.
        is_scaled: Whether another scales it, as was last read.
        changes: Of what there is, and of what is registered.
        read_s, reading_s: When the endpoints were read last by a registrar that has not failed since, and in this look.
        carried_out: How often what is to become of the workload was carried out.
    """

    simulation: Simulation
    pods: dict[str, dict[str, bool]] = field(default_factory=lambda: {"chat": {}, "code": {}})
    endpoints: dict[str, EndpointSpec] = field(default_factory=dict[str, EndpointSpec])
    seen: dict[str, bool] = field(default_factory=dict[str, bool])
    broken: set[str] = field(default_factory=set[str])
    unread: frozenset[str] = frozenset()
    refused: set[str] = field(default_factory=set[str])
    silent: set[str] = field(default_factory=set[str])
    workload: Any = None
    marks: dict[str, dict[str, str]] = field(default_factory=lambda: {f"{LLAMA.name}{at}": {} for at in range(3)})
    order: WorkloadOrder = field(default_factory=lambda: WorkloadOrder(name=LLAMA.name, replicas=None))
    scalers: list[Any] = field(default_factory=list[Any])
    is_scaled: bool = False
    changes: int = 0
    carried_out: int = 0
    read_s: float = -math.inf
    reading_s: float | None = None

    def there(self) -> dict[str, bool]:
        """Return all pods by the names of their endpoints, and whether each is ready."""
        return {f"{CLUSTER}.{pod}": ready for pods in self.pods.values() for pod, ready in pods.items()}

    # --- the API server

    async def inference(self, _: str) -> list[tuple[Any, list[Any]]]:
        """As ``Cluster.inference``."""
        return await self.simulation.boundary(self._pools, EngineSilentError("It does not answer."))

    def _pools(self) -> list[tuple[Any, list[Any]]]:
        self.seen, self.unread = self.there(), frozenset(self.broken)
        said = {"chat": {"wattshift.io/models": "gpt", "of-others/models": "odd"}, "code": {}}
        return [
            (
                {
                    "metadata": {"name": name, "annotations": said[name]},
                    "spec": {} if name in self.broken else {"targetPorts": [{"number": 80}]},
                },
                [*(_pod(pod, ready) for pod, ready in pods.items()), *NO_SERVERS],
            )
            for name, pods in self.pods.items()
        ]

    async def autoscalers(self, _: str) -> list[Any]:
        """As of ``Cluster``."""

        def read() -> list[Any]:
            self.is_scaled = bool(self.scalers)
            return [*self.scalers]

        return await self.simulation.boundary(read, EngineSilentError("It does not answer."))

    async def workload_of(self, _: str, of: WorkloadName) -> tuple[Any, list[Any]]:
        """As ``Cluster.workload``."""

        def read() -> tuple[Any, list[Any]]:
            return copy.deepcopy(self.workload), [_pod(name, True, notes) for name, notes in self.marks.items()]

        return await self.simulation.boundary(read, EngineSilentError("It does not answer."), RefusedError("No."))

    async def annotate_pod(self, _: str, pod: str, notes: dict[str, str | None]) -> None:
        """As of ``Cluster``."""
        self.simulation.check("what others scale is left alone", not self.is_scaled, pod)
        await self.simulation.boundary(
            lambda: _note(self.marks[pod], notes), EngineSilentError("It does not answer."), may_repeat=True
        )

    async def change_workload(self, _: str, of: WorkloadName, patch: Any) -> bool:
        """As of ``Cluster``."""

        def change() -> bool:
            meta, count = self.workload["metadata"], self.workload["spec"]["replicas"]
            if patch["metadata"]["resourceVersion"] != meta["resourceVersion"]:
                return False
            notes = meta["annotations"]
            is_ours = not self.is_scaled and notes.get(SET, str(count)) == str(count)
            is_same = patch["spec"]["replicas"] == count
            self.simulation.check("what others scale is left alone", is_ours or is_same, f"{notes}: {count}")
            self.scale(patch["spec"]["replicas"])
            _note(notes, patch["metadata"]["annotations"])
            return True

        return await self.simulation.boundary(
            change, EngineSilentError("It does not answer."), RefusedError("No."), may_repeat=True
        )

    def scale(self, replicas: int) -> None:
        """Set how many replicas there are to be."""
        meta: dict[str, Any] = self.workload["metadata"] if self.workload else {"annotations": {}}
        version = str(int(meta.get("resourceVersion", "0")) + 1)
        self.workload = {"metadata": {**meta, "resourceVersion": version}, "spec": {"replicas": replicas}}

    def wrongly_scaled(self) -> str | None:
        """Say what of the workload is not as it is to be, once all that is to be done has been."""
        if self.workload is None:
            return None
        notes, count = self.workload["metadata"]["annotations"], self.workload["spec"]["replicas"]
        marked = [name for name, each in self.marks.items() if each]
        is_ours = not self.scalers and notes.get(SET, str(count)) == str(count)
        is_so = SET not in notes if self.order.replicas is None else not is_ours or count == self.order.replicas
        is_so &= not is_ours or marked == sorted(self.order.leave)
        return None if is_so else f"{notes}, {count} replicas, {marked} leave, and not {self.order!r}"

    # --- the control plane

    async def call(self, method: str, path: str, answer: Any, **asked: Any) -> EndpointList | ClusterOrders:
        """Return a page of endpoints, or what is to become of workloads."""
        if answer is ClusterOrders:
            orders = ClusterOrders(workloads=[self.order] if asked["body"].workloads else [])
            return await self.simulation.boundary(lambda: orders, unavailable("serving"))
        params = asked["params"]
        found = await self.simulation.boundary(lambda: self._page(params.get("cursor", "")), unavailable("serving"))
        self.reading_s = self.simulation.loop.time()
        return found

    def _page(self, cursor: str) -> EndpointList:
        at = datetime.fromtimestamp(EPOCH_S, UTC)
        names = sorted(name for name in self.endpoints if name > cursor)
        items = [
            Endpoint(name=name, tenant_id="acme", spec=self.endpoints[name], created_at=at, updated_at=at)
            for name in names[:PAGE]
        ]
        return EndpointList(items=items, next_cursor=names[PAGE - 1] if len(names) > PAGE else None)

    async def request(self, method: str, path: str, *, body: EndpointSpec | None = None, headers: Any) -> None:
        """Set or delete an endpoint."""
        name, check = path.rpartition("/")[2], self.simulation.check
        check("of what others have registered, nothing is touched", name.startswith(f"{CLUSTER}."), f"{method} {name}")
        work = (lambda: self._set(name, body)) if body is not None else (lambda: self._delete(name))
        await self.simulation.boundary(work, unavailable("serving"), may_repeat=body is not None)

    def _set(self, name: str, spec: EndpointSpec) -> None:
        check = self.simulation.check
        is_ready = self.seen.get(name)
        check("only a pod that is there is registered", is_ready is not None, name)
        check("a pod that is not ready is given no requests", is_ready is not spec.draining, name)
        models = ["gpt"] if name.startswith(f"{CLUSTER}.chat") else list(HAVE)
        check("an endpoint has the models of its server", spec.models == models, f"{name}: {spec.models}")
        if name in self.refused and not self.simulation.is_calm:
            raise ProblemError((409, 422)[self.simulation.choices.below(2)], cast(Any, "conflict"), "It is refused.")
        self.endpoints[name] = spec
        self.changes += 1

    def _delete(self, name: str) -> None:
        check = self.simulation.check
        check("an endpoint is removed when its pod is gone", name not in self.seen, name)
        check("where a pool cannot be read nothing is removed", not self.unread, f"{name}: {self.unread}")
        if self.endpoints.pop(name, None) is None:
            raise ProblemError(404, cast(Any, "not_found"), "There is none.")

    # --- model servers

    @asynccontextmanager
    async def get(self, url: str, **_: Any) -> AsyncIterator[Any]:
        """Say which models a server has."""
        pod = url.removeprefix("http://").partition(":")[0]
        self.simulation.check("a server is asked when it is ready", self.seen[f"{CLUSTER}.{pod}"], pod)
        if pod in self.silent and not self.simulation.is_calm:
            raise aiohttp.ClientConnectionError
        said = await self.simulation.boundary(
            lambda: orjson.dumps({"data": [{"id": name} for name in HAVE]}), aiohttp.ServerDisconnectedError()
        )

        async def read(_: int) -> bytes:
            return said

        yield SimpleNamespace(content=SimpleNamespace(read=read))


def _pod(name: str, ready: bool, notes: dict[str, str] | None = None) -> Any:
    conditions = [{"type": "Ready", "status": str(ready)}]
    meta = {"name": name, "uid": name, "annotations": dict(notes or {})}
    return {
        "metadata": meta,
        "status": {"podIP": name if notes is None else "", "phase": "Running", "conditions": conditions},
    }


NO_SERVERS: list[Any] = [_pod("done", False), _pod("new", False, {})]
"""Pods that have ended, and that have no address yet."""
NO_SERVERS[0]["status"]["phase"] = "Succeeded"


def _note(notes: dict[str, str], changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        notes.pop(name, None)
        if value is not None:
            notes[name] = value


def _begin(world: _World) -> Any:
    settings = SimpleNamespace(
        control_plane_url="http://there",
        namespace="models",
        node_id=CLUSTER,
        location=None,
        own_zone="DE",
        key_file=SimpleNamespace(read_text=lambda: "key\n"),
        scales=[LLAMA] if world.workload is not None else [],
    )
    cluster = SimpleNamespace(
        **{name: getattr(world, name) for name in ("inference", "autoscalers", "annotate_pod", "change_workload")},
        workload=world.workload_of,
    )
    registrar = Registrar(cast(Any, settings), cast(Any, cluster), cast(Any, world))
    registrar._gateway = cast(Any, world)
    world.read_s = -math.inf

    async def look() -> None:
        before, world.reading_s, world.read_s = world.read_s, None, -math.inf
        began_s = world.simulation.loop.time()
        await registrar.look()
        is_known = world.reading_s is not None and began_s < before + KNOWN_S - LOOKS_S
        world.simulation.check("what is known is not read again", not is_known, f"{began_s - before:.1f} s")
        world.read_s = before if world.reading_s is None else world.reading_s

    process = world.simulation.process()
    process.start(
        repeat(
            world.simulation.judged(look, EngineSilentError, ProblemError), EVERY_S, failed="not registered", once=True
        )
    )
    return process


async def play(simulation: Simulation) -> None:
    """Pods come and go while registrars die and begin again; then what is registered is what there is."""
    draw = simulation.choices.below
    world = _World(simulation)
    spec = EndpointSpec.model_validate({"url": "http://10.0.0.9:1", "models": ["m"], "location": "x"})
    world.endpoints = dict.fromkeys(FOREIGN, spec)
    simulation.instead(servers, PAGE=PAGE)
    if draw(2):
        world.scale(BEFORE)
    _judge_the_log(simulation, world)
    simulation.holds("of what others have registered, nothing is touched", lambda: _touched(world))
    process = _begin(world)
    for number in range(4 + draw(12)):
        await asyncio.sleep(0.3 * draw(8))
        world.changes += 1
        pool = ("chat", "code")[draw(2)]
        pods = world.pods[pool]
        match draw(16):
            case 0 | 1 | 2 | 3:
                pods[f"{pool}{number}"] = draw(3) != 1
            case 4 | 5 if pods:
                name = list(pods)[draw(len(pods))]
                pods[name] = not pods[name]
            case 6 | 7 if pods:
                del pods[list(pods)[draw(len(pods))]]
            case 8:
                world.broken ^= {pool}
            case 9:
                process.kill()
                process = _begin(world)
            case 10:
                world.refused ^= {f"{CLUSTER}.{name}" for name in pods}
                world.silent ^= set(pods)
            case 11 if mine := [name for name in world.endpoints if name not in FOREIGN]:
                del world.endpoints[mine[draw(len(mine))]]  # an operator does, or what was restored lacks it
            case 12 | 13:
                leave = [name for name in world.marks if draw(2)]
                world.order = WorkloadOrder(name=LLAMA.name, replicas=(None, 1, 3)[draw(3)], leave=leave)
            case 14 if world.workload is not None:  # an admin does
                world.scale(BEFORE + draw(2))
            case 15:
                world.scalers = [] if world.scalers else [SCALER]
            case _:
                pass
    world.broken.clear()
    simulation.calm_down()
    await asyncio.sleep(SOON_S)
    odd = {name for name, each in world.endpoints.items() if world.there().get(name, each.draining) is each.draining}
    simulation.check("what is registered is soon as its pod is", odd <= {*FOREIGN}, str(odd))
    await asyncio.sleep(CALM_S)
    found = {name: not each.draining for name, each in world.endpoints.items() if name not in FOREIGN}
    # A server that was never ready has not said which models it has.
    known = {name: ready for name, ready in world.there().items() if ready or name in found or ".chat" in name}
    simulation.check("what is registered is what there is", found == known, f"{found}, and not {known}")
    wrong = world.wrongly_scaled()
    simulation.check("a workload is scaled as plans have it", wrong is None, str(wrong))
    process.kill()


def _judge_the_log(simulation: Simulation, world: _World) -> None:
    """What cannot be registered or scaled is said once, until there is another reason or something has changed."""

    def unasked(said: dict[str, Any]) -> str | None:
        return "it was not asked for its models" if said["why"].startswith("wattshift.io/models:") else None

    simulation.says("server.not_registered", unasked)
    simulation.says_once("server.not_registered", lambda said: (said["why"], world.changes), "endpoint")
    carry_out = Registrar._carry_out

    async def counted(*asked: Any) -> None:
        await carry_out(*asked)
        world.carried_out += 1

    simulation.instead(Registrar, _carry_out=counted)
    simulation.says_once("workload.not_scaled", lambda said: (said["why"], world.carried_out), "workload")


def _touched(world: _World) -> str | None:
    return next((name for name in FOREIGN if name not in world.endpoints), None)
