"""HTTP routes for comparisons, which the scheduler uses in its explanations."""

from typing import Annotated

from fastapi import APIRouter

from services.contracts.explanations import PolicyComparison
from services.kit.routes import from_state
from services.simulator.comparisons import Comparisons

router = APIRouter()


@router.get("/internal/comparisons/{job_id}")
async def read_comparison(
    job_id: str, comparisons: Annotated[Comparisons, from_state("comparisons")]
) -> PolicyComparison:
    """Return what each policy would do with a live job, as far as it is known."""
    return await comparisons.of(job_id)
