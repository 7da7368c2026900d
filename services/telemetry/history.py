"""Past jobs as they ran, for exports and replays; without service instances."""

from services.contracts.queries import PastJobsQuery
from services.contracts.reports import PastJob, PastJobs
from services.db.database import Database
from services.kit.cursors import read_cursor, write_cursor
from services.telemetry.repository import jobs


async def past_jobs(database: Database, query: PastJobsQuery, tenant_id: str | None, project: str | None) -> PastJobs:
    """Return one page of the jobs submitted in a period, including those that have not ended.

    Args:
        tenant_id, project: Whose jobs; None for those of all tenants or projects.

    Raises:
        ProblemError: 422 for an invalid cursor.
    """
    rows = await jobs.past_jobs(
        database,
        start_at=query.start,
        end_at=query.end,
        tenant_id=tenant_id,
        project=project,
        after=read_cursor(query.cursor, r"[A-Za-z0-9_]{1,100}"),
        limit=query.limit + 1,
    )
    items = [PastJob.model_validate(row._asdict()) for row in rows[: query.limit]]
    return PastJobs(items=items, next_cursor=write_cursor(items[-1].job_id) if len(rows) > query.limit else None)
