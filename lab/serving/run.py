"""From options to the figures of a simulation of serving."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.serving.plans import Forecast, HalfHour, make_plans
from lab.serving.rates import PlaceRates, read_rates
from lab.serving.requests import RequestTrace, read_requests
from lab.serving.result import document
from lab.serving.simulation import ServingOptions, ServingSimulation
from lab.serving.site import Site, papers_pools
from services.contracts.serving import PoolSpec
from services.simulator.raw import TraceFormatError

STRICT = "fcfs-strict"
"""The name of FCFS with one queue for all classes."""


@dataclass(frozen=True)
class ServingRun:
    """What to simulate.

    Attributes:
        requests: A bundled trace or a file.
        pools: The pool; None for that of FREESH's authors.
        carbon: A file of intensities; None for the authors' day.
        carbon_hour: Hour of the carbon data at which the simulation begins.
        qps_scale: Requests are multiplied by this. Plans are not made for it: it is load that no forecast saw.
        plan_qps_scale: Requests that plans are made for are multiplied by this.
        forecast: Of the peaks that plans are made for.
        partition: The only one to plan with; None for all of the pool.
        replan: Whether plans follow every half hour; else the first one stays.
        options: Of the simulation itself.
    """

    requests: str | Path
    pools: PoolSpec | None = None
    carbon: str | Path | None = None
    carbon_hour: float = 0.0
    qps_scale: float = 1.0
    plan_qps_scale: float = 1.0
    forecast: Forecast = Forecast.PERFECT
    partition: str | None = None
    replan: bool = True
    options: ServingOptions = field(default_factory=ServingOptions)

    def inputs(self) -> tuple[Site, PlaceRates, RequestTrace]:
        """Return the pool, the intensities and the requests as they are in the trace.

        Raises:
            TraceFormatError: One of them cannot be used.
        """
        spec = self.pools or papers_pools()
        if self.partition is not None:
            chosen = [each for each in spec.partitions if each.name == self.partition]
            if not chosen:
                names = ", ".join(each.name for each in spec.partitions)
                raise TraceFormatError(f"the pool has no partition {self.partition!r}; it has {names}")
            spec = spec.model_copy(update={"partitions": chosen})
        site = Site(spec)
        rates = read_rates(self.carbon, [(place.name, place.zone) for place in spec.places])
        return site, rates.from_hour(self.carbon_hour), read_requests(self.requests)

    def simulate(self) -> dict[str, Any]:
        """Return the figures: ``result.document``, and as ``wall_s`` how long it took.

        Raises:
            TraceFormatError: The requests, the pool or the carbon data cannot be used.
        """
        began_s = time.perf_counter()
        found = self.of(*self.inputs())
        return found | {"wall_s": time.perf_counter() - began_s}

    def of(
        self,
        site: Site,
        rates: PlaceRates,
        trace: RequestTrace,
        plans: list[HalfHour] | None = None,
    ) -> dict[str, Any]:
        """Return the figures for inputs that were read before, with plans of their own if given."""
        if plans is None:
            planned = trace.scaled(self.plan_qps_scale) if self.plan_qps_scale != 1 else trace
            classes = {
                part.name: site.classes_of(part.name, planned.input_tokens, planned.output_tokens)
                for part in site.spec.partitions
            }
            plans = make_plans(site, rates, planned, classes, forecast=self.forecast, replan=self.replan)
        scaled = trace.scaled(self.qps_scale) if self.qps_scale != 1 else trace
        outcome = ServingSimulation(site, rates, scaled, plans, self.options).run()
        labels = {
            "policy": STRICT if self.options.one_queue else self.options.order.value,
            "frequency": self.options.frequency.value,
            "qps_scale": self.qps_scale,
            "trace": trace.name,
        }
        notes = [*trace.notes, *_shortfalls(plans)]
        return document(outcome, plans, labels) | ({"notes": notes} if notes else {})


def _shortfalls(plans: list[HalfHour]) -> list[str]:
    return [
        f"from {plan.from_s:.0f} s: {each.qps:.2f} requests/s of class {each.request_class} have no capacity"
        for plan in plans
        for each in plan.result.shortfall
    ]
