"""Budgets of projects, counted from the ledger and enforced by holding waiting jobs; and what keys use of theirs.

The scheduler leaves queued jobs of a project out of its snapshots from the moment a budget is marked as exceeded
(``services/scheduler/repository/snapshots.py``), so that none slips through; the count here marks it, and sets the
jobs' state and reason. Running jobs go on: ending them would waste what they have used.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from sqlalchemy import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.admission.repository.access import AccessRepository, write_audit
from services.admission.repository.budgets import BudgetRepository
from services.admission.repository.webhooks import write_event
from services.admission.settings import ModelPrice
from services.contracts.budgets import Budget, BudgetList, BudgetQuantity, BudgetSpec
from services.contracts.identity import Identity, KeyUse
from services.contracts.webhooks import BudgetExceeded, WebhookEvent
from services.kit.ids import utc_now
from services.kit.logging import Log
from services.kit.problems import invalid, not_found

log = Log(__name__)

BUDGET_ID = r"budget_[0-9a-z]{26}"
UNITS = {BudgetQuantity.GPU_H: "GPU hours", BudgetQuantity.KWH: "kWh", BudgetQuantity.GCO2: "gCO2"}


class Budgets:
    """Manages budgets and enforces them."""

    def __init__(
        self,
        engine: AsyncEngine,
        on_change: Callable[[], None],
        now: Callable[[], datetime] = utc_now,
        prices: Mapping[str, ModelPrice] | None = None,
    ) -> None:
        """Take whom to tell of held and released jobs, and the prices of models."""
        self._engine, self._on_change, self._now = engine, on_change, now
        self._prices = prices or {}

    async def put(self, caller: Identity, spec: BudgetSpec) -> Budget:
        """Set a budget, and count and enforce it at once; ``ProblemError``: 422 if there is no such tenant."""
        async with self._engine.begin() as connection:
            if await AccessRepository(connection).tenant(spec.tenant_id) is None:
                raise invalid("/tenant_id", f"There is no tenant {spec.tenant_id}.")
            made = await BudgetRepository(connection).put(spec)
            await write_audit(connection, caller, "budget.set", made.id, budget=spec.model_dump(mode="json"))
        await self._count_now()
        async with self._engine.connect() as connection:
            known = await BudgetRepository(connection).all(spec.tenant_id)
        return next((budget for budget in known if budget.id == made.id), made)

    async def list(self, caller: Identity) -> BudgetList:
        """Return the budgets of the caller's tenant, or of the one project that it may see; an operator sees all."""
        async with self._engine.connect() as connection:
            found = await BudgetRepository(connection).all(caller.only_tenant)
        return BudgetList(items=[budget for budget in found if caller.project in (None, budget.project)])

    async def remove(self, caller: Identity, budget_id: str) -> None:
        """Delete a budget and release the jobs that only it held; ``ProblemError``: 404 if there is none."""
        async with self._engine.begin() as connection:
            if not await BudgetRepository(connection).remove(budget_id):
                raise not_found("budget")
            await write_audit(connection, caller, "budget.removed", budget_id)
        await self._count_now()

    async def _count_now(self) -> None:
        """Count after a change, which stands whatever comes of the count: the next one is due within seconds."""
        try:
            await self.count()
        except Exception as error:
            log.warning("budgets.not_counted", error=str(error) or type(error).__name__)

    async def count(self) -> None:
        """Count how much of every budget has been used this month, and hold, release or warn jobs accordingly."""
        now = self._now()
        start_at, month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0), f"{now:%Y-%m}"
        async with self._engine.begin() as connection:
            repository = BudgetRepository(connection)
            found = await repository.all(lock=True)
            used: dict[tuple[str, str | None, str], float] = defaultdict(float)
            if found:
                for row in await repository.spent(start_at):
                    for quantity in BudgetQuantity:
                        for project in (row["project"], None):
                            used[row["tenant_id"], project, quantity] += row[quantity]
            for budget in found:
                amount = used[budget.tenant_id, budget.project, budget.quantity]
                exceeded = amount >= budget.amount
                detail = describe(budget, amount, month)
                if exceeded and not (budget.exceeded and budget.month == month):
                    await self._record_excess(connection, budget, amount, month, detail)
                await repository.note(budget.id, month=month, used=amount, exceeded=exceeded, detail=detail)
            await repository.note_uses(self._used(await repository.used_by_keys(start_at), month))
            warned = await repository.warn()
        # A transaction's events come before those of transactions that began to write later: it must begin after those
        # of the jobs that it holds, some of which were submitted meanwhile.
        async with self._engine.begin() as connection:
            held, released = await BudgetRepository(connection).enforce()
        if held or released or warned:
            log.info("budgets.enforced", held=held, released=released, warned=warned)
            self._on_change()

    def _used(self, rows: Iterable[RowMapping], month: str) -> dict[str, KeyUse]:
        """Return what each key has used; tokens of models that have no price cost nothing."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for row in rows:
            found = sums[row["id"]]
            if row["model"] is None:
                continue
            found[0] += row["input_tokens"] + row["output_tokens"]
            found[1] += row["gco2"]
            if (price := self._prices.get(row["model"])) is not None:
                found[2] += (row["input_tokens"] * price.input + row["output_tokens"] * price.output) / 1e6
        return {
            key_id: KeyUse(month=month, tokens=int(tokens), gco2=gco2, cost=cost)
            for key_id, (tokens, gco2, cost) in sums.items()
        }

    @staticmethod
    async def _record_excess(connection: AsyncConnection, budget: Budget, used: float, month: str, detail: str) -> None:
        excess = BudgetExceeded.of(budget, budget_id=budget.id, used=used, month=month, detail=detail)
        data = excess.model_dump(mode="json")
        await write_event(connection, WebhookEvent.BUDGET_EXCEEDED, budget.tenant_id, budget.project, data)


def describe(budget: Budget, used: float, month: str) -> str:
    """Return how much of a budget is used, in one sentence."""
    whose = f"project {budget.project}" if budget.project else f"tenant {budget.tenant_id}"
    return f"The budget of {whose} for {month} is {budget.amount:g} {UNITS[budget.quantity]}; {used:.4g} are used."
