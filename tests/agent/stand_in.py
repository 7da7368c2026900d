"""A server in the place of telemetry: it keeps what a node says and names the allocations a test wants named."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from typing import Any, Self

from aiohttp import web
from pydantic import BaseModel

from services.contracts.identity import Identity
from services.contracts.nodes import (
    EnergyInterval,
    EnergyReceipt,
    EnergyReport,
    Heartbeat,
    HeartbeatReply,
    NodeCredential,
    NodeCredentials,
    NodeKeys,
    NodeRegistration,
    RankStatus,
    WantedPartition,
)
from services.contracts.secrets import OpenedSecret, OpenedSecrets, SecretsWanted
from services.contracts.sources import UPLOAD_CHUNK_BYTES, ChunkWanted, OpenedChunk
from services.kit.credentials import caller_key, node_secret
from services.kit.tokens import Outgoing

JOIN_TOKEN = "join-token-of-the-tests"


NODES_SECRET = b"secret-of-the-nodes"


def call_secret(node_id: str, nodes_secret: bytes = NODES_SECRET) -> bytes:
    """Return the secret by which a node knows who asks it."""
    return node_secret(nodes_secret, node_id, b"enrolment")


def headers_to(node_id: str, identity: Identity | None = None, nodes_secret: bytes = NODES_SECRET) -> dict[str, str]:
    """Return the headers with which admission asks a node."""
    key = caller_key(call_secret(node_id, nodes_secret), "admission")
    return Outgoing("admission", f"node/{node_id}", key).headers(identity)


class StandIn:
    """The control plane's side of the node protocol, without a database.

    Attributes:
        named: The allocations that a heartbeat's answer names.
        partitions: How GPUs are to be cut, which it names too.
        registered: How often the node had registered, by heartbeat.
        is_away: Answer 503 to everything.
        refuses_energy: Answer 422 to energy reports that this returns True for.
        nodes_secret: What those follow from by which nodes know who asks them.
        secrets: Values by name, given to every gang that asks.
        missing_secrets: Sentences on those that cannot be had.
        instance_key: The key of instances, given to every gang that asks.
        has_inputs: Whether what gangs need to start is answered, or 503.
        upload: The archive that every gang gets.
        chunks_asked: The numbers of its parts for which was asked.
        inputs_asked: The allocations for which it was asked.
        enrolled: The hashes of what each node made for itself, newest last.
        answers_lost: How many answers to enrolling nodes are still to be lost.
        rotate_after_s: When nodes are to replace their secrets.
        redis_url: Where they are told that Valkey is.
    """

    def __init__(self, *, lease_ttl_s: float = 30.0, heartbeat_interval_s: float = 0.15) -> None:
        self.lease_ttl_s = lease_ttl_s
        self.heartbeat_interval_s = heartbeat_interval_s
        self.named: set[str] = set()
        self.partitions: list[WantedPartition] = []
        self.registered: list[int] = []
        self.is_away = False
        self.refused_sequences: set[int] = set()
        self.secrets: dict[str, str] = {}
        self.missing_secrets: list[str] = []
        self.instance_key: str | None = None
        self.upload = b""
        self.chunks_asked: list[int] = []
        self.has_inputs = True
        self.inputs_asked: list[str] = []
        self.registrations: list[NodeRegistration] = []
        self.heartbeats: list[Heartbeat] = []
        self.intervals: list[EnergyInterval] = []
        self.deliveries: Counter[tuple[str, int]] = Counter()
        self.enrolled: dict[str, list[NodeKeys]] = {}
        self.nodes_secret = NODES_SECRET
        self.answers_lost = 0
        self.rotate_after_s = 1e6
        self.redis_url: str | None = None
        self._tokens: set[str] = set()
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._away])
        app.router.add_post("/v1/nodes/register", self._register)
        app.router.add_post("/v1/nodes/{node}/enroll", self._enroll)
        app.router.add_post("/v1/nodes/{node}/rotate", self._rotate)
        app.router.add_post("/v1/nodes/{node}/heartbeat", self._heartbeat)
        app.router.add_post("/v1/nodes/{node}/energy", self._energy)
        app.router.add_post("/v1/nodes/{node}/secrets", self._secrets)
        app.router.add_post("/v1/nodes/{node}/upload", self._chunk)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner:
            await self._runner.cleanup()

    def forget_tokens(self) -> None:
        """Refuse every node's token from now on: the node has to register again."""
        self._tokens.clear()

    def rank(self, allocation_id: str) -> RankStatus | None:
        """Return what the newest heartbeat says of an allocation."""
        last = self.heartbeats[-1].ranks if self.heartbeats else []
        return next((rank for rank in last if rank.allocation_id == allocation_id), None)

    def state(self, allocation_id: str) -> str | None:
        """Return the state of an allocation's rank in the newest heartbeat."""
        rank = self.rank(allocation_id)
        return rank.state if rank else None

    def states(self, allocation_id: str) -> list[str]:
        """Return the states an allocation's rank went through, each once."""
        seen = [rank.state for beat in self.heartbeats for rank in beat.ranks if rank.allocation_id == allocation_id]
        return list(dict.fromkeys(seen))

    def gpu_energy_j(self, allocation_id: str | None) -> float:
        """Return the delivered GPU energy of an owner, None for nobody."""
        usages = [usage for interval in self.intervals for usage in interval.usages]
        return sum(usage.gpu_energy_j for usage in usages if usage.allocation_id == allocation_id)

    @web.middleware
    async def _away(self, request: web.Request, handler: Any) -> web.StreamResponse:
        return web.Response(status=503) if self.is_away else await handler(request)

    async def _register(self, request: web.Request) -> web.Response:
        if not self._is_a_node(request):
            return _unauthenticated()
        self.registrations.append(registration := NodeRegistration.model_validate_json(await request.read()))
        token = f"node-token-{len(self.registrations)}"
        self._tokens.add(token)
        return _answer(
            NodeCredentials(
                node_id=registration.node_id,
                token=token,
                heartbeat_interval_s=self.heartbeat_interval_s,
                lease_ttl_s=self.lease_ttl_s,
                pue=1.0,
            )
        )

    async def _enroll(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") != f"Bearer {JOIN_TOKEN}":
            return _unauthenticated()
        return await self._accept(request)

    async def _rotate(self, request: web.Request) -> web.Response:
        if not self._is_a_node(request):
            return _unauthenticated()
        return await self._accept(request)

    async def _accept(self, request: web.Request) -> web.Response:
        node, keys = request.match_info["node"], NodeKeys.model_validate_json(await request.read())
        if self.enrolled.get(node, [])[-1:] != [keys] or not self._is_a_node(request):  # else it asks what is known
            self.enrolled.setdefault(node, []).append(keys)
        if self.answers_lost:
            self.answers_lost -= 1
            return web.Response(status=503)
        return _answer(
            NodeCredential(
                node_id=node,
                call_secrets=[call_secret(node, self.nodes_secret).hex()],
                redis_user=None,
                redis_url=self.redis_url,
                rotate_after_s=self.rotate_after_s,
            )
        )

    def _is_a_node(self, request: web.Request) -> bool:
        shown = hashlib.sha256(request.headers.get("authorization", "").removeprefix("Bearer ").encode()).hexdigest()
        return any(shown == keys.credential_sha256 for given in self.enrolled.values() for keys in given)

    async def _heartbeat(self, request: web.Request) -> web.Response:
        if not self._knows(request):
            return _unauthenticated()
        self.heartbeats.append(Heartbeat.model_validate_json(await request.read()))
        self.registered.append(len(self.registrations))
        return _answer(
            HeartbeatReply(
                lease_ttl_s=self.lease_ttl_s, allocations=sorted(self.named), partitions=list(self.partitions)
            )
        )

    async def _energy(self, request: web.Request) -> web.Response:
        if not self._knows(request):
            return _unauthenticated()
        report = EnergyReport.model_validate_json(await request.read())
        if self.refused_sequences & {interval.sequence for interval in report.intervals}:
            return _problem(422, "invalid_request")
        fresh = [i for i in report.intervals if not self.deliveries[i.boot_id, i.sequence]]
        self.deliveries.update((i.boot_id, i.sequence) for i in report.intervals)
        self.intervals += fresh
        return _answer(EnergyReceipt(accepted=len(fresh), duplicates=len(report.intervals) - len(fresh)))

    async def _secrets(self, request: web.Request) -> web.Response:
        if not self._knows(request):
            return _unauthenticated()
        wanted = SecretsWanted.model_validate_json(await request.read())
        self.inputs_asked.append(wanted.allocation_id)
        if not self.has_inputs:
            return web.Response(status=503)
        opened = [OpenedSecret(name=name, value=value) for name, value in self.secrets.items()]
        answer = OpenedSecrets(secrets=opened, missing=self.missing_secrets, instance_key=self.instance_key)
        return _answer(answer)

    async def _chunk(self, request: web.Request) -> web.Response:
        if not self._knows(request):
            return _unauthenticated()
        number = ChunkWanted.model_validate_json(await request.read()).number
        self.chunks_asked.append(number)
        part = self.upload[number * UPLOAD_CHUNK_BYTES : (number + 1) * UPLOAD_CHUNK_BYTES]
        if not self.has_inputs:
            return web.Response(status=503)
        if not part:
            return _problem(404, "not_found")
        chunks = -(-len(self.upload) // UPLOAD_CHUNK_BYTES)
        return _answer(OpenedChunk(chunks=chunks, data=base64.b64encode(part).decode()))

    def _knows(self, request: web.Request) -> bool:
        return request.headers.get("authorization", "").removeprefix("Bearer ") in self._tokens


def _answer(message: BaseModel) -> web.Response:
    return web.Response(text=message.model_dump_json(), content_type="application/json")


def _unauthenticated() -> web.Response:
    return _problem(401, "unauthenticated")


def _problem(status: int, code: str) -> web.Response:
    document = {"type": f"/problems/{code}", "title": code, "status": status, "detail": code, "code": code}
    return web.Response(status=status, text=json.dumps(document), content_type="application/problem+json")
