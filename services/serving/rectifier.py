"""Keeps pools, fleets and their instances going after the database's clock was ahead and has been set back."""

from services.kit.logging import Log
from services.kit.repeating import repeat
from services.serving.repository import ServingRepository
from services.serving.repository.set_back import EVERY_S, rectify

log = Log(__name__)


class Rectifier:
    """Looks for times in the future, and moves them to the recent past."""

    def __init__(self, repository: ServingRepository) -> None:
        self._repository = repository

    async def run(self) -> None:
        """Repeat until cancelled; if a turn fails (the database is away), the next one tries again."""
        await repeat(self.look, EVERY_S, failed="rectifier.not_looked", when=self._repository.presence.wait)

    async def look(self) -> int:
        """Correct all rows with times in the future, and return how many there were."""
        async with self._repository.writing() as queries:
            changed = await rectify(queries.connection)
        if changed:
            log.warning("rectifier.clock_was_set_back", rows=changed)
        return changed
