"""A search and its best result, and simulated annealing over configuration graphs as printed in the paper."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.core.domain.errors import DomainError
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph, random_neighbour
from services.core.policies.clover.evaluation import Outcome
from services.core.policies.clover.objective import Goal, annealing_energy

Measure = Callable[[ConfigGraph], Outcome]  #: Runs a configuration and returns what it did
_DRAWS = 200  #: Neighbours drawn until one may be run; after this many none is left that is worth a search


@dataclass(frozen=True)
class AnnealingConfig:
    """The paper's schedule (§4.2)."""

    start_temperature: float = 1.0  #: By default from 1 to 0.1 in steps of 0.05 per evaluation, then constant
    end_temperature: float = 0.1
    cooling: float = 0.05
    patience: int = 5  #: Stop after this many evaluations in a row without a better configuration
    max_evaluations: int = 30  #: Stop after this many evaluations; 5 minutes at 10 seconds each

    def __post_init__(self) -> None:
        if self.patience < 1 or self.max_evaluations < 1:
            raise DomainError("annealing needs a patience and evaluations of at least 1")
        if not 0 < self.end_temperature <= self.start_temperature or self.cooling < 0:
            raise DomainError("temperatures fall from start to end, both above 0")

    def temperature(self, iteration: int) -> float:
        """Return the temperature of an iteration, the first being 0."""
        return max(self.start_temperature - self.cooling * iteration, self.end_temperature)


@dataclass
class Search:
    """One optimisation, from an incumbent to the best configuration that was measured."""

    goal: Goal  #: What is maximised
    intensity_gco2_per_j: float  #: Present carbon intensity of energy
    measure: Measure  #: Runs a configuration
    start: Outcome  #: The incumbent: where the search begins, and what is kept if nothing better is found
    measured: list[Outcome] = field(default_factory=list[Outcome])
    """What was evaluated, in order; excludes ``start``, whose outcome is known."""

    def __post_init__(self) -> None:
        self.best = self.start

    def objective(self, outcome: Outcome) -> float:
        """Return f at the present intensity."""
        return self.goal.objective(outcome.accuracy, outcome.energy_j * self.intensity_gco2_per_j)

    def energy(self, outcome: Outcome) -> float:
        """Return h at the present intensity; infinite below the accuracy floor, which is a constraint."""
        if not self.goal.keeps_floor(outcome.accuracy):
            return math.inf
        return annealing_energy(self.objective(outcome), outcome.p95_s, self.goal.baseline.p95_s)

    def try_graph(self, graph: ConfigGraph) -> tuple[Outcome, bool]:
        """Measure a configuration; return its outcome and whether it is the best so far."""
        outcome = self.measure(graph)
        self.measured.append(outcome)
        better = self.worth(outcome) > self.worth(self.best)
        if better:
            self.best = outcome
        return outcome, better

    def leading(self, count: int) -> list[Outcome]:
        """Return up to ``count`` of the best measured outcomes that keep the limits, best first."""
        allowed = {each.graph: each for each in self.measured if self.goal.allows(each.accuracy, each.p95_s)}
        return sorted(allowed.values(), key=self.objective, reverse=True)[:count]

    def worth(self, outcome: Outcome) -> tuple[bool, float]:
        """Return a sort key: outcomes within the limits, by objective, rank above those that break one, by energy."""
        if self.goal.allows(outcome.accuracy, outcome.p95_s):
            return True, self.objective(outcome)
        return False, -self.energy(outcome)


def anneal(
    search: Search,
    application: Application,
    gpus: int,
    rng: np.random.Generator,
    config: AnnealingConfig,
    *,
    first: Sequence[ConfigGraph] = (),
    may_run: Callable[[ConfigGraph], bool] | None = None,
) -> None:
    """Search as printed in the paper: one random neighbour of the centre is measured per iteration (equations 6, 7).

    Args:
        first: Measured before any neighbour, and accepted or rejected like them.
        may_run: Whether a neighbour may be measured; the search ends when hardly any may. By default all may.
    """
    ahead = iter(first)
    centre, without_gain, iteration = search.start, 0, 0
    while without_gain < config.patience and iteration < config.max_evaluations:
        graph = next(ahead, None)
        if graph is None:
            drawn = (random_neighbour(centre.graph, application.fits, gpus, rng) for _ in range(_DRAWS))
            graph = next((each for each in drawn if may_run is None or may_run(each)), None)
        if graph is None:
            return
        outcome, better = search.try_graph(graph)
        without_gain = 0 if better else without_gain + 1
        if _accepts(search.energy(centre), search.energy(outcome), config.temperature(iteration), rng):
            centre = outcome
        iteration += 1


def _accepts(now: float, proposed: float, temperature: float, rng: np.random.Generator) -> bool:
    """Return whether the centre moves: always to lower energy, with some probability to higher (equation 7)."""
    return proposed <= now or rng.random() < math.exp(-(proposed - now) / temperature)
