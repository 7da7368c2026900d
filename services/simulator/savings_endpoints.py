"""HTTP routes for stored savings."""

from typing import Annotated

from fastapi import APIRouter, Query

from services.contracts.queries import SavingsQuery
from services.contracts.savings import SavingsReport
from services.kit.identity import Operator
from services.kit.routes import from_state
from services.simulator.daily import DailySavings

router = APIRouter(prefix="/v1/reports", tags=["footprint"])


@router.get("/savings")
async def report_savings(
    query: Annotated[SavingsQuery, Query()], _: Operator, savings: Annotated[DailySavings, from_state("savings")]
) -> SavingsReport:
    """Get what each lever of the policy saved.

    Once a day the jobs of the day before are replayed: under `fifo`, which is the baseline, and then under the policy
    in force, adding one lever each time. The savings are stored, and add up to the difference between the two.
    """
    return await savings.report(query.start, query.end)
