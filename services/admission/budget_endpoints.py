"""HTTP of budgets."""

from __future__ import annotations

import re

from fastapi import APIRouter

from services.admission.budgets import BUDGET_ID, Budgets
from services.contracts.budgets import Budget, BudgetList, BudgetSpec
from services.kit.identity import Admin, ProjectCaller
from services.kit.problems import not_found


def budget_routes(budgets: Budgets) -> APIRouter:
    """Return the routes that are about budgets."""
    router = APIRouter()

    @router.put("/v1/budgets")
    async def set_budget(caller: Admin, spec: BudgetSpec) -> Budget:
        return await budgets.put(caller, spec)

    @router.get("/v1/budgets")
    async def list_budgets(caller: ProjectCaller) -> BudgetList:
        return await budgets.list(caller)

    @router.delete("/v1/budgets/{budget_id}", status_code=204)
    async def remove_budget(caller: Admin, budget_id: str) -> None:
        if not re.fullmatch(BUDGET_ID, budget_id):
            raise not_found("budget")
        await budgets.remove(caller, budget_id)

    return router
