"""The page of a what-if run: its results, beside the least carbon of any schedule.

``wattshift simulate training --report`` finds ``page_of`` by the entry point ``wattshift.run_reports``.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.experiments.bound import least_of_all
from lab.report.run_page import Bound, render
from services.core.domain.errors import DomainError
from services.simulator.engine import SimulationResult
from services.simulator.training import TrainingRun


def page_of(run: TrainingRun, results: Sequence[SimulationResult], command: str) -> str:
    """Return the results as one HTML page; ``command`` makes it again."""
    title = f"{run.workload.name}: {len(run.workload)} jobs on {run.options.cluster}, {run.trace.zone}"
    return render(results, title, [*run.workload.notes, *run.trace.notes], command, _bound(run, results))


def _bound(run: TrainingRun, results: Sequence[SimulationResult]) -> Bound:
    if not results[0].completed:
        return Bound(None, "no job ended")
    try:
        return Bound(least_of_all(run, results) / 1e3)
    except DomainError as error:
        return Bound(None, str(error))
