"""Faults of single GPUs: what nodes report of them, and what operators do about them."""

from collections.abc import Mapping

from services.contracts.identity import Identity
from services.contracts.nodes import GpuFault
from services.db import audit
from services.db.database import Connection, Database

# A fault after which an operator has returned the GPU counts no more: the node is told, and forgets it.
_NOTE = """
INSERT INTO gpu_health AS known (node_id, gpu, uuid, fault_id, cause, detail, since, ends_gangs, lasts)
SELECT $1, f.gpu, f.uuid, f.id, f.cause, f.detail, f.since, f.ends_gangs, f.lasts
  FROM jsonb_to_recordset($2) AS f (gpu int, uuid text, id text, cause text, detail text, since timestamptz,
                                    ends_gangs boolean, lasts boolean)
ON CONFLICT (node_id, gpu) DO UPDATE SET
    uuid = excluded.uuid, fault_id = excluded.fault_id, cause = excluded.cause, detail = excluded.detail,
    since = excluded.since, ends_gangs = excluded.ends_gangs, lasts = excluded.lasts
 WHERE known.returned_fault_id IS DISTINCT FROM excluded.fault_id
   AND (known.fault_id, known.detail, known.lasts) IS DISTINCT FROM
       (excluded.fault_id, excluded.detail, excluded.lasts)
RETURNING gpu, fault_id, cause, detail, lasts
"""

_WELL = """
UPDATE gpu_health SET fault_id = NULL, cause = NULL, detail = '', since = NULL, ends_gangs = false, lasts = false
 WHERE node_id = $1 AND cause IS NOT NULL AND gpu <> ALL($2::int[])
RETURNING gpu
"""

_FORGET_RETURNED = """
UPDATE gpu_health SET returned_fault_id = NULL WHERE node_id = $1 AND returned_fault_id <> ALL($2::text[])
"""

_KNOWN_FAULTS = "SELECT fault_id FROM gpu_health WHERE node_id = $1 AND fault_id IS NOT NULL"

_RETURNED = "SELECT returned_fault_id FROM gpu_health WHERE node_id = $1 AND returned_fault_id IS NOT NULL ORDER BY 1"

_NOT_WELL = """
SELECT DISTINCT node_id FROM gpu_health
 WHERE node_id = ANY($1::text[]) AND (fault_id IS NOT NULL OR cause IS NOT NULL OR returned_fault_id IS NOT NULL)
"""

# Another board in the place of one: nothing is known against it.
REPLACED = """
DELETE FROM gpu_health h USING nodes n, jsonb_array_elements(n.devices) d
 WHERE h.node_id = $1 AND n.id = $1 AND (d ->> 'index')::int = h.gpu AND d ->> 'uuid' <> h.uuid
"""

_DRAIN = """
INSERT INTO gpu_health AS known (node_id, gpu, uuid, drained) VALUES ($1, $2, $3, true)
ON CONFLICT (node_id, gpu) DO UPDATE SET drained = true WHERE NOT known.drained
RETURNING gpu
"""

_RETURN = """
UPDATE gpu_health SET drained = false, returned_fault_id = coalesce(fault_id, returned_fault_id),
       fault_id = NULL, cause = NULL, detail = '', since = NULL, ends_gangs = false
 WHERE node_id = $1 AND gpu = $2 AND NOT lasts AND (drained OR cause IS NOT NULL)
RETURNING gpu
"""

_LASTS = "SELECT detail FROM gpu_health WHERE node_id = $1 AND gpu = $2 AND lasts AND cause IS NOT NULL"


async def worth_a_note(connection: Connection, faults: Mapping[str, list[GpuFault]]) -> list[str]:
    """Return the nodes that have faults, reported now or known from before; nothing changes for the others."""
    if not faults:
        return []
    known = await connection.fetch(_NOT_WELL, [*faults])
    return sorted({node for node, found in faults.items() if found} | {row["node_id"] for row in known})


async def note(connection: Connection, node_id: str, faults: list[GpuFault]) -> tuple[bool, list[str]]:
    """Store the faults that a node reports of its GPUs.

    Args:
        connection: In the transaction of the heartbeat, with the node's row locked.
        faults: All present faults, the worst of each GPU; if one has several, the last counts.

    Returns:
        Whether a GPU was taken out of service or is back in it, and the faults that no longer count.
    """
    faults = list({fault.gpu: fault for fault in faults}.values())
    known = {record["fault_id"] for record in await connection.fetch(_KNOWN_FAULTS, node_id)}
    stored = await connection.fetch(_NOTE, node_id, [fault.model_dump(mode="json") for fault in faults])
    new = [record for record in stored if record["fault_id"] not in known]
    for record in new:
        data = {name: record[name] for name in ("gpu", "cause", "detail")}
        await audit.note(connection, None, "gpu.quarantined", node_id, **data)
    well = await connection.fetch(_WELL, node_id, [fault.gpu for fault in faults])
    for record in well:
        await audit.note(connection, None, "gpu.recovered", node_id, gpu=record["gpu"])
    returned = [record["returned_fault_id"] for record in await connection.fetch(_RETURNED, node_id)]
    if returned:
        await connection.execute(_FORGET_RETURNED, node_id, [fault.id for fault in faults])
    return bool(new or well), returned


async def drain(database: Database, node_id: str, gpu: int, uuid: str, operator: Identity) -> bool:
    """Take a GPU out of service, and record who did; return whether that changed anything."""
    async with database.transaction() as connection:
        if await connection.fetchval(_DRAIN, node_id, gpu, uuid) is None:
            return False
        await audit.note(connection, operator, "gpu.drain", node_id, gpu=gpu)
    return True


async def resume(database: Database, node_id: str, gpu: int, operator: Identity) -> tuple[bool, str]:
    """Return a GPU to service, and record who did.

    Returns:
        Whether that changed anything, and the lasting fault that prevents its return, if any.
    """
    async with database.transaction() as connection:
        if lasting := await connection.fetchval(_LASTS, node_id, gpu):
            return False, lasting
        if await connection.fetchval(_RETURN, node_id, gpu) is None:
            return False, ""
        await audit.note(connection, operator, "gpu.resume", node_id, gpu=gpu)
    return True, ""
