"""Budgets: how much a project may use in a calendar month."""

from enum import StrEnum

from services.contracts.schema import Message, Name, Real, maybe, said


class BudgetQuantity(StrEnum):
    """What is limited: GPU hours held, energy of the devices and hosts in kWh, location-based emissions in gCO2."""

    GPU_H = "gpu_h"
    KWH = "kwh"
    GCO2 = "gco2"


class BudgetAction(StrEnum):
    """What happens beyond the budget: its jobs get a warning, or those that wait are held until the month ends."""

    WARN = "warn"
    HOLD = "hold"


class BudgetSpec(Message):
    """A budget; it replaces an earlier one of the same tenant, project and quantity."""

    tenant_id: Name
    project: Name | None = maybe("Null: all projects of the tenant together.")
    quantity: BudgetQuantity
    amount: Real = said("For a calendar month in UTC, in the unit of the quantity.", ge=0, le=1e15)
    action: BudgetAction = BudgetAction.HOLD


class Budget(BudgetSpec):
    """A budget and how much of it is used."""

    id: str
    month: str | None = maybe("The month that `used` belongs to; null before the first count.")
    used: float = 0
    exceeded: bool = False


class BudgetList(Message):
    """All budgets that the caller may see, by tenant, project and quantity."""

    items: list[Budget]
