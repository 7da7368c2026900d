"""How GPUs are to be cut: what telemetry wants for operators, and serving for fleets.

A row says what is wanted; its node carries it out when no gang runs on the GPU, and telemetry stores the progress.
Until then nothing is placed on the GPU. Requesting what is already wanted changes nothing, so it may be done twice.
"""

from collections.abc import Sequence
from typing import NamedTuple

from services.db.database import Connection
from services.db.rows import fetch_row

_LOCKED = "SELECT sizes, owner, state FROM gpu_partitions WHERE node_id = $1 AND gpu = $2 FOR UPDATE"

WANT = """
INSERT INTO gpu_partitions AS known (node_id, gpu, revision, sizes, owner) VALUES ($1, $2, 1, $3, $4)
ON CONFLICT (node_id, gpu) DO UPDATE SET
    revision = known.revision + 1, sizes = excluded.sizes, owner = excluded.owner, state = 'pending', detail = '',
    wanted_at = now(), applied_at = NULL
WHERE known.owner IS NOT DISTINCT FROM excluded.owner OR known.owner IS NULL AND known.sizes = '[]'
RETURNING revision
"""

RELEASE = """
UPDATE gpu_partitions SET
    owner = NULL, revision = revision + cut::int, sizes = '[]', state = CASE WHEN cut THEN 'pending' ELSE state END,
    detail = CASE WHEN cut THEN '' ELSE detail END, wanted_at = CASE WHEN cut THEN now() ELSE wanted_at END,
    applied_at = CASE WHEN cut THEN NULL ELSE applied_at END
FROM (SELECT sizes <> '[]' OR state <> 'applied' AS cut FROM gpu_partitions WHERE node_id = $1 AND gpu = $2) was
WHERE node_id = $1 AND gpu = $2 AND owner = $3
RETURNING revision
"""


class _Wanted(NamedTuple):
    sizes: list[int]
    owner: str | None
    state: str


async def want(connection: Connection, node_id: str, gpu: int, sizes: Sequence[int], owner: str | None) -> bool:
    """Request that a GPU be cut like this, for a fleet or, without an owner, for an operator.

    Return False if the GPU belongs to somebody else. A fleet may take a GPU that nobody owns and that is to be whole.
    What failed is tried again.

    Args:
        connection: In a transaction.
        sizes: Slices in sevenths, in the order of their places (``core.domain.mig.placed``); empty: whole.
        owner: The fleet's name.
    """
    known = await fetch_row(connection, _Wanted, _LOCKED, node_id, gpu)
    if known is not None and known.state != "failed" and (known.sizes, known.owner) == (list(sizes), owner):
        return True
    return await connection.fetchval(WANT, node_id, gpu, list(sizes), owner) is not None


async def release(connection: Connection, node_id: str, gpu: int, owner: str) -> bool:
    """Give a fleet's GPU back, so that it is made whole; return whether it was the fleet's."""
    return await connection.fetchval(RELEASE, node_id, gpu, owner) is not None
