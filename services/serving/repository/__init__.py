"""All SQL of serving, by subject. Queries return typed records and run in the caller's transaction.

``ServingRepository`` begins transactions; ``cluster`` reads the inputs of a plan, on a connection of its own.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from sqlalchemy import TextClause, insert, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.contracts.identity import Identity
from services.db.tables import audit_log
from services.kit.presence import Presence
from services.serving.repository.apps import AppRows
from services.serving.repository.batch_work import BatchWorkRows
from services.serving.repository.batches import BatchRows
from services.serving.repository.fleets import FleetRows
from services.serving.repository.instances import ClockRows, InstanceRows
from services.serving.repository.plans import PlanRows
from services.serving.repository.pools import PoolRows, TrafficRows
from services.serving.repository.routing import EndpointRows, RoutingRows

_IS_ANY = text("SELECT EXISTS (SELECT FROM pools) OR EXISTS (SELECT FROM fleets) OR EXISTS (SELECT FROM apps)")
"""Those that are deleted and still kept count: something of them may run."""
_IS_ANY_BATCH = text("SELECT EXISTS (SELECT FROM batches) OR EXISTS (SELECT FROM batch_files)")


class Queries:
    """Queries within one transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self.pools, self.plans, self.traffic = PoolRows(connection), PlanRows(connection), TrafficRows(connection)
        self.instances, self.clocks = InstanceRows(connection), ClockRows(connection)
        self.routing, self.endpoints = RoutingRows(connection), EndpointRows(connection)
        self.fleets, self.apps = FleetRows(connection), AppRows(connection)
        self.batches, self.batch_work = BatchRows(connection), BatchWorkRows(connection)

    async def now(self) -> datetime:
        return (await self.connection.execute(text("SELECT now()"))).scalar_one()

    async def audit(self, caller: Identity, action: str, target: str, **data: Any) -> None:
        """Record what somebody did."""
        values = {"tenant_id": caller.tenant_id, "key_id": caller.key_id, "action": action, "target": target}
        await self.connection.execute(insert(audit_log).values(**values, data=data))


class ServingRepository:
    """The tables of pools."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.presence = Presence(lambda: self._is_any(_IS_ANY))  #: What loops wait on while there is nothing to manage
        self.batch_presence = Presence(lambda: self._is_any(_IS_ANY_BATCH))  #: The same for files and batches

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[Queries]:
        """Yield queries in a transaction that is not committed."""
        async with self._engine.connect() as connection:
            yield Queries(connection)

    @asynccontextmanager
    async def writing(self) -> AsyncGenerator[Queries]:
        """Yield queries in a transaction that commits at the end of the block, or not at all."""
        async with self._engine.begin() as connection:
            yield Queries(connection)
        self.presence.written.set()
        self.batch_presence.written.set()

    async def _is_any(self, query: TextClause) -> bool:
        async with self._engine.connect() as connection:
            return bool((await connection.execute(query)).scalar_one())
