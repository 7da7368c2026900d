"""Make a database that was restored from a backup fit to be scheduled: ``python -m services.scheduler.restored``.

It needs ``DATABASE_URL``, and runs after the restore and the migrations, before the first scheduler; `wattshift
restore` runs it. What ran when the backup was made is lost, as if the leases of its nodes had expired, and is queued
again. Jobs that had not ended get new numbers for their gangs (``GENERATIONS``), since agents may know of gangs that
were started after the backup. Running it twice does no harm.
"""

import asyncio
import os

from services.core.domain.jobs import GENERATIONS
from services.db.database import Database
from services.kit.settings import NOT_POSTGRES, exit_with, is_postgres
from services.scheduler.repository import rounds


async def make_fit(database: Database) -> int:
    """Give up everything that ran when the backup was made; return how many gangs that were."""
    return await database.in_transaction(rounds.make_fit, GENERATIONS)


async def _main(database_url: str) -> None:
    database = await Database.open(database_url, size=1, application_name="restored")
    try:
        print(await make_fit(database))
    finally:
        await database.close()


def main() -> None:
    """Print how many gangs were given up; exit 2 if ``DATABASE_URL`` names no PostgreSQL database."""
    url = os.environ.get("DATABASE_URL", "")
    if not is_postgres(url):
        exit_with(NOT_POSTGRES)
    asyncio.run(_main(url))


if __name__ == "__main__":
    main()
