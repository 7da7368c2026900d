"""What serving does by itself, now and then: it corrects times in the future, and forgets what is past its time."""

from services.kit.logging import Log
from services.kit.repeating import each_apart
from services.serving.repository import ServingRepository
from services.serving.repository.retention import FORGET
from services.serving.repository.set_back import set_right
from services.serving.settings import ServingSettings

log = Log(__name__)


async def rectify(repository: ServingRepository) -> int:
    """Keep pools and fleets going after the database's clock was set back; return how many rows had to be changed."""
    async with repository.writing() as queries:
        changed = await set_right(queries.connection)
    if changed:
        log.warning("rectifier.clock_was_set_back", rows=changed)
    return changed


async def forget(repository: ServingRepository, settings: ServingSettings) -> None:
    """Delete what is past its retention."""
    days = {"days": settings.keep_days, "traffic_days": settings.traffic_keep_days}

    async def delete(what: str) -> None:
        async with repository.writing() as queries:
            deleted = (await queries.connection.execute(FORGET[what], days)).rowcount
        if deleted:
            log.info("serving.forgotten", what=what, rows=deleted)

    await each_apart(FORGET, delete, failed="serving.not_forgotten")
