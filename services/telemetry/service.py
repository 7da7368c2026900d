"""What telemetry does for nodes, operators and users."""

import base64
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.contracts import nodes as contracts
from services.contracts.codes import ProblemCode
from services.contracts.engines import EngineEnergyReport, EngineReply, EngineReport, node_name
from services.contracts.identity import Identity
from services.contracts.invalid import NAME_PATTERN
from services.contracts.queries import NodeQuery
from services.contracts.secrets import OpenedSecret, OpenedSecrets
from services.contracts.sources import ChunkWanted, OpenedChunk
from services.contracts.streams import NodeStream, StreamEntries, StreamEntry, StreamRead
from services.core.accounting.meters import LIMIT_MARGIN, UNKNOWN_HOST_W
from services.core.domain.mig import is_gpu, slice_name
from services.db.database import Database, Record
from services.db.job_inputs import sealed_secrets, upload_chunk
from services.db.sealing import Sealer, SealError, open_instance_key
from services.kit.command_stream import BATCH, BLOCK_MS
from services.kit.logging import Log
from services.kit.problems import ProblemError, conflict, not_found, unavailable
from services.kit.readable import readable
from services.kit.redis import hint
from services.kit.routes import read_cursor, write_cursor
from services.telemetry.batches import Batches
from services.telemetry.enrolment import Enrolment
from services.telemetry.figures import ASLEEP
from services.telemetry.intensity import IntensitySource
from services.telemetry.ledger import Ledger
from services.telemetry.line_export import LineExports
from services.telemetry.measured import by_holder
from services.telemetry.repository import engines, gpu_health, heartbeats, nodes, temperatures
from services.telemetry.repository.jobs import StartingJob, starting_job
from services.telemetry.seals import Signer
from services.telemetry.settings import TelemetrySettings

log = Log(__name__)


def unknown_node() -> ProblemError:
    """Return the error for a node that shows no token of its own."""
    return ProblemError(401, ProblemCode.UNAUTHENTICATED, "This is not the node's token; register again for a new one.")


_Energy = tuple[str, Sequence[contracts.EnergyInterval]]  #: A node's token, and its intervals


@dataclass
class Telemetry:
    """The use cases of the process.

    Whoever asks as a node, or as a bridge, by a token that is not its own gets ``ProblemError``: 401.
    """

    settings: TelemetrySettings
    database: Database
    redis: Redis
    ledger: Ledger
    sealer: Sealer
    enrolment: Enrolment
    intensities: IntensitySource

    def __post_init__(self) -> None:
        self.signer = Signer(self.database, self.sealer)
        ttl_s = self.settings.lease_ttl_s

        async def renew(beats: Mapping[str, heartbeats.Beat], wait: bool) -> dict[str, heartbeats.Renewal]:
            return await heartbeats.renew(self.database, beats, ttl_s, wait=wait)

        async def store(reports: Mapping[str, _Energy], _: bool) -> dict[str, contracts.EnergyReceipt]:
            tokens = {node_id: token for node_id, (token, _) in reports.items()}
            known = await nodes.reporters(self.database, tokens)
            receipts = await self.ledger.store_all(
                [(node, await self._owned(node, reports[name][1])) for name, node in known.items()]
            )
            return dict(zip(known, receipts, strict=True))

        self.exports = LineExports(self.database)
        self._beats = Batches(renew, unknown_node)
        self._energy = Batches(store, unknown_node)

    async def register(self, registration: contracts.NodeRegistration, secret: str) -> contracts.NodeCredentials:
        """Register a node and give it a token, which invalidates any earlier one.

        Raises:
            ProblemError: 401 if the secret is not this node's, or was given for another role; 409 if a bridge to an
                engine would become a node, or a node a bridge.
        """
        token = secrets.token_urlsafe(32)
        zone, admit = self.settings.zone, self.enrolment.admit
        await nodes.register(self.database, registration, secret, token, zone, admit)
        log.info("node.registered", node=registration.node_id, gpus=len(registration.devices))
        await hint(self.redis, "node", node=registration.node_id)
        return contracts.NodeCredentials(
            node_id=registration.node_id,
            token=token,
            heartbeat_interval_s=self.settings.heartbeat_interval_s,
            lease_ttl_s=self.settings.lease_ttl_s,
            pue=self.settings.pue,
        )

    async def heartbeat(self, node_id: str, token: str, heartbeat: contracts.Heartbeat) -> contracts.HeartbeatReply:
        """Renew a node's lease, and answer with the gangs it may run."""
        renewal = await self._beats.add(node_id, (token, heartbeat))
        if renewal.changed:
            await hint(self.redis, renewal.changed, node=node_id)
        return contracts.HeartbeatReply(
            lease_ttl_s=self.settings.lease_ttl_s,
            allocations=renewal.allocations,
            partitions=renewal.partitions,
            returned_faults=renewal.returned_faults,
        )

    async def store_energy(self, node_id: str, token: str, report: contracts.EnergyReport) -> contracts.EnergyReceipt:
        """Enter a node's intervals into the ledger, each once; ``ProblemError``: 503 if no intensity is known yet."""
        return await self._energy.add(node_id, (token, report.intervals))

    async def mirror(self, engine: str, token: str, report: EngineReport) -> EngineReply:
        """Store the state of an engine, as its bridge reports it, and renew the leases of its nodes."""
        settings = self.settings
        found = await engines.mirror(self.database, engine, token, report, settings.lease_ttl_s, settings.zone)
        if found is None:
            raise unknown_node()
        reply, changed = found
        if changed:
            await hint(self.redis, "node", node=engine)
        now_s = time.time()
        asked = [await self.intensities.outlook(zone, now_s) for zone in report.wants_outlooks]
        return reply.model_copy(update={"outlooks": [each for each in asked if each is not None]})

    async def _owned(
        self, node: nodes.Reporter, intervals: Sequence[contracts.EnergyInterval]
    ) -> Sequence[contracts.EnergyInterval]:
        """Return the intervals of an engine's node by the engine's jobs; those of other nodes as they are."""
        if node.engine_node is None or not intervals:
            return intervals
        start_at, end_at = min(each.start_at for each in intervals), max(each.end_at for each in intervals)
        holds = await engines.holds(self.database, node.engine_node, start_at, end_at)
        return [by_holder(each, holds) for each in intervals]

    async def store_engine_energy(self, engine: str, token: str, report: EngineEnergyReport) -> contracts.EnergyReceipt:
        """Enter intervals of an engine's node into the ledger, each once; usages name jobs by their external ids.

        Those of a node that an agent measures are accepted but not booked: its agent's are.

        Raises:
            ProblemError: 404 if it has reported no such node; 503 if no intensity is known yet: send again later.
        """
        await self._check_node(engine, token)
        node_id = node_name(engine, report.node)
        place = await engines.place_of(self.database, engine, node_id)
        if place is None:
            raise not_found("node of this engine")
        if place.is_measured:
            return contracts.EnergyReceipt(accepted=0, duplicates=len(report.intervals))
        intervals = await engines.by_allocation(self.database, engine, report.intervals)
        reporter = nodes.Reporter(
            node_id,
            place.zone,
            contracts.EnergySource.MODELLED,
            most_gpu_w=LIMIT_MARGIN * place.limit_w,
            most_host_w=UNKNOWN_HOST_W,
        )
        return await self.ledger.store(reporter, intervals)

    async def read_stream(self, node_id: str, token: str, read: StreamRead) -> StreamEntries:
        """Relay a node's own stream to it, or remove a command that is done; ``ProblemError``: 503 without Valkey."""
        await self._check_node(node_id, token)
        redis: Any = self.redis  # the library's types do not know that its answers are awaited
        name, found = read.stream.name_of(node_id), None
        try:
            if read.done is not None and read.stream is NodeStream.COMMANDS:
                await redis.xdel(name, read.done)
            if read.after is not None:
                found = await redis.xread({name: read.after}, count=BATCH, block=BLOCK_MS)
        except (RedisError, OSError) as error:
            raise unavailable("Valkey") from error
        if not found:
            return StreamEntries(entries=[])
        await self._check_node(node_id, token)  # it may have been revoked while it waited
        return StreamEntries(entries=[StreamEntry(id=entry_id, fields=fields) for entry_id, fields in found[0][1]])

    async def _check_node(self, node_id: str, token: str) -> None:
        if not await nodes.reporters(self.database, {node_id: token}):
            raise unknown_node()

    async def open_secrets(self, node_id: str, token: str, allocation_id: str) -> OpenedSecrets:
        """Return the secrets of a live gang of a node; ``ProblemError``: 404 if it has no such gang."""
        job = await self._starting_job(node_id, token, allocation_id)
        return await _opened(self.database, self.sealer, job)

    async def open_chunk(self, node_id: str, token: str, wanted: ChunkWanted) -> OpenedChunk:
        """Return a part of the archive of a live gang of a node; ``ProblemError``: 404 if there is none."""
        job = await self._starting_job(node_id, token, wanted.allocation_id)
        found = await self.database.run(upload_chunk, job.tenant_id, job.upload or "", wanted.number)
        if found is None:
            raise not_found("part of the job's upload")
        return OpenedChunk(chunks=found.chunks, data=base64.b64encode(found.data).decode())

    async def _starting_job(self, node_id: str, token: str, allocation_id: str) -> StartingJob:
        await self._check_node(node_id, token)
        job = await starting_job(self.database, node_id, allocation_id)
        if job is None:
            raise not_found("gang on this node")
        return job

    async def list_nodes(self, query: NodeQuery) -> contracts.NodeList:
        after, limit = read_cursor(query.cursor, NAME_PATTERN), query.limit
        most = None if limit is None else limit + 1
        found = await nodes.nodes(self.database, after=after, limit=most, clocks=query.clocks)
        shown = found[:limit]
        more = len(found) > len(shown)
        trends = await temperatures.trends(self.database, [row["id"] for row, _ in shown]) if query.trend else {}
        items = readable(
            shown, lambda each: _as_node(*each, trends.get(each[0]["id"])), "node", lambda each: each[0]["id"]
        )
        return contracts.NodeList(
            items=items,
            next_cursor=write_cursor(shown[-1][0]["id"]) if more else None,
        )

    async def node(self, node_id: str) -> contracts.Node:
        """Return one node; ``ProblemError``: 404 if there is no such node."""
        found = await nodes.nodes(self.database, node_id)
        if not found:
            raise not_found("node")
        return _as_node(*found[0], None)

    async def set_draining(self, node_id: str, draining: bool, operator: Identity) -> contracts.Node:
        """Drain a node, on which jobs run on and no new ones start, or return it to service; 404 if there is none."""
        await self.node(node_id)
        if await nodes.set_draining(self.database, node_id, draining, operator):
            log.info("node.draining" if draining else "node.resumed", node=node_id, by=operator.key_id)
            await hint(self.redis, "node", node=node_id)
        return await self.node(node_id)

    async def drain_gpu(self, node_id: str, gpu: int, operator: Identity) -> contracts.Node:
        """Take a GPU out of service, but for what runs on it; ``ProblemError``: 404 if there is none such."""
        found = next((each for each in (await self.node(node_id)).devices if each.index == gpu and is_gpu(gpu)), None)
        if found is None:
            raise not_found(f"GPU {gpu} on this node")
        if await gpu_health.drain(self.database, node_id, gpu, found.uuid, operator):
            log.info("gpu.draining", node=node_id, gpu=gpu, by=operator.key_id)
            await hint(self.redis, "node", node=node_id)
        return await self.node(node_id)

    async def resume_gpu(self, node_id: str, gpu: int, operator: Identity) -> contracts.Node:
        """Return a GPU to service; ``ProblemError``: 404 if there is none such, 409 if its fault lasts."""
        node = await self.node(node_id)
        if gpu not in {*(each.gpu for each in node.gpu_health), *(each.index for each in node.devices)}:
            raise not_found(f"GPU {gpu} on this node")
        changed, lasting = await gpu_health.resume(self.database, node_id, gpu, operator)
        if lasting:
            raise conflict(f"GPU {gpu} of {node_id} cannot be returned yet: {lasting}")
        if changed:
            log.info("gpu.resumed", node=node_id, gpu=gpu, by=operator.key_id)
            await hint(self.redis, "node", node=node_id)
        return await self.node(node_id)

    async def partition(self, node_id: str, gpu: int, sizes: list[int], operator: Identity) -> contracts.GpuPartition:
        """Have a GPU cut like this; its node does it once no gang runs on it.

        Args:
            sizes: In sevenths, in the order of their places; empty for a whole GPU.

        Raises:
            ProblemError: 404 if there is no such node or GPU; 409 if it cannot be cut, or is reserved for a fleet.
        """
        devices = (await self.node(node_id)).devices
        found = next((each for each in devices if each.parent is None and each.index == gpu), None)
        if found is None:
            raise not_found(f"GPU {gpu} on this node")
        if sizes and not found.can_partition:
            detail = f"GPU {gpu} of {node_id}, {found.model}, cannot be cut into MIG slices by its agent."
            raise ProblemError(409, ProblemCode.CAPABILITY_MISSING, detail)
        if not await nodes.want_partition(self.database, node_id, gpu, sizes, operator):
            detail = (
                f"GPU {gpu} of {node_id} is reserved for a fleet, which cuts it itself: change or delete the fleet."
            )
            raise conflict(detail)
        names = ", ".join(map(slice_name, sizes)) or "whole"
        log.info("node.partition", node=node_id, gpu=gpu, slices=names, by=operator.key_id)
        await hint(self.redis, "node", node=node_id)
        return next(each for each in (await self.node(node_id)).partitions if each.gpu == gpu)


def _as_node(row: Record, powered: Record | None, trend: contracts.NodeTrend | None) -> contracts.Node:
    power = None if powered is None else contracts.NodePower.as_stored(dict(powered))
    shown = {name: value for name, value in row.items() if name != "leased"}
    sleeps = power is not None and power.state in ASLEEP and not row["leased"]
    is_up = row["state"] == contracts.NodeState.UP and not sleeps
    return contracts.Node.model_validate(
        {
            **shown,
            "state": contracts.NodeState.ASLEEP if sleeps else row["state"],
            "power": power or contracts.NodePower(),
            "trend": trend,
            "gpus": sum(device.get("parent") is None for device in row["devices"]),
            "power_w": sum(each["power_w"] for each in row["readings"] if is_gpu(each["index"])) if is_up else 0.0,
        }
    )


async def _opened(database: Database, sealer: Sealer, job: StartingJob) -> OpenedSecrets:
    """Return the secrets that a job names with their values, an instance's key too, and why others cannot be had."""
    uses = [str(use["name"]) for use in job.secrets]
    names = list(dict.fromkeys([*uses, job.git_secret] if job.git_secret else uses))
    found = {row.name: row for row in await database.run(sealed_secrets, job.tenant_id, job.project, names)}
    opened: list[OpenedSecret] = []
    missing: list[str] = []
    for name in names:
        row = found.get(name)
        if row is None:
            missing.append(f"The secret {name} does not exist any more.")
            continue
        try:
            opened.append(OpenedSecret(name=name, value=sealer.open(row.sealed, job.tenant_id, row.project, name)))
        except SealError:
            log.error("secret.not_opened", secret=name, tenant=job.tenant_id)
            missing.append(
                f"The secret {name} was sealed with a key that the control plane does not have; set it again."
            )
    return OpenedSecrets(secrets=opened, missing=missing, instance_key=_instance_key(sealer, job))


def _instance_key(sealer: Sealer, job: StartingJob) -> str | None:
    if job.instance is None or job.sealed_key is None:
        return None
    try:
        return open_instance_key(sealer, job.sealed_key, job.tenant_id, job.instance)
    except SealError:
        log.error("instance_key.not_opened", instance=job.instance)
        return None
