"""What the levers of the policy in force saved, day by day."""

from datetime import date

from services.contracts.schema import Instant, Message, said


class LeverSaving(Message):
    """What one lever saved, gCO2 with PUE; negative if it cost that much."""

    lever: str = said(
        "`order`, `width`, `batch`, `power_limit`, `hours`, `sleep`, in the order of their replays, and "
        "`zone`, placement by zone."
    )
    known: bool = said(
        "False: nobody knows what it saved, because the history does not tell how its jobs answer to it; "
        "it is not in the sum, and the figures are 0.",
        default=True,
    )
    saved_gco2: float
    low_gco2: float = said("With `high_gco2`, what the saving lies between at 90 %.")
    high_gco2: float
    saved_energy_j: float = said("Energy of GPUs and hosts, without PUE.")
    later_s: float | None = said("How much later jobs ended for it, on average; below zero: earlier.")


class SavingsTotals(Message):
    """What was saved against the baseline; the levers' savings add up to `saved_gco2`."""

    jobs: int
    baseline_gco2: float
    emitted_gco2: float = said("By the replay under the policy in force; the ledger has what was measured.")
    saved_gco2: float
    low_gco2: float
    high_gco2: float
    later_s: float | None = said("How much later jobs ended than in the baseline, on average.")
    levers: list[LeverSaving]
    why: str = said("Why more was emitted, if more was, or nothing was saved; else empty.")
    slack_s: float | None = said("What jobs could have been given to wait for greener hours.")
    slack_saved_gco2: float | None = said("What that would have saved beyond what was saved.")
    slack_later_s: float | None = said("How much later jobs would have ended for it, on average.")


class DaySavings(SavingsTotals):
    """The jobs that were submitted on one day, UTC."""

    day: date
    made_at: Instant
    simulation_id: str | None = said("The run that replayed them, with its inputs; null: there were no jobs.")
    policy: str = said("The policy in force when it was replayed.")
    ledger_gco2: float = said("What the ledger has of that day.")


class SavingsReport(Message):
    """The days of a period that have been replayed, oldest first, and their sum; null if there are none."""

    days: list[DaySavings]
    total: SavingsTotals | None
