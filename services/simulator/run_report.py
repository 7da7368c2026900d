"""The page of a what-if run: its results, beside the least carbon of any schedule if an installed package knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.core.domain.errors import DomainError
from services.kit.plugins import load_plugins
from services.simulator.engine import SimulationResult
from services.simulator.report.run_page import Bound, render
from services.simulator.training import TrainingRun

GROUP = "wattshift.bounds"
"""Functions of a run and its results: the least carbon, gCO2, or a ``DomainError`` that says why there is none."""


def page_of(run: TrainingRun, results: Sequence[SimulationResult], command: str) -> str:
    """Return the results as one HTML page; ``command`` makes it again."""
    title = f"{run.workload.name}: {len(run.workload)} jobs on {run.options.cluster}, {run.trace.zone}"
    return render(results, title, [*run.workload.notes, *run.trace.notes], command, _bound(run, results))


def _bound(run: TrainingRun, results: Sequence[SimulationResult]) -> Bound:
    if not results[0].completed:
        return Bound(None, "no job ended")
    try:
        for plugin in load_plugins(GROUP, Callable):  # type: ignore[type-abstract]
            return Bound(plugin.value(run, results) / 1e3)
    except DomainError as error:
        return Bound(None, str(error))
    return Bound(None, "it is computed by the package wattshift-lab, which is not installed here")
