"""The page of a what-if run: its results beside the least carbon that any schedule could have reached."""

from __future__ import annotations

from collections.abc import Sequence

from services.core.domain.errors import DomainError
from services.core.solvers.model import SolveStatus
from services.simulator.engine import SimulationResult
from services.simulator.experiments.bound import bound_of
from services.simulator.report.run_page import Bound, render
from services.simulator.training import TrainingRun

LARGE = 20_000
"""With more jobs, the bound distinguishes fewer hours and powers, as in experiments."""


def page_of(run: TrainingRun, results: Sequence[SimulationResult], command: str) -> str:
    """Return the results as one HTML page; ``command`` makes it again."""
    title = f"{run.workload.name}: {len(run.workload)} jobs on {run.options.cluster}, {run.trace.zone}"
    return render(results, title, [*run.workload.notes, *run.trace.notes], command, _bound(run, results[0]))


def _bound(run: TrainingRun, first: SimulationResult) -> Bound:
    """Return the least carbon of any schedule of the work that ends when the first policy's does."""
    if not first.completed:
        return Bound(None, "no job ended")
    large = len(run.workload) > LARGE
    try:
        found = bound_of(
            run.workload,
            run.cluster,
            run.trace,
            end_s=float(run.workload.submitted_s[0]) + first.makespan_s,
            horizon_s=None,
            host_idle_w=run.engine.host_idle_w,
            bin_s=21_600.0 if large else 3_600.0,
            tiers=4 if large else None,
        )
    except DomainError as error:
        return Bound(None, str(error))
    if found.status is not SolveStatus.OPTIMAL or found.carbon_gco2 is None:
        return Bound(None, f"the programme is {found.status.value}")
    return Bound(found.carbon_gco2 / 1e3)
