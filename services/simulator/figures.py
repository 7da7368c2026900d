"""The simulator's metrics at ``/metrics``: the savings it has stored."""

from collections.abc import Iterable
from datetime import UTC, datetime

from prometheus_client.metrics_core import Metric

from services.contracts.savings import DaySavings
from services.kit.metrics import Read, gauge, single
from services.simulator.repository import SimulationRepository


def savings_of(repository: SimulationRepository) -> Read:
    """Return a function that reads the newest day's savings."""

    async def read() -> Iterable[Metric]:
        figures = await repository.newest_savings()
        return [] if figures is None else savings_figures(DaySavings.as_stored(figures))

    return read


def savings_figures(day: DaySavings) -> list[Metric]:
    return [
        gauge(
            "wattshift_saved_carbon_grams",
            "What each lever saved on the newest day that was replayed, grams of CO2 equivalent, with PUE; below zero: "
            "it cost that much.",
            ["lever"],
            [((each.lever,), each.saved_gco2) for each in day.levers if each.known],
        ),
        gauge(
            "wattshift_savings_bound_grams",
            "Between what the savings of that day, over all levers, lie at 90 %.",
            ["bound"],
            [(("low",), day.low_gco2), (("high",), day.high_gco2)],
        ),
        single("wattshift_savings_later_seconds", "How much later jobs ended for it, on average.", day.later_s),
        single(
            "wattshift_savings_day_seconds",
            "When that day began, seconds since 1970.",
            datetime(day.day.year, day.day.month, day.day.day, tzinfo=UTC).timestamp(),
        ),
    ]
