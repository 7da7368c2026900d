"""Allocations: gangs that start, run, are set, stop and end, and what nodes reported about them."""

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from services.contracts.nodes import ControlsStatus
from services.core.domain.controls import ControlKind
from services.db import nodes
from services.db.database import Connection
from services.db.job_rows import SPEC_TO_RUN, TRACEPARENTS
from services.db.job_specs import GRACE_S, MAX_RESTARTS, RESTART_AFTER_NODE_LOSS, WORK_TOTAL
from services.db.rows import fetch_row, fetch_rows
from services.scheduler.repository.documents import Json, StoredIdentity, StoredShare
from services.scheduler.repository.jobs import KEEPS_CHECKPOINTS

CONTROL_COLUMNS = {ControlKind.POWER_LIMIT: "power_limit_w", ControlKind.CLOCK: "clock_mhz"}
"""Where an allocation keeps what its devices are set to; commands and events use the same names."""

LIVE = f"""
SELECT a.id, a.job_id, a.generation, a.state, a.shares, a.gpus, a.stop_reason, a.master_port,
       a.batch_size, a.settings_revision, a.power_limit_w, a.clock_mhz,
       (SELECT m.slice_s FROM setting_measurements m
         WHERE m.allocation_id = a.id AND m.state = 'running') AS interval_s,
       extract(epoch FROM now() - greatest(a.started_at, w.awake_at))::float8 AS age_s,
       coalesce(w.asleep, false) AS asleep, coalesce(w.awake_at > a.started_at, false) AS was_asleep,
       EXISTS (SELECT FROM device_claims c WHERE c.allocation_id = a.id AND c.packed) AS packed,
       extract(epoch FROM now() - a.stop_requested_at)::float8 AS stopping_s,
       j.tenant_id, j.cancel_requested, j.hold_requested, j.cell IS NOT NULL AS moves, j.restarts, j.node_losses,
       {MAX_RESTARTS} AS max_restarts, {RESTART_AFTER_NODE_LOSS} AS restart_after_node_loss, {GRACE_S} AS grace_s,
       coalesce({WORK_TOTAL} <= p.done, false) AS work_done
  FROM allocations a JOIN jobs j ON j.id = a.job_id LEFT JOIN reported_work p ON p.job_id = a.job_id
  LEFT JOIN LATERAL (
    SELECT max(CASE WHEN np.state = 'waking' THEN now() ELSE np.since END) AS awake_at,
           bool_or(np.state <> 'on') AS asleep
      FROM jsonb_array_elements(a.shares) s JOIN node_power np ON np.node_id = s ->> 'node_id'
     WHERE a.state = 'starting'
  ) w ON true
 WHERE a.state <> 'ended' AND j.engine = 'wattshift'
"""

REPORTS = """
SELECT s.allocation_id, s.node_id, s.state, s.exit_code, s.ended_by, s.detail
  FROM rank_reports s JOIN allocations a ON a.id = s.allocation_id WHERE a.state <> 'ended'
"""

LOST_SHARES = """
SELECT e.allocation_id, e.node_id, e.ended_by
  FROM rank_ends e JOIN allocations a ON a.id = e.allocation_id WHERE a.state <> 'ended'
"""

# Jobs that are to run again, or do, although all nodes of an earlier gang say that their part finished by itself. Such
# a gang ended because a node of it was given up; few ever were, so the search begins with those.
FINISHED_BEFORE = """
SELECT DISTINCT a.job_id
  FROM rank_ends e
  JOIN rank_reports s ON s.allocation_id = e.allocation_id AND s.node_id = e.node_id
   AND s.state = 'exited' AND s.ended_by = 'itself' AND s.exit_code = 0
  JOIN allocations a ON a.id = e.allocation_id AND a.state = 'ended' AND a.end_reason <> 'finished'
  JOIN jobs j ON j.id = a.job_id AND j.state NOT IN ('succeeded', 'failed', 'cancelled')
 WHERE ($1::text IS NULL OR a.job_id = $1)
   AND NOT EXISTS (SELECT FROM jsonb_array_elements(a.shares) x WHERE NOT EXISTS (
       SELECT FROM rank_reports o WHERE o.allocation_id = a.id AND o.node_id = x ->> 'node_id'
          AND o.state = 'exited' AND o.ended_by = 'itself' AND o.exit_code = 0))
"""

CONTROLS_REPORTS = """
SELECT s.allocation_id, s.node_id, s.settings FROM rank_reports s JOIN allocations a ON a.id = s.allocation_id
 WHERE a.state IN ('starting', 'running') AND a.settings_revision > 0 AND s.settings IS NOT NULL
"""

STARTABLE = f"""
SELECT j.id, j.tenant_id, j.generation, {SPEC_TO_RUN} AS spec, u.account, j.engine,
       extract(epoch FROM now() - coalesce(j.queued_at, j.submitted_at))::float8 AS waited_s
  FROM jobs j LEFT JOIN users u ON u.id = j.user_id
 WHERE j.id = ANY($1::text[]) AND j.state = 'queued' AND j.cell IS NULL
   AND NOT j.cancel_requested AND NOT j.hold_requested
 ORDER BY j.id FOR UPDATE OF j
"""

ACCOUNT = "SELECT u.account FROM jobs j JOIN users u ON u.id = j.user_id WHERE j.id = $1"

HOSTS = """
SELECT n.id, n.address, coalesce(p.state, 'on') AS power,
       (SELECT jsonb_object_agg(d ->> 'index', jsonb_build_object(
            'uuid', d -> 'uuid', 'parent', d -> 'parent', 'profile', d -> 'profile'))
          FROM jsonb_array_elements(n.devices) d) AS units
  FROM known_nodes n LEFT JOIN node_power p ON p.node_id = n.id
 WHERE n.id = ANY($1::text[]) AND n.state = 'up' AND NOT n.draining AND n.closed IS NULL
   AND NOT n.measures_only AND coalesce(p.state, 'on') IN ('on', 'off', 'waking')
"""

PORTS = """
SELECT n.address, array_agg(a.master_port)
  FROM allocations a JOIN known_nodes n ON n.id = a.shares -> 0 ->> 'node_id' WHERE a.state <> 'ended' GROUP BY 1
"""

# What GPUs of the gang before this one drew without a limit is known of these, too, if they are of the same model.
INSERT = """
INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port, batch_size, unlimited_w)
VALUES ($1, $2, $3, 'starting', $4, $5, $6, $7,
        (SELECT b.unlimited_w FROM allocations b
           JOIN known_nodes o ON o.id = b.shares -> 0 ->> 'node_id'
           JOIN known_nodes n ON n.id = $5::jsonb -> 0 ->> 'node_id'
          WHERE b.id = $2 || '.' || $3::int - 1 AND n.devices -> 0 -> 'model' = o.devices -> 0 -> 'model'))
"""

CLAIM = """
INSERT INTO device_claims (node_id, device, allocation_id, uuid, parent, profile, packed, slot)
SELECT $1::text, $2::int, $3::text, $4::text, $5::int, $6::text, $7::bool,
       CASE WHEN $7 THEN (SELECT 1 - min(c.slot) FROM device_claims c WHERE c.node_id = $1 AND c.device = $2) ELSE 0 END
"""

UUIDS = "SELECT node_id, device, uuid FROM device_claims WHERE allocation_id = $1 AND uuid IS NOT NULL"

# A node that came back with other slices no longer has those that gangs hold, though it may number others as they were.
LOST_SLICES = """
SELECT DISTINCT c.allocation_id FROM device_claims c JOIN known_nodes n ON n.id = c.node_id
 WHERE c.parent IS NOT NULL
   AND NOT n.devices @> jsonb_build_array(jsonb_build_object('index', c.device, 'uuid', c.uuid))
"""

# A gang that never began leaves its job as it was. Where nodes keep checkpoints to themselves and do not say that the
# folder is empty (one was lost, say), there may be one.
BIND = f"""
UPDATE jobs j SET bound_to = CASE WHEN ran.holds THEN ran.nodes END
  FROM (SELECT array_agg(s.share ->> 'node_id' ORDER BY s.at) AS nodes, bool_or(r.started_at IS NOT NULL) AS began,
               coalesce(bool_or(n.checkpoints = 'local' AND r.started_at IS NOT NULL
                                AND r.holds_checkpoint IS DISTINCT FROM false), false) AS holds
          FROM allocations a CROSS JOIN jsonb_array_elements(a.shares) WITH ORDINALITY AS s (share, at)
          LEFT JOIN known_nodes n ON n.id = s.share ->> 'node_id'
          LEFT JOIN rank_reports r ON r.allocation_id = a.id AND r.node_id = n.id
         WHERE a.id = $2) ran
 WHERE j.id = $1 AND ran.began AND {KEEPS_CHECKPOINTS}
   AND j.bound_to IS DISTINCT FROM CASE WHEN ran.holds THEN ran.nodes END
"""

# A GPU that is sick, or one that a node no longer has which registered again since. An agent that finds no GPU at all
# knows nothing of those that gangs compute on.
LOST_GPUS = """
SELECT c.allocation_id, c.node_id, h.gpu, h.detail
  FROM unusable_gpus h JOIN device_claims c ON c.node_id = h.node_id AND coalesce(c.parent, c.device) = h.gpu
 WHERE h.cause IS NOT NULL AND h.ends_gangs AND ($1::text IS NULL OR c.allocation_id = $1)
UNION ALL
SELECT c.allocation_id, c.node_id, c.device, ''
  FROM device_claims c JOIN allocations a ON a.id = c.allocation_id
  JOIN known_nodes n ON n.id = c.node_id AND n.registered_at > a.started_at AND n.devices <> '[]'
 WHERE c.parent IS NULL AND c.uuid IS NOT NULL AND ($1::text IS NULL OR c.allocation_id = $1)
   AND NOT n.devices @> jsonb_build_array(jsonb_build_object('index', c.device, 'uuid', c.uuid))
 ORDER BY 1, 2, 3, 4
"""

STOPPABLE = f"""
SELECT a.id, a.job_id, a.shares, {GRACE_S} AS grace_s, j.engine
  FROM allocations a JOIN jobs j ON j.id = a.job_id
 WHERE a.job_id = ANY($1::text[]) AND a.state IN ('starting', 'running') ORDER BY j.id FOR UPDATE OF j
"""

RUN = "UPDATE allocations SET state = 'running', running_at = now() WHERE id = $1 AND state = 'starting' RETURNING id"

STOP = """
UPDATE allocations SET state = 'stopping', stop_requested_at = now() + make_interval(secs => $3), stop_reason = $2
 WHERE id = $1 AND state IN ('starting', 'running') RETURNING id
"""

HURRY = f"""
UPDATE allocations a SET stop_requested_at = now() FROM jobs j
 WHERE a.state = 'stopping' AND a.stop_requested_at > now() AND ($1::text IS NULL OR a.id = $1) AND j.id = a.job_id
RETURNING a.id, a.job_id, a.shares, {GRACE_S} AS grace_s, j.engine
"""

WAKING = "SELECT node_id FROM node_power WHERE node_id = ANY($1::text[]) AND state = 'waking'"

GIVE_UP_ASLEEP = """
INSERT INTO rank_ends (allocation_id, node_id, ended_by, detail)
SELECT $1, n.id, 'lost', 'Its node was not awake yet.'
  FROM known_nodes n JOIN node_power p ON p.node_id = n.id
 WHERE n.id = ANY($2::text[]) AND p.state = 'waking' AND NOT n.heard ON CONFLICT DO NOTHING RETURNING node_id
"""

RELEASE_ON = "DELETE FROM device_claims WHERE allocation_id = $1 AND node_id = ANY($2::text[])"

EARLIER = """
SELECT count(*) FILTER (WHERE end_reason = 'start_failed') AS failed_starts,
       count(*) FILTER (WHERE end_reason = 'slice_lost') AS refused_slices,
       coalesce(extract(epoch FROM now() - max(ended_at) FILTER (
           WHERE end_reason IN ('node_lost', 'gpu_lost', 'slice_lost'))), 0)::float8 AS since_loss_s
  FROM allocations WHERE job_id = $1
"""

END = """
UPDATE allocations SET state = 'ended', ended_at = now(), end_reason = $2 WHERE id = $1 AND state <> 'ended'
RETURNING gpus * extract(epoch FROM now() - started_at)::float8
"""

LOSE_SHARES = """
INSERT INTO rank_ends (allocation_id, node_id, ended_by, detail)
SELECT a.id, n.id, CASE WHEN $2 = 'lost' AND coalesce(k.draining, false) THEN 'drained' ELSE $2 END,
       'The node was lost.'
  FROM allocations a, unnest($1::text[]) AS n(id) LEFT JOIN known_nodes k ON k.id = n.id
 WHERE a.state <> 'ended' AND a.shares @> jsonb_build_array(jsonb_build_object('node_id', n.id))
ON CONFLICT DO NOTHING
"""

TELL_LOST = """
INSERT INTO webhook_events (type, data)
SELECT 'node.lost', jsonb_build_object(
           'node_id', n.id, 'zone', n.zone, 'gpus',
           (SELECT count(*) FROM jsonb_array_elements(n.devices) d WHERE d ->> 'parent' IS NULL),
           'last_heartbeat_at', n.heartbeat_at,
           'job_ids', (SELECT coalesce(jsonb_agg(DISTINCT a.job_id ORDER BY a.job_id), '[]') FROM device_claims c
                         JOIN allocations a ON a.id = c.allocation_id WHERE c.node_id = n.id))
  FROM known_nodes n WHERE n.id = ANY($1::text[])
"""

# A node that fell silent at about the same time was lost to what took the gang's own: to a network, or to a control
# plane that did not answer. One that did so before the gang began was not. A node may end its gangs for want of answers
# though its lease was renewed.
LOSS_STANDS_OUT = """
WITH heard AS (
    SELECT n.id, n.draining, n.heard AS is_heard, CASE WHEN n.heard THEN n.silent_at ELSE n.lease_until END AS silent_at
      FROM known_nodes n LEFT JOIN node_power p ON p.node_id = n.id
     WHERE n.engine = 'wattshift' AND NOT n.measures_only AND coalesce(p.state, 'on') = 'on'
), lost AS (
    SELECT h.id, CASE WHEN h.silent_at >= a.started_at THEN h.silent_at ELSE now() END AS at, a.started_at, a.job_id
      FROM heard h JOIN allocations a ON a.id = $1
     WHERE NOT h.draining AND h.id IN (
           SELECT node_id FROM rank_ends WHERE allocation_id = $1 AND ended_by = 'lost'
           UNION SELECT node_id FROM rank_reports WHERE allocation_id = $1 AND ended_by IN ('lease', 'host'))
     ORDER BY 2, 1 LIMIT 1
), others AS (
    SELECT h.is_heard, coalesce(h.silent_at > since.at, false) OR EXISTS (
               SELECT FROM rank_reports r JOIN allocations a ON a.id = r.allocation_id
                WHERE r.node_id = h.id AND r.ended_by = 'lease' AND r.updated_at > since.at AND a.job_id <> l.job_id
                  AND (a.state <> 'ended' OR a.ended_at > since.at)) AS was_silent
      FROM lost l JOIN heard h ON h.id <> l.id
     CROSS JOIN LATERAL (SELECT greatest(l.at - $2::interval, l.started_at) AS at) since
)
SELECT EXISTS (SELECT FROM lost)
   AND (count(*) FILTER (WHERE was_silent) = 0
        OR count(*) FILTER (WHERE is_heard AND NOT was_silent) > count(*) FILTER (WHERE was_silent))
  FROM others
"""
ABOUT_THE_SAME_TIME = timedelta(minutes=2)

CONTROLLED = "SELECT a.id, a.job_id, a.shares, a.power_limit_w, a.clock_mhz, a.settings_refused FROM allocations a"

# What a GPU drew counts as unlimited once its job has run for half a minute: one that loads its data draws little.
SET_CONTROLS = """
UPDATE allocations a SET power_limit_w = $2, clock_mhz = $3, settings_refused = $4,
       settings_revision = a.settings_revision + 1,
       unlimited_w = coalesce(a.unlimited_w, CASE WHEN b.power_limit_w IS NULL AND b.clock_mhz IS NULL
                                                   AND f.gpu_s >= 30 * b.gpus THEN f.gpu_energy_j / f.gpu_s END),
       unordered_w = CASE WHEN $5 THEN
           coalesce(a.unordered_w, a.unlimited_w, f.gpu_energy_j / nullif(f.gpu_s, 0), 0) END
  FROM allocations b LEFT JOIN footprints f ON f.job_id = b.job_id
 WHERE a.id = $1 AND b.id = a.id RETURNING a.settings_revision
"""


class LiveGang(NamedTuple):
    """An allocation that has not ended, with what its job's user wants."""

    id: str
    job_id: str
    generation: int
    state: str
    shares: list[StoredShare]
    gpus: int
    stop_reason: str | None
    master_port: int
    batch_size: int | None
    settings_revision: int
    power_limit_w: float | None
    clock_mhz: int | None
    interval_s: float | None  #: If it is being measured, the time after which a report ends an interval
    age_s: float  #: Seconds since it was started and all of its nodes were awake
    asleep: bool
    was_asleep: bool  #: Whether one of its nodes has been asleep since it was started
    packed: bool  #: Whether it was put beside the holder of its device
    stopping_s: float | None
    """Seconds since it was asked to stop, below 0 while it is waited for to save its work; None if it was not."""
    tenant_id: str
    cancel_requested: bool
    hold_requested: bool
    moves: bool
    restarts: int
    node_losses: int
    max_restarts: int
    restart_after_node_loss: bool
    grace_s: float
    work_done: bool  #: Whether the job has reported that all its work is done


class RankReport(NamedTuple):
    """A node's last report on its share of a gang."""

    allocation_id: str
    node_id: str
    state: str
    exit_code: int | None
    ended_by: str | None
    detail: str | None


class LostShare(NamedTuple):
    """A share of a gang on a node that was given up, and how that was."""

    allocation_id: str
    node_id: str
    ended_by: str


class StartableJob(NamedTuple):
    """A waiting job, locked, with the account that its user's jobs run under, and since when it has been queued."""

    id: str
    tenant_id: str
    generation: int
    spec: Json
    account: str | None
    engine: str
    waited_s: float


class Host(NamedTuple):
    """A node that takes work, how it is powered, and the identities of its devices, by number."""

    id: str
    address: str
    power: str
    units: dict[str, StoredIdentity] | None


class NewGang(NamedTuple):
    """An allocation to be created."""

    id: str
    job_id: str
    generation: int
    gpus: int
    shares: list[StoredShare]
    master_port: int
    batch_size: int | None = None


class StoppableGang(NamedTuple):
    """A gang that can be stopped."""

    id: str
    job_id: str
    shares: list[StoredShare]
    grace_s: float
    engine: str


class ControlledGang(NamedTuple):
    """What a gang's devices are set to (None: the default), and what they refused, by kind of control; locked."""

    id: str
    job_id: str
    shares: list[StoredShare]
    power_limit_w: float | None
    clock_mhz: int | None
    settings_refused: dict[str, str]

    def value(self, kind: ControlKind) -> float | None:
        """Return what one kind of control is set to; None: the default."""
        return self.power_limit_w if kind is ControlKind.POWER_LIMIT else self.clock_mhz


ControlsByNode = Mapping[str, Mapping[str, ControlsStatus]]
"""Nodes' reports on gangs' controls, by allocation and node."""


async def live(connection: Connection) -> list[LiveGang]:
    """Return all allocations that have not ended."""
    return await fetch_rows(connection, LiveGang, LIVE)


async def live_one(connection: Connection, allocation_id: str) -> LiveGang | None:
    """Return one allocation; None if it has ended."""
    return await fetch_row(connection, LiveGang, f"{LIVE} AND a.id = $1", allocation_id)


async def reports(connection: Connection, allocation_id: str | None = None) -> tuple[list[RankReport], list[LostShare]]:
    """Return what nodes last reported about their shares of live gangs, or of one, and those lost with their nodes."""
    one, ids = ("", ()) if allocation_id is None else (" AND a.id = $1", (allocation_id,))
    reported = await fetch_rows(connection, RankReport, REPORTS + one, *ids)
    return reported, await fetch_rows(connection, LostShare, LOST_SHARES + one, *ids)


async def finished_before(connection: Connection, job_id: str | None = None) -> set[str]:
    """Return the jobs that had finished when a node of theirs was given up; ``job_id`` limits this to one job."""
    return {record["job_id"] for record in await connection.fetch(FINISHED_BEFORE, job_id)}


async def controls(connection: Connection) -> ControlsByNode:
    """Return what nodes report about the controls of live gangs on which any were ever set."""
    found: dict[str, dict[str, ControlsStatus]] = {}
    for gang, node, settings in await connection.fetch(CONTROLS_REPORTS):
        found.setdefault(gang, {})[node] = ControlsStatus.as_stored(settings)
    return found


async def startable(connection: Connection, job_ids: Sequence[str]) -> list[StartableJob]:
    """Lock and return those of these jobs that are still waiting."""
    return await fetch_rows(connection, StartableJob, STARTABLE, list(job_ids))


async def traceparents(connection: Connection, job_ids: Sequence[str]) -> dict[str, str]:
    """Return the request and span that each job was submitted in, where they are known."""
    return {record[0]: record[1] for record in await connection.fetch(TRACEPARENTS, list(job_ids))}


async def hosts(connection: Connection, node_ids: Sequence[str]) -> list[Host]:
    """Return those of these nodes that accept work, locked against being drained or given up."""
    await nodes.share(connection, node_ids)
    return await fetch_rows(connection, Host, HOSTS, list(node_ids))


async def ports_in_use(connection: Connection) -> dict[str, set[int]]:
    """Return the ports that rank 0 of live gangs listens on, by address."""
    return {address: set(ports) for address, ports in await connection.fetch(PORTS)}


async def insert(
    connection: Connection, gangs: Sequence[NewGang], hosts: Mapping[str, Host], packed: Collection[str] = ()
) -> None:
    """Create allocations, and claim their devices by their identities on these hosts.

    Args:
        connection: In the transaction of a plan.
        packed: The allocations that are put beside the one holder of their device.

    Raises:
        UniqueViolationError: a job already has a live allocation, or a device, or a part of it, a holder; or the device
            of a packed one has none, or two.
    """
    await connection.executemany(INSERT, gangs)
    claims = [
        (
            share["node_id"],
            device,
            gang.id,
            unit.get("uuid"),
            unit.get("parent"),
            unit.get("profile"),
            gang.id in packed,
        )
        for gang in gangs
        for share in gang.shares
        for units in [hosts[share["node_id"]].units or {}]
        for device in share["devices"]
        for unit in [units.get(str(device), StoredIdentity())]
    ]
    await connection.executemany(CLAIM, claims)


async def uuids(connection: Connection, allocation_id: str) -> dict[tuple[str, int], str]:
    """Return the UUIDs of a gang's devices, by node and device, as far as they were known when it got them."""
    rows = await connection.fetch(UUIDS, allocation_id)
    return {(row["node_id"], row["device"]): row["uuid"] for row in rows}


async def lost_slices(connection: Connection) -> set[str]:
    """Return the allocations that hold a slice that their node no longer has."""
    return {row["allocation_id"] for row in await connection.fetch(LOST_SLICES)}


async def stoppable(connection: Connection, job_ids: Sequence[str]) -> list[StoppableGang]:
    """Return the gangs of these jobs that are starting or running; their jobs are locked."""
    return await fetch_rows(connection, StoppableGang, STOPPABLE, list(job_ids))


async def lost_gpus(connection: Connection, allocation_id: str | None = None) -> dict[str, str]:
    """Return the allocations that hold a lost GPU, with a sentence on it; ``allocation_id`` limits this to one."""
    rows = await connection.fetch(LOST_GPUS, allocation_id)
    return {row["allocation_id"]: _on_lost(row["node_id"], row["gpu"], row["detail"]) for row in reversed(rows)}


def _on_lost(node_id: str, gpu: int, detail: str) -> str:
    return f"GPU {gpu} of {node_id} is out of service: {detail or 'its node no longer has it.'}"


async def stop(connection: Connection, allocation_id: str, reason: str, wait_s: float = 0.0) -> bool:
    """Record that a gang is to stop, after a wait at the latest; return whether it was starting or running."""
    return await connection.fetchval(STOP, allocation_id, reason, wait_s) is not None


async def hurry(connection: Connection, allocation_id: str | None = None) -> list[StoppableGang]:
    """Let a gang that is to stop after a wait, or every such gang, stop now; return those."""
    return await fetch_rows(connection, StoppableGang, HURRY, allocation_id)


async def give_up_asleep(connection: Connection, allocation_id: str, node_ids: Sequence[str]) -> set[str]:
    """End the shares of a gang on its nodes that are still booting, and release their devices; return these nodes.

    Under the node's lock: the answer to its next heartbeat does not name the gang.
    """
    waking = [record[0] for record in await connection.fetch(WAKING, list(node_ids))]
    if waking:
        await nodes.lock(connection, waking)
    asleep = {record[0] for record in await connection.fetch(GIVE_UP_ASLEEP, allocation_id, waking)}
    if asleep:
        await connection.execute(RELEASE_ON, allocation_id, list(asleep))
    return asleep


async def earlier(connection: Connection, job_id: str) -> dict[str, float]:
    """Return how many gangs of a job failed to start or lost their slice, and how long ago one lost a node or GPU."""
    return dict(await connection.fetchrow(EARLIER, job_id) or {})


async def end(connection: Connection, allocation_id: str, reason: str) -> float:
    """End a gang and release its devices; return the GPU seconds it held them for."""
    held_gpu_s = await connection.fetchval(END, allocation_id, reason)
    await connection.execute("DELETE FROM device_claims WHERE allocation_id = $1", allocation_id)
    return held_gpu_s


async def lose_nodes(connection: Connection, node_ids: Sequence[str], ended_by: str = "lost") -> None:
    """Give nodes up, with their shares of the gangs they hold devices for; the nodes' rows are locked.

    Args:
        connection: In a transaction.
        ended_by: How: ``lost`` (or drained, if they were), ``not_woken``, or ``stopped`` with the installation.
    """
    names = list(node_ids)
    await nodes.lose(connection, names)
    await connection.execute(TELL_LOST, names)
    await connection.execute(LOSE_SHARES, names, ended_by)
    # A node may run what it holds devices for: should it come back, the answer to its heartbeat names none of them.
    await connection.execute("DELETE FROM device_claims WHERE node_id = ANY($1::text[])", names)


async def address(connection: Connection, node_id: str) -> str:
    """Return where other nodes reach a node."""
    return await connection.fetchval("SELECT address FROM known_nodes WHERE id = $1", node_id)


async def lock(connection: Connection, allocation_id: str) -> None:
    """Lock an allocation until this transaction ends."""
    await connection.fetchval("SELECT id FROM allocations WHERE id = $1 FOR UPDATE", allocation_id)


async def lock_controlled(connection: Connection, job_ids: Collection[str]) -> list[ControlledGang]:
    """Lock and return the gangs of these jobs that are starting or running."""
    query = f"{CONTROLLED} WHERE a.job_id = ANY($1::text[]) AND a.state IN ('starting', 'running') "
    return await fetch_rows(connection, ControlledGang, query + "ORDER BY a.job_id FOR UPDATE", list(job_ids))


async def lock_controlled_at(connection: Connection, allocation_id: str, revision: int) -> ControlledGang | None:
    """Lock and return a live gang; None if its controls have changed since ``revision``."""
    query = f"{CONTROLLED} WHERE a.id = $1 AND a.settings_revision = $2 AND a.state <> 'ended' FOR UPDATE"
    return await fetch_row(connection, ControlledGang, query, allocation_id, revision)


async def set_controls(
    connection: Connection,
    allocation_id: str,
    values: Mapping[str, float | None],
    refused: Mapping[str, str],
    *,
    by_order: bool = False,
) -> int:
    """Write what a gang's devices are set to, by column, and what they refuse; return the new revision.

    Of a gang that an order of the grid sets, what its GPUs drew before is noted, until something else sets it.
    """
    columns = [values[name] for name in CONTROL_COLUMNS.values()]
    return await connection.fetchval(SET_CONTROLS, allocation_id, *columns, dict(refused), by_order)
