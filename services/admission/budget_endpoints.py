"""HTTP endpoints for budgets."""

import re
from typing import Annotated

from fastapi import APIRouter

from services.admission.budgets import BUDGET_ID, Budgets
from services.contracts.budgets import Budget, BudgetList, BudgetSpec
from services.kit.identity import Admin, ProjectCaller
from services.kit.problems import not_found
from services.kit.routes import from_state

TheBudgets = Annotated[Budgets, from_state("budgets")]
router = APIRouter(tags=["access"])


@router.put("/v1/budgets")
async def set_budget(caller: Admin, spec: BudgetSpec, budgets: TheBudgets) -> Budget:
    """Set a project's budget.

    It replaces the budget of the same tenant, project and quantity.
    """
    return await budgets.put(caller, spec)


@router.get("/v1/budgets")
async def list_budgets(caller: ProjectCaller, budgets: TheBudgets) -> BudgetList:
    """List budgets and how much of them is used this month.

    Users see their tenant's; operators see all.
    """
    return await budgets.list(caller)


@router.delete("/v1/budgets/{budget_id}", status_code=204)
async def remove_budget(caller: Admin, budget_id: str, budgets: TheBudgets) -> None:
    """Remove a budget.

    Jobs that only it held are queued again.
    """
    if not re.fullmatch(BUDGET_ID, budget_id):
        raise not_found("budget")
    await budgets.remove(caller, budget_id)
