"""HTTP of explanations: one job for its users, and the live state for the what-if service."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from services.contracts.explanations import Explanation
from services.contracts.live import LiveState
from services.contracts.schema import Name
from services.kit.identity import Operator, ProjectCaller
from services.scheduler.explaining.explanations import Explanations

router = APIRouter()


async def _explanations(request: Request) -> Explanations:
    return request.app.state.explanations


Explaining = Annotated[Explanations, Depends(_explanations)]


@router.get("/v1/jobs/{job_id}/explain")
async def explain_job(job_id: Name, caller: ProjectCaller, explaining: Explaining) -> Explanation:
    """Explain why a job waits, how it runs, or what happened to it; a tenant sees its own jobs."""
    return await explaining.explain(caller, job_id)


@router.get("/internal/live")
async def read_live_state(_: Operator, explaining: Explaining) -> LiveState:
    """Return the live queue and cluster; for the what-if service."""
    return await explaining.live_state()
