"""Has pools, fleets and their instances go on when the database's clock was ahead and has been set back."""

from __future__ import annotations

from services.kit.logging import Log
from services.kit.repeating import repeat
from services.serving.repository import ServingRepository
from services.serving.repository.set_back import EVERY_S, rectify

log = Log(__name__)


class Rectifier:
    """Looks for times that are yet to come, and brings them back."""

    def __init__(self, repository: ServingRepository) -> None:
        self._repository = repository

    async def run(self) -> None:
        """Repeat until cancelled; a turn that fails (the database is away) is left to the next."""
        await repeat(self.look, EVERY_S, failed="rectifier.not_looked", when=self._repository.presence.wait)

    async def look(self) -> int:
        """Return the number of rows that said something of a time to come, and no longer do."""
        async with self._repository.writing() as queries:
            changed = await rectify(queries.connection)
        if changed:
            log.warning("rectifier.clock_was_set_back", rows=changed)
        return changed
