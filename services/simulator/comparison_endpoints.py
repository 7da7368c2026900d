"""HTTP of comparisons: what the scheduler asks for its explanations."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from services.contracts.explanations import PolicyComparison
from services.simulator.comparisons import Comparisons

router = APIRouter()


async def read_comparisons(request: Request) -> Comparisons:
    """Return the comparisons of this process."""
    return request.app.state.comparisons


@router.get("/internal/comparisons/{job_id}")
async def read_comparison(
    job_id: str, comparisons: Annotated[Comparisons, Depends(read_comparisons)]
) -> PolicyComparison:
    """Return what each policy would do with a live job, as far as it is known."""
    return await comparisons.of(job_id)
