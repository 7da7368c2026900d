"""Turns of planners over the GPUs that they share.

A planner that plans for GPUs of a model in a zone holds an advisory lock of the database for them: from before it reads
who has them until its plan is written, where the next planner sees it. The lock belongs to a connection, so it ends
with the process that holds it, however that ends.
"""

import asyncio

from services.contracts.serving import PoolSpec
from services.db.database import Connection, connect

NAMESPACE = "serving-plan"
LOCK = "SELECT pg_advisory_lock(hashtextextended($1, 0))"


class Turn:
    """A planner's turn."""

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url
        self._connection: Connection | None = None

    async def take(self, spec: PoolSpec, within_s: float) -> bool:
        """Wait until it is this planner's turn for all GPUs that a pool may use; return whether it came in time."""
        await self.end()
        self._connection = await connect(self._database_url, application_name="serving-turn")
        try:
            async with asyncio.timeout(within_s):
                for gpus in shared_gpus(spec):
                    await self._connection.execute(LOCK, f"{NAMESPACE}:{gpus}", timeout=within_s)
        except TimeoutError:
            await self.end()
            return False
        return True

    async def end(self) -> None:
        """Let the next planner have its turn; do nothing if this one has none."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()  # nothing is written on it, and it may be waiting for a lock


def shared_gpus(spec: PoolSpec) -> list[str]:
    """Return the GPUs that a pool shares with others, by zone and model, in the same order for all pools."""
    return sorted({f"{place.zone}:{mode.gpu_model}" for place in spec.places for mode in spec.modes})
