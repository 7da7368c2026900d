"""The rules that the live system must keep, and their present breaches."""

from services.contracts.reports import Invariant, InvariantReport
from services.db.database import Database
from services.telemetry.repository.rules import breaches_of

SHOWN = 3  #: How many breaches of a rule are listed


async def check_invariants(database: Database) -> InvariantReport:
    """Return every rule and whether it holds now."""
    invariants: list[Invariant] = []
    for rule, breaches in await breaches_of(database, SHOWN + 1):
        detail = "; ".join(breaches[:SHOWN]) if breaches else rule.holds
        more = "; ..." if len(breaches) > SHOWN else ""
        invariants.append(Invariant(name=rule.name, holds=not breaches, detail=detail + more))
    return InvariantReport(holds=all(invariant.holds for invariant in invariants), invariants=invariants)
