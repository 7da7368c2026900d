"""The search when each evaluation uses real traffic: it can be resumed at any time from what was measured so far.

Between two evaluations minutes may pass, and the deciding process may be killed. So nothing is remembered but the
outcomes: the annealer runs from its beginning with the same seed, is given the outcomes that are known, and is stopped
where it asks for the first that is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.core.domain.errors import DomainError
from services.core.policies.clover.anneal import AnnealingConfig, Search, anneal
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.evaluation import Outcome
from services.core.policies.clover.objective import Goal
from services.core.policies.clover.prediction import predict


@dataclass(frozen=True)
class MeasuredSearch:
    """One application's search on its share of the GPUs."""

    application: Application  #: What runs
    gpus: int  #: On how many GPUs
    rate_per_s: float  #: Mean rate of requests, for predictions
    goal: Goal  #: What is maximised
    gco2_per_j: float  #: Carbon intensity of energy
    first: Sequence[ConfigGraph]  #: Configurations a model proposes, which are measured before any neighbour
    seed: int  #: Seed for the neighbours
    config: AnnealingConfig  #: Schedule and stopping rules

    def next_graph(self, start: Outcome, measured: Sequence[Outcome]) -> tuple[ConfigGraph | None, Outcome]:
        """Return what to measure next, or None once the stopping rules end the search, and the best so far.

        ``measured`` is what has been measured since ``start``, in order.

        Raises:
            DomainError: the outcomes are not from this search.
        """
        left = list(reversed(measured))

        def replayed(graph: ConfigGraph) -> Outcome:
            if not left:
                raise _UnmeasuredError(graph)
            outcome = left.pop()
            if outcome.graph != graph:
                raise DomainError("what was measured is not of this search")
            return outcome

        search = Search(self.goal, self.gco2_per_j, replayed, start)

        def may_run(graph: ConfigGraph) -> bool:
            known = (start, *search.measured)
            return all(graph != each.graph for each in known) and self.may_run(graph)

        try:
            anneal(
                search,
                self.application,
                self.gpus,
                np.random.default_rng(self.seed),
                self.config,
                first=[graph for graph in self.first if graph != start.graph],
                may_run=may_run,
            )
        except _UnmeasuredError as error:
            return error.graph, search.best
        if left:
            raise DomainError("what was measured is not of this search")
        return None, search.best

    def may_run(self, graph: ConfigGraph) -> bool:
        """Return whether a configuration may be tried because it keeps the limits by the closed-form model."""
        found = self.predicted(graph)
        return found is not None and self.goal.allows(found.accuracy, found.p95_s)

    def predicted(self, graph: ConfigGraph) -> Outcome | None:
        """Return what a configuration does by the closed-form model; None if it cannot serve the requests."""
        found = predict(self.application, graph.weights[None], self.gpus, self.rate_per_s)
        if found.load[0] >= 1:
            return None
        return Outcome(graph, float(found.accuracy[0]), float(found.energy_j[0]), float(found.p95_s[0]))

    def objective(self, accuracy: float, energy_j: float) -> float:
        """Return f in per cent."""
        return self.goal.objective(accuracy, energy_j * self.gco2_per_j)


class _UnmeasuredError(Exception):
    def __init__(self, graph: ConfigGraph) -> None:
        self.graph = graph
