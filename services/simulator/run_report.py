"""The page of a what-if run: its results beside the least carbon that any schedule could have reached."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.core.domain.errors import DomainError
from services.simulator.engine import SimulationResult
from services.simulator.experiments.bound import ALL_LEVERS, Slack, least_of_run, levers_of
from services.simulator.report.run_page import Bound, render
from services.simulator.training import TrainingRun


def page_of(run: TrainingRun, results: Sequence[SimulationResult], command: str) -> str:
    """Return the results as one HTML page; ``command`` makes it again."""
    title = f"{run.workload.name}: {len(run.workload)} jobs on {run.options.cluster}, {run.trace.zone}"
    return render(results, title, [*run.workload.notes, *run.trace.notes], command, _bound(run, results))


def _bound(run: TrainingRun, results: Sequence[SimulationResult]) -> Bound:
    """Return the least carbon of any schedule, by any levers, in which no job ends later than in all of these runs."""
    if not results[0].completed:
        return Bound(None, "no job ended")
    try:
        for result in results:
            levers_of(result.policy, result.parameters, run.engine)  # is refused where all levers are not all
        found = least_of_run(
            run.workload,
            run.cluster,
            run.trace,
            run.engine,
            ALL_LEVERS,
            jct_s=np.max([result.columns.jct_s for result in results], axis=0),  # NaN of jobs that one run left undone
            makespan_s=max(result.makespan_s for result in results),
            slack=Slack(),
        )
    except DomainError as error:
        return Bound(None, str(error))
    return Bound(found.carbon_gco2 / 1e3)
