"""The operations that the gateway answers itself, declared as services declare theirs; ``tools.operations`` reads them.

No request runs these functions: ``dispatch.py`` sends submissions to admission in groups, and ``metrics.py`` asks all
services for their metrics.
"""

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse

from services.contracts.jobs import JobBatch, JobSpec, SubmittedBatch, SubmittedJob
from services.contracts.queries import MetricsQuery
from services.kit.identity import Operator, ProjectCaller
from services.kit.routes import LARGE_BODY, IdempotencyKey

router = APIRouter()


@router.post("/v1/jobs", status_code=201, tags=["jobs"])
async def submit_job(spec: JobSpec, _: ProjectCaller, idempotency_key: IdempotencyKey = None) -> SubmittedJob:
    """Submit a job.

    A 201 response means that the job is on disk.
    """
    ...


@router.post("/v1/jobs:batch", status_code=201, tags=["jobs"], openapi_extra=LARGE_BODY)
async def submit_jobs(batch: JobBatch, _: ProjectCaller, idempotency_key: IdempotencyKey = None) -> SubmittedBatch:
    """Submit up to 1,000 jobs.

    Either all of them are accepted or none. A 201 response means that they are on disk.
    """
    ...


@router.get("/metrics", tags=["metrics"], response_class=PlainTextResponse)
async def get_metrics(query: Annotated[MetricsQuery, Query()], _: Operator) -> str:
    """Get the metrics of all processes, for Prometheus.

    In the Prometheus text format; `service` and `instance` tell which process a metric comes from.
    """
    ...
