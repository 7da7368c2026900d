"""What operators do with cells: name them, drain them, remove them."""

import asyncio
from contextlib import suppress

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.cells.remote import Reach, RemoteCell, headers_of
from services.admission.repository.access import AccessRepository, write_audit
from services.admission.repository.cells import CellRepository, CellRow
from services.admission.secrets import no_key
from services.contracts.cells import Cell, CellChange, CellList, CellSpec
from services.contracts.identity import Identity, Role
from services.kit.ids import new_id
from services.kit.problems import ProblemError, conflict, found, invalid, not_found


class Cells:
    """Manages the cells of an installation."""

    def __init__(self, engine: AsyncEngine, reach: Reach) -> None:
        self._engine, self._reach = engine, reach

    async def list(self) -> CellList:
        async with self._engine.connect() as connection:
            return CellList(items=await CellRepository(connection).listed())

    async def get(self, name: str) -> Cell:
        async with self._engine.connect() as connection:
            return found(await CellRepository(connection).find(name), "cell")

    async def add(self, caller: Identity, spec: CellSpec) -> Cell:
        """Add a cell that answers to the key, and note who did.

        Raises:
            ProblemError: 409 if there is one of this name, or no key to seal with; 422 if the key is refused there, or
                is not a user's, or if it is this installation or one of its cells, at whatever address; 503 if the
                cell does not answer.
        """
        if not self._reach.sealer.has_key:
            raise no_key()
        url = spec.url.rstrip("/")
        remote = RemoteCell(self._reach.session, url, spec.name, headers_of(spec.key))
        try:
            whose = await remote.who_am_i()
        except ProblemError as error:
            if error.status >= 500:
                raise
            raise invalid("/key", f"The cell refuses it: {error.detail}") from error
        if whose.role is not Role.USER:
            raise invalid("/key", f"It is a key of the role {whose.role}. A home needs one of the role user alone.")
        await self._check_is_new(whose.installation)
        values = {"tenant_id": whose.tenant_id, "project": whose.project, "home": new_id("home")}
        async with self._engine.begin() as connection:
            key = self._reach.seal(spec.name, spec.key)
            if not await CellRepository(connection).add(name=spec.name, url=url, key=key, **values):
                raise conflict(f"There is a cell {spec.name}.")
            await write_audit(connection, caller, "cell.added", spec.name, url=url, tenant=whose.tenant_id)
        return await self.get(spec.name)

    async def _check_is_new(self, installation: str | None) -> None:
        async with self._engine.connect() as connection:
            own, rows = await AccessRepository(connection).installation(), await CellRepository(connection).cells()
        if installation is None:  # it is of an earlier release
            return
        if installation == own:
            raise invalid("/url", "It is this installation itself.")
        for row, known in zip(rows, await asyncio.gather(*map(self._installation_of, rows)), strict=True):
            if known == installation:
                raise invalid("/url", f"It is cell {row.name} already.")

    async def _installation_of(self, row: CellRow) -> str | None:
        with suppress(ProblemError):
            return (await self._reach.cell(row.name, row.url, row.key).who_am_i()).installation
        return None

    async def change(self, caller: Identity, name: str, change: CellChange) -> Cell:
        """Drain a cell, or use it again, and note who did."""
        async with self._engine.begin() as connection:
            repository = CellRepository(connection)
            if not await repository.lock_cell(name):
                raise not_found("cell")
            await repository.drain(name, change.draining)
            await write_audit(connection, caller, "cell.drained" if change.draining else "cell.undrained", name)
        return await self.get(name)

    async def remove(self, caller: Identity, name: str, *, lost: bool) -> None:
        """Remove a cell that has no jobs of this installation, or ``lost`` ones, and note who did.

        Raises:
            ProblemError: 409 if it still has jobs.
        """
        async with self._engine.begin() as connection:
            repository = CellRepository(connection)
            if not await repository.lock_cell(name):
                raise not_found("cell")
            for given in await repository.given(name) if lost else ():
                detail = f"Cell {name} is lost, by the word of an operator; it begins anew."
                await repository.back(given.job_id, given.attempt, detail)
            if not await repository.remove(name):
                raise conflict(
                    f"Cell {name} still has jobs of this installation. Drain it and wait until they have ended, or "
                    "state that it is lost."
                )
            await write_audit(connection, caller, "cell.removed", name, lost=lost)
