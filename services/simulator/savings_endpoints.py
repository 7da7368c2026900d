"""HTTP of stored savings."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from services.contracts.queries import SavingsQuery
from services.contracts.savings import SavingsReport
from services.kit.background.http import PROBLEMS
from services.kit.identity import Operator
from services.simulator.daily import DailySavings

router = APIRouter(prefix="/v1/reports", tags=["reports"], responses=PROBLEMS)


async def read_savings(request: Request) -> DailySavings:
    """Return the savings of this process."""
    return request.app.state.savings


@router.get("/savings")
async def report_savings(
    query: Annotated[SavingsQuery, Query()], _: Operator, savings: Annotated[DailySavings, Depends(read_savings)]
) -> SavingsReport:
    """Return what each lever saved, day by day, as it was stored."""
    return await savings.report(query.start, query.end)
