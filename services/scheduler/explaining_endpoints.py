"""HTTP endpoints for explanations: one job for its users, and the live state for the what-if service."""

from typing import Annotated

from fastapi import APIRouter, Query

from services.contracts.explanations import Explanation, ExplanationQuery
from services.contracts.live import LiveState
from services.contracts.schema import Name
from services.kit.identity import Operator, ProjectCaller
from services.kit.routes import from_state
from services.scheduler.explaining.explanations import Explanations

router = APIRouter(tags=["jobs"])


Explaining = Annotated[Explanations, from_state("explanations")]


@router.get("/v1/jobs/{job_id}/explain")
async def explain_job(
    job_id: Name, caller: ProjectCaller, explaining: Explaining, query: Annotated[ExplanationQuery, Query()]
) -> Explanation:
    """Explain why a job waits, how it runs, or what happened to it.

    Nothing is changed, and nothing is reserved. What other policies would do with the job is simulated in the
    background: `under_policies` is `pending` until that is done.
    """
    return await explaining.explain(caller, job_id, one_change=query.one_change)


@router.get("/internal/live")
async def read_live_state(_: Operator, explaining: Explaining) -> LiveState:
    """Return the live queue and cluster for the what-if service."""
    return await explaining.live_state()
