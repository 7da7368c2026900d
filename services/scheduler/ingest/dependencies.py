"""Dependencies that can no longer be met: their jobs are cancelled, and then the jobs that depend on those.

Nothing about this is stored beforehand: every look derives it from the states of jobs, so that a scheduler that is
killed between the end of a job and this step misses nothing.
"""

from collections.abc import Hashable

from services.core.cycle.gates import never_met
from services.core.domain.dependencies import Verdict
from services.core.domain.reasons import Reason
from services.db.database import Database
from services.kit.logging import Log
from services.scheduler.repository import gates

log = Log(__name__)


async def look(database: Database) -> Hashable:
    """Cancel every job that has not started and never will, since a job it depends on did not end as required.

    Returns:
        What changes once a dependency is met.
    """
    while True:
        async with database.transaction() as connection:
            needs = await gates.needs(connection)
            ended = [(dependent, need.words()) for dependent, need in never_met(needs).items()]
            count = await gates.cancel(connection, ended, Reason.DEPENDENCY_FAILED.value) if ended else 0
        if not count:
            return frozenset(
                (need.dependent, need.needed, need.condition) for need in needs if need.verdict is Verdict.OPEN
            )
        log.info("dependencies.failed", jobs=count)
