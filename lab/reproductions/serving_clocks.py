"""The section on clocks and GreenLLM's claim in ``lab/results/freesh-serving.md``.

    python -m lab.reproductions.serving_clocks PAGE

What stands in PAGE between ``<!-- clocks-azure -->`` or ``<!-- miad-parameters -->`` and ``<!-- end -->`` is made anew.
Requests are Azure's hour of conversations; the pool, the intensities and the plans are the paper's, for the trace as it
is at every load. Idle instances draw what their boards draw idle, as under the default governor.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.reproductions.marked import fill
from lab.serving.accounting import violation_rate
from lab.serving.plans import HalfHour, make_plans
from lab.serving.rates import PlaceRates
from lab.serving.requests import RequestTrace
from lab.serving.run import ServingRun
from lab.serving.simulation import Frequency, Outcome, ServingOptions, ServingSimulation
from lab.serving.site import Site, papers_pools
from services.contracts.serving import PoolSpec
from services.core.domain.arrays import Bools
from services.core.domain.gpus import gpu_model
from services.core.domain.serving import CLASSES, TABLE_7, MiadConfig
from services.core.domain.units import J_PER_KWH

TRACE = "azure-2023-conv"
LOADS = (0.25, 0.5, 1.0, 2.0)
MAE_TOKENS = 110.0
"""Of the paper's output length predictor (Table 9)."""
PAPER, OURS = MiadConfig(2.0, 100.0), MiadConfig(1.5, 100.0)
POLICIES = {
    "default governor": ServingOptions(frequency=Frequency.FIXED, length_mae=MAE_TOKENS),
    "MIAD (2, 100), the paper's": ServingOptions(frequency=Frequency.MIAD, miad=PAPER, length_mae=MAE_TOKENS),
    "MIAD (1.5, 100), ours": ServingOptions(frequency=Frequency.MIAD, miad=OURS, length_mae=MAE_TOKENS),
    "learned": ServingOptions(frequency=Frequency.LEARNED, miad=PAPER, length_mae=MAE_TOKENS),
}
FACTORS, STEPS_MHZ = (1.25, 1.5, 2.0, 4.0), (25.0, 50.0, 100.0, 200.0)


@dataclass(frozen=True)
class Hour:
    """What is simulated."""

    site: Site
    rates: PlaceRates
    trace: RequestTrace
    plans: list[HalfHour]

    def run(self, options: ServingOptions, load: float) -> Outcome:
        """Return what serving the requests at that multiple of their rate came to."""
        trace = self.trace if load == 1 else self.trace.scaled(load)
        return ServingSimulation(self.site, self.rates, trace, self.plans, options).run()


def the_hour() -> Hour:
    """Return Azure's hour on the paper's pool."""
    site, rates, trace = ServingRun(requests=TRACE, pools=with_idle_boards(papers_pools())).inputs()
    classes = {
        part.name: site.classes_of(part.name, trace.input_tokens, trace.output_tokens) for part in site.spec.partitions
    }
    return Hour(site, rates, trace, make_plans(Site(papers_pools()), rates, trace, classes))  # the paper's plans


def with_idle_boards(spec: PoolSpec) -> PoolSpec:
    """Return the pool with instances that draw, without requests, what their GPUs draw idle."""
    modes = [mode.model_copy(update={"idle_w": mode.gpus * gpu_model(mode.gpu_model).idle_w}) for mode in spec.modes]
    return spec.model_copy(update={"modes": modes})


def beyond_limits(found: Outcome) -> tuple[Bools, Bools]:
    """Return which requests had a TTFT, and which a mean TBT, above their class's in Table 7: two (n_served,)."""
    served = found.served
    limits = [TABLE_7[name] for name in CLASSES]
    ttft_s = np.array([each.ttft_s for each in limits])[found.request_class]
    tbt_s = np.array([each.tbt_s for each in limits])[found.request_class]
    gaps = np.maximum(served.output_tokens - 1, 1)
    return served.ttft_s > ttft_s, (served.finish_s - served.first_token_s) / gaps > tbt_s


def clocks(hour: Hour) -> str:
    """Return the default governor, MIAD and the learned clock at several loads."""
    lines = [
        "| load | clocks | energy | | SLO violated | TTFT above | TBT above | either, in points | mean | p99 | clock |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for load in LOADS:
        base_j = base_share = 0.0
        for name, options in POLICIES.items():
            found = hour.run(options, load)
            slow_start, slow_tokens = beyond_limits(found)
            share = float((slow_start | slow_tokens).mean())
            if not base_j:
                base_j, base_share = found.energy_j, share
            e2e_s = found.served.e2e_s
            lines.append(
                f"| x {load:g} | {name} | {found.energy_j / J_PER_KWH * 1e3:.0f} Wh "
                f"| {100 * (found.energy_j / base_j - 1):+.1f} % | {100 * violation_rate(found.served):.2f} % "
                f"| {100 * slow_start.mean():.2f} % | {100 * slow_tokens.mean():.2f} % "
                f"| {100 * (share - base_share):+.2f} | {e2e_s.mean():.1f} s | {np.percentile(e2e_s, 99):.1f} s "
                f"| {found.clock_mhz:.0f} MHz |"
            )
    return "\n".join(lines)


def parameters(hour: Hour) -> str:
    """Return MIAD's energy and limits exceeded, by its parameters, at the trace's load."""
    base_j = hour.run(POLICIES["default governor"], 1.0).energy_j
    lines = [
        "| factor | " + " | ".join(f"{step:g} MHz" for step in STEPS_MHZ) + " |",
        "|---:|" + "---:|" * len(STEPS_MHZ),
    ]
    for factor in FACTORS:
        cells: list[str] = []
        for step in STEPS_MHZ:
            options = ServingOptions(frequency=Frequency.MIAD, miad=MiadConfig(factor, step), length_mae=MAE_TOKENS)
            found = hour.run(options, 1.0)
            slow_start, slow_tokens = beyond_limits(found)
            share = float((slow_start | slow_tokens).mean())
            cells.append(f"{100 * (found.energy_j / base_j - 1):+.1f} %, {100 * share:.1f} %")
        lines.append(f"| {factor:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Fill the page."""
    hour = the_hour()
    fill(Path(sys.argv[1]), {"clocks-azure": lambda: clocks(hour), "miad-parameters": lambda: parameters(hour)})


if __name__ == "__main__":
    main()
