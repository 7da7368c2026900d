"""A control plane that says what a test wants said to a bridge."""

from __future__ import annotations

from typing import Any

from services.contracts.engines import EngineAction, EngineDecision, EngineEnergyReport, EngineReply, EngineReport
from services.contracts.nodes import EnergyReceipt
from services.kit.problems import ProblemError


class Plane:
    """A control plane that says what the test wants said."""

    def __init__(self) -> None:
        self.reports: list[EngineReport] = []
        self.wanted: dict[str, tuple[EngineAction, dict[str, Any]]] = {}
        self.energy: list[EngineEnergyReport] = []
        self.silent = False
        self.order: list[str] = []  #: Numbers of the jobs that are to start first

    async def call(self, what: str, report: Any, answer: Any, timeout_s: float) -> Any:
        if self.silent:
            raise ProblemError(503, "unavailable", "It does not answer.")
        if what == "engine-energy":
            self.energy.append(report)
            return EnergyReceipt(accepted=len(report.intervals), duplicates=0)
        self.reports.append(report)
        known = {each.number: each.external_id for report in self.reports for each in report.jobs}
        decisions = [
            EngineDecision(external_id=known[number], revision=revision, action=action, **fields)
            for revision, (number, (action, fields)) in enumerate(self.wanted.items(), start=1 + 10 * len(self.reports))
            if number in known
        ]
        live = {each.external_id for report in self.reports for each in report.jobs if not each.state.is_over}
        over = {each.external_id for report in self.reports for each in report.jobs if each.state.is_over}
        unreported = [] if report.present is None else sorted(live - over - set(report.present))
        order = [known[number] for number in self.order if number in known] if report.orders else []
        return EngineReply(decisions=decisions, unreported=unreported, order=order)

    def last(self, number: str) -> Any:
        return [each for report in self.reports for each in report.jobs if each.number == number][-1]

    def decide(self, number: str, action: EngineAction, **fields: Any) -> None:
        self.wanted[number] = (action, fields)
