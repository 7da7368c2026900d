"""Heartbeats: what nodes say, and what they may run, decided under the locks of their rows; many at once.

Leases use the database's clock. ``lease_until`` counts from the start of the transaction, which is after the agents
sent their heartbeats and before they receive the answers: an agent's own deadline is never the later one. The scheduler
gives up a node under the same row lock, so that a heartbeat either renews the lease before that, or is answered that
the gangs are no longer the node's.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.contracts.nodes import Heartbeat, RankState, RankStatus, WantedPartition
from services.db.database import Connection, Database, dumps
from services.telemetry.repository import gpu_health
from services.telemetry.repository.credentials import sha256

Json = dict[str, Any]

_ORDER = {state: position for position, state in enumerate(RankState)}


@dataclass(slots=True)
class Renewal:
    """The result of a heartbeat."""

    allocations: list[str]  #: The gangs the node may run
    changed: str | None  #: What the scheduler should process: ``rank``, ``node``, or nothing
    partitions: list[WantedPartition]  #: How its GPUs are to be cut; none for a node that does not say how they are cut
    returned_faults: list[str]  #: The faults after which an operator has returned GPUs to service


# A node whose row somebody else has locked is left for later: nobody waits for it but itself.
_RENEW = """
WITH said AS (
    SELECT * FROM unnest($1::text[], $2::bytea[], $3::text[], $4::text[], $5::text[])
        AS s (id, token_sha256, boot_id, readings, closed)
), before AS (
    SELECT n.id, n.state, n.boot_id, n.closed, s.boot_id AS new_boot_id, s.readings::jsonb AS new_readings,
        s.closed AS new_closed
    FROM nodes n JOIN said s ON s.id = n.id AND s.token_sha256 = n.token_sha256 ORDER BY n.id FOR UPDATE OF n {wait}
)
UPDATE nodes SET
    silent_at = CASE WHEN lease_until < now() THEN lease_until ELSE silent_at END,
    state = 'up', boot_id = new_boot_id, readings = new_readings, closed = new_closed, heartbeat_at = now(),
    lease_until = least(greatest(lease_until, now() + make_interval(secs => $6)),
        clock_timestamp() + make_interval(secs => $6))
FROM before WHERE nodes.id = before.id
RETURNING nodes.id, before.state <> 'up' OR before.boot_id IS DISTINCT FROM new_boot_id
    OR (before.closed IS NULL) <> (new_closed IS NULL) AS changed
"""

# A share's state only ever advances: a repeated or overtaken heartbeat changes nothing.
_NOTE_RANKS = """
INSERT INTO rank_statuses AS known
    (allocation_id, node_id, state, exit_code, ended_by, detail, started_at, ended_at, holds_checkpoint)
SELECT a.id, r.node_id, r.state, r.exit_code, r.ended_by, r.detail, r.started_at, r.ended_at, r.holds_checkpoint
FROM unnest($1::text[], $2::text[], $3::text[], $4::int[], $5::text[], $6::text[], $7::timestamptz[], $8::timestamptz[],
        $9::bool[])
    AS r (node_id, allocation_id, state, exit_code, ended_by, detail, started_at, ended_at, holds_checkpoint)
JOIN gangs a ON a.id = r.allocation_id
    AND a.shares @> jsonb_build_array(jsonb_build_object('node_id', r.node_id))
ORDER BY a.id, r.node_id
ON CONFLICT (allocation_id, node_id) DO UPDATE SET
    state = excluded.state, exit_code = excluded.exit_code, ended_by = excluded.ended_by, detail = excluded.detail,
    started_at = coalesce(excluded.started_at, known.started_at), ended_at = excluded.ended_at,
    holds_checkpoint = excluded.holds_checkpoint, updated_at = now()
WHERE array_position($10::text[], excluded.state) > array_position($10::text[], known.state)
RETURNING node_id
"""

_PROGRESS = ("allocation_id", "progress_done", "progress_total", "noise_scale", "saved_at", "save_s")
_NOTED = ("allocation_id", "state", "exit_code", "ended_by", "detail", "started_at", "ended_at", "holds_checkpoint")
# What a node made of its gangs' controls; it may say less than before, for a gang that is over has none.
_NOTE_SETTINGS = """
UPDATE rank_statuses s SET settings = r.settings
FROM unnest($1::text[], $2::text[], $3::jsonb[]) AS r (node_id, allocation_id, settings)
WHERE s.allocation_id = r.allocation_id AND s.node_id = r.node_id AND s.settings IS DISTINCT FROM r.settings
RETURNING s.node_id
"""

# Who listens on the ports of servers.
_NOTE_LISTENERS = """
UPDATE rank_statuses s SET listener = r.listener
FROM unnest($1::text[], $2::text[], $3::text[]) AS r (node_id, allocation_id, listener)
WHERE s.allocation_id = r.allocation_id AND s.node_id = r.node_id AND s.listener IS DISTINCT FROM r.listener
"""

# What the devices were really set to, and since when: a line per change, as it was first reported.
_RECORD_SETTINGS = """
INSERT INTO settings_in_force (allocation_id, node_id, revision, power_limit_w, clock_mhz, refused, enforced_w, since)
SELECT s.allocation_id, s.node_id, (s.settings ->> 'revision')::int, (s.settings ->> 'power_limit_w')::float8,
       (s.settings ->> 'clock_mhz')::int, s.settings -> 'refused', s.settings -> 'enforced_w',
       (s.settings ->> 'since')::timestamptz
FROM rank_statuses s JOIN unnest($1::text[], $2::text[]) AS r (node_id, allocation_id) USING (node_id, allocation_id)
WHERE s.settings ->> 'since' IS NOT NULL
ON CONFLICT DO NOTHING
"""

# A minute is sent with every heartbeat while it lasts; the report with the most decisions counts. Of a minute in which
# the agent was replaced, that is the longer part.
_NOTE_CLOCKS = """
INSERT INTO server_clocks AS known
    (job_id, node_id, start_at, policy, dry_run, decisions, exceeded, unobserved, mean_mhz, lowest_mhz, highest_mhz,
     last_mhz, model_error, unused)
SELECT DISTINCT ON (a.job_id, r.start_at) a.job_id, $1, r.start_at, r.policy, r.dry_run, r.decisions, r.exceeded,
    r.unobserved, r.mean_mhz, r.lowest_mhz, r.highest_mhz, r.last_mhz, r.model_error, r.unused
FROM jsonb_to_recordset($2) AS r (allocation_id text, start_at timestamptz, policy text, dry_run boolean,
    decisions int, exceeded int, unobserved int, mean_mhz float8, lowest_mhz float8, highest_mhz float8,
    last_mhz float8, model_error float8, unused text)
JOIN gangs a ON a.id = r.allocation_id
    AND a.shares @> jsonb_build_array(jsonb_build_object('node_id', $1::text))
ORDER BY a.job_id, r.start_at, r.decisions DESC
ON CONFLICT (job_id, start_at, node_id) DO UPDATE SET
    policy = excluded.policy, dry_run = excluded.dry_run, decisions = excluded.decisions, exceeded = excluded.exceeded,
    unobserved = excluded.unobserved, mean_mhz = excluded.mean_mhz, lowest_mhz = excluded.lowest_mhz,
    highest_mhz = excluded.highest_mhz, last_mhz = excluded.last_mhz, model_error = excluded.model_error,
    unused = excluded.unused
WHERE excluded.decisions > known.decisions
"""

_NOTE_PROGRESS = """
INSERT INTO job_progress AS known (job_id, done, total, noise_scale, saved_at, save_s, save_every_s)
SELECT a.job_id, max(r.done), max(r.total), max(r.noise_scale), max(r.saved_at), max(r.save_s),
       extract(epoch FROM max(r.saved_at) - max(a.running_at))
FROM unnest($1::text[], $2::text[], $3::float8[], $4::float8[], $5::float8[], $6::timestamptz[], $7::float8[])
    AS r (node_id, allocation_id, done, total, noise_scale, saved_at, save_s)
JOIN gangs a ON a.id = r.allocation_id
    AND a.shares @> jsonb_build_array(jsonb_build_object('node_id', r.node_id))
GROUP BY a.job_id ORDER BY a.job_id
ON CONFLICT (job_id) DO UPDATE SET
    done = greatest(known.done, excluded.done), total = coalesce(excluded.total, known.total),
    noise_scale = coalesce(excluded.noise_scale, known.noise_scale), updated_at = now(),
    saved_at = greatest(known.saved_at, excluded.saved_at), save_s = coalesce(excluded.save_s, known.save_s),
    save_every_s = CASE WHEN excluded.saved_at > coalesce(known.saved_at, '-infinity') THEN nullif(greatest(
        least(excluded.save_every_s, extract(epoch FROM excluded.saved_at - known.saved_at)), 0), 0)
        ELSE known.save_every_s END
WHERE excluded.done > known.done OR (excluded.total IS NOT NULL AND excluded.total IS DISTINCT FROM known.total)
    OR (excluded.noise_scale IS NOT NULL AND excluded.noise_scale IS DISTINCT FROM known.noise_scale)
    OR excluded.saved_at > coalesce(known.saved_at, '-infinity')
"""

_LIVE_HERE = "SELECT node_id, allocation_id FROM node_gangs WHERE node_id = ANY($1::text[]) ORDER BY 1, 2"

# An agent reports every share it has until it is asked to forget it. One that it had and no longer reports, though it
# has been up for longer than any lease it may have left behind, is gone with its state.
_GONE = """
UPDATE rank_statuses s SET
    state = 'exited', ended_by = 'host', detail = 'Its node does not know of it any more.', updated_at = now()
FROM nodes n
WHERE n.id = $1 AND s.node_id = $1 AND s.allocation_id = ANY($2::text[]) AND s.state <> 'exited'
    AND greatest(n.registered_at, s.updated_at) < now() - make_interval(secs => 2 * $3::float8)
RETURNING s.allocation_id
"""

# How far a node is with what is wanted of its GPUs; what it says of an earlier revision is out of date.
_NOTE_PARTITIONS = """
UPDATE gpu_partitions p SET
    state = r.state, detail = r.detail, applied_at = CASE WHEN r.state = 'applied' THEN now() ELSE p.applied_at END
FROM unnest($2::int[], $3::bigint[], $4::text[], $5::text[]) AS r (gpu, revision, state, detail)
WHERE p.node_id = $1 AND p.gpu = r.gpu AND p.revision = r.revision AND (p.state, p.detail) <> (r.state, r.detail)
RETURNING p.gpu
"""

# The agent of a node that cuts nothing is not asked: a GPU that is to be as it is, is, once nothing runs on it.
_NOTE_UNCUT = """
WITH found AS (
    SELECT p.node_id, p.gpu, p.sizes = (
        SELECT coalesce(jsonb_agg(coalesce(d -> 'sevenths', '7') ORDER BY (d ->> 'start')::int), '[]')
        FROM jsonb_array_elements(n.devices) d WHERE (d ->> 'parent')::int = p.gpu
    ) AS is_so
    FROM gpu_partitions p JOIN nodes n ON n.id = p.node_id
    WHERE p.node_id = ANY($1::text[]) AND p.state IN ('pending', 'busy') AND NOT EXISTS (
        SELECT FROM held_devices c WHERE c.node_id = p.node_id AND c.gpu = p.gpu)
)
UPDATE gpu_partitions p SET
    state = CASE WHEN found.is_so THEN 'applied' ELSE 'failed' END,
    detail = CASE WHEN found.is_so THEN '' ELSE 'The agent of this node cannot cut GPUs.' END,
    applied_at = CASE WHEN found.is_so THEN now() END
FROM found WHERE p.node_id = found.node_id AND p.gpu = found.gpu
RETURNING p.node_id
"""

_WANTED_PARTITIONS = "SELECT gpu, revision, sizes FROM gpu_partitions WHERE node_id = $1 ORDER BY gpu"

Beat = tuple[str, Heartbeat]  #: A node's token, and what it says


async def renew(
    database: Database, beats: Mapping[str, Beat], lease_ttl_s: float, *, wait: bool = True
) -> dict[str, Renewal]:
    """Store heartbeats and renew the leases of their nodes, in one transaction.

    Args:
        wait: Whether to wait for nodes that somebody else has locked.

    Returns:
        The result by node; none for a node whose token is another, or that was not waited for.
    """
    ordered = sorted(beats)
    said = [
        (sha256(token), beat.boot_id, dumps([each.model_dump(mode="json") for each in beat.devices]), beat.closed)
        for token, beat in (beats[node] for node in ordered)
    ]
    async with database.transaction() as connection:
        renew_them = _RENEW.format(wait="" if wait else "SKIP LOCKED")
        renewed = await connection.fetch(renew_them, ordered, *_columns(said), lease_ttl_s)
        results = {row["id"]: Renewal([], "node" if row["changed"] else None, [], []) for row in renewed}
        heard = {node: beats[node][1] for node in sorted(results)}
        if heard:
            await _note_ranks(connection, heard, results)
            await _note_partitions(connection, heard, results)
            await _name_gangs(connection, heard, results, lease_ttl_s)
            faults = {node: beat.gpu_faults for node, beat in heard.items() if beat.gpu_faults is not None}
            for node in await gpu_health.worth_a_note(connection, faults):
                has_changed, results[node].returned_faults = await gpu_health.note(connection, node, faults[node])
                results[node].changed = results[node].changed or ("node" if has_changed else None)
    return results


async def _note_ranks(connection: Connection, heard: Mapping[str, Heartbeat], results: Mapping[str, Renewal]) -> None:
    ranks = [(node, rank) for node, beat in heard.items() for rank in _newest(beat.ranks)]
    if not ranks:
        return
    columns = _columns((node, *(getattr(rank, name) for name in _NOTED)) for node, rank in ranks)
    changed = await connection.fetch(_NOTE_RANKS, *columns, list(RankState))
    listeners = [(node, rank.allocation_id, rank.listener.value) for node, rank in ranks if rank.listener]
    if listeners:
        await connection.execute(_NOTE_LISTENERS, *_columns(listeners))
    settings = [
        (node, rank.allocation_id, rank.settings.model_dump(mode="json")) for node, rank in ranks if rank.settings
    ]
    if settings:
        names, gangs, values = _columns(settings)
        if found := await connection.fetch(_NOTE_SETTINGS, names, gangs, values):
            changed += found
            await connection.execute(_RECORD_SETTINGS, names, gangs)
    for row in changed:
        results[row["node_id"]].changed = "rank"
    progress = [
        (node, *(getattr(rank, name) for name in _PROGRESS)) for node, rank in ranks if rank.progress_done is not None
    ]
    if progress:
        await connection.execute(_NOTE_PROGRESS, *_columns(progress))
    clocks: defaultdict[str, list[Json]] = defaultdict(list)
    for node, rank in ranks:
        clocks[node] += [{"allocation_id": rank.allocation_id, **each.model_dump(mode="json")} for each in rank.clocks]
    for node, rows in clocks.items():
        if rows:
            await connection.execute(_NOTE_CLOCKS, node, rows)


async def _note_partitions(
    connection: Connection, heard: Mapping[str, Heartbeat], results: Mapping[str, Renewal]
) -> None:
    uncut: list[str] = []
    for node, beat in heard.items():
        if beat.partitions is None:
            uncut.append(node)
            continue
        said = [(each.gpu, each.revision, each.state, each.detail) for each in beat.partitions]
        if said and await connection.fetch(_NOTE_PARTITIONS, node, *_columns(said)):
            results[node].changed = results[node].changed or "node"
        found = await connection.fetch(_WANTED_PARTITIONS, node)
        results[node].partitions = [WantedPartition.model_validate(dict(record)) for record in found]
    for row in await connection.fetch(_NOTE_UNCUT, uncut) if uncut else ():
        results[row["node_id"]].changed = results[row["node_id"]].changed or "node"


async def _name_gangs(
    connection: Connection, heard: Mapping[str, Heartbeat], results: Mapping[str, Renewal], lease_ttl_s: float
) -> None:
    for row in await connection.fetch(_LIVE_HERE, [*heard]):
        results[row["node_id"]].allocations.append(row["allocation_id"])
    for node, beat in heard.items():
        unsaid = sorted({*results[node].allocations} - {rank.allocation_id for rank in beat.ranks})
        if unsaid and await connection.fetch(_GONE, node, unsaid, lease_ttl_s):
            results[node].changed = "rank"


def _newest(ranks: list[RankStatus]) -> list[RankStatus]:
    """Return the furthest status of each allocation, ordered by id so that locks are taken in that order too."""
    furthest: dict[str, RankStatus] = {}
    for rank in ranks:
        known = furthest.get(rank.allocation_id)
        if known is None or _ORDER[rank.state] > _ORDER[known.state]:
            furthest[rank.allocation_id] = rank
    return [furthest[allocation_id] for allocation_id in sorted(furthest)]


def _columns(rows: Iterable[tuple[object, ...]]) -> list[list[Any]]:
    """Return rows, of which there must be some, column by column, as ``unnest`` needs them."""
    return [list(column) for column in zip(*rows, strict=True)]
