"""Has every pool planned each half hour and at events, and decides the outcomes of plans.

It is a loop in the service, like the sweeper. Any number of services may run it: a slot of the clock, like an event,
gets only one row for its plan, and an outcome is decided once.
"""

import contextlib

from services.contracts.serving import PlanTrigger
from services.kit.problems import ProblemError
from services.kit.repeating import When, repeat
from services.serving.planning.plans import Plans
from services.serving.planning.watch import EventWatch


class Planner:
    """Finds the plans that have an answer, and the pools that are due or to which something has happened."""

    def __init__(self, plans: Plans, watch: EventWatch, look_s: float, when: When | None = None) -> None:
        self._plans = plans
        self._watch = watch
        self._look_s = look_s
        self._when = when

    async def run(self) -> None:
        """Repeat until cancelled; if a pass fails (the database does not answer), the next one tries again."""
        await repeat(self.look, self._look_s, failed="planner.not_looked", when=self._when)

    async def look(self) -> None:
        """Decide the outcomes of plans that have an answer or never will, then submit those that are due."""
        for plan_id in await self._plans.undecided():
            await self._plans.decide(plan_id)
        for standing, event in await self._watch.look():
            with contextlib.suppress(ProblemError):
                await self._plans.submit(standing.pool, event, after=standing)
        for due in await self._plans.due():
            with contextlib.suppress(ProblemError):  # deleted since
                await self._plans.submit(due.pool, PlanTrigger.CLOCK, deadline_at=due.deadline_at)
