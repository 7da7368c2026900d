"""The database queries of backup and restore."""

import asyncpg
import asyncpg.exceptions

from services.db.database import plain_url
from services.standalone.process import BadInputError, StackError

_TABLES = "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'public'"


async def schema(url: str) -> str:
    """Return the revision of the tables; ``BadInputError`` if there are none of ours, or ``StackError``."""
    try:
        return str(await _ask(url, "SELECT version_num FROM alembic_version"))
    except asyncpg.exceptions.UndefinedTableError:
        raise BadInputError("the database has no tables of Wattshift") from None


async def check_empty(url: str) -> None:
    """Check that the database has no tables; ``BadInputError`` if it has some, or ``StackError``."""
    if await _ask(url, _TABLES):
        raise BadInputError("the database has tables already: name an empty one by DATABASE_URL; nothing was changed")


async def _ask(url: str, query: str) -> object:
    try:
        connection = await asyncpg.connect(plain_url(url), timeout=10)
    except ValueError as error:
        raise BadInputError(str(error)) from None
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise StackError(f"the database does not answer: {str(error) or type(error).__name__}") from error
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()
