"""Simulated annealing over configuration graphs: as the paper prints it, or screened by predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from services.core.domain.errors import DomainError
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph, random_neighbour
from services.core.policies.clover.evaluation import Outcome
from services.core.policies.clover.objective import Goal, annealing_energy
from services.core.policies.clover.prediction import predict

_IDLE_STEPS = 6
_LATE, _OVERLOADED, _BELOW_FLOOR = 1e5, 1e6, 1e9
"""Predicted energies of configurations that break a limit, the worse the higher."""

Measure = Callable[[ConfigGraph], Outcome]
"""Runs a configuration and returns what it did."""


@dataclass(frozen=True)
class AnnealingConfig:
    """The paper's schedule (§4.2), and the screen.

    Attributes:
        start_temperature, end_temperature, cooling: From 1 to 0.1 in steps of 0.05 per evaluation, then held.
        patience: Stop after this many evaluations in a row without a better configuration.
        max_evaluations: Stop after this many; 5 minutes at 10 seconds each.
        neighbours: With a screen: how many neighbours are predicted per step.
        least_gain: With a screen: stop when no prediction is better than the best by this much of the objective, per
            cent.
    """

    start_temperature: float = 1.0
    end_temperature: float = 0.1
    cooling: float = 0.05
    patience: int = 5
    max_evaluations: int = 30
    neighbours: int = 96
    least_gain: float = 0.1

    def __post_init__(self) -> None:
        if self.patience < 1 or self.max_evaluations < 1 or self.neighbours < 1:
            raise DomainError("annealing needs a patience, evaluations and neighbours of at least 1")
        if not 0 < self.end_temperature <= self.start_temperature or self.cooling < 0 or self.least_gain < 0:
            raise DomainError("temperatures fall from start to end, both above 0")

    def temperature(self, iteration: int) -> float:
        """Return the temperature of an iteration, the first being 0."""
        return max(self.start_temperature - self.cooling * iteration, self.end_temperature)


@dataclass
class Search:
    """One optimisation, from an incumbent to the best configuration that was measured.

    Attributes:
        goal: What is maximised.
        intensity_gco2_per_j: Carbon per energy now.
        measure: Runs a configuration.
        start: The incumbent: where the search begins, and what stays if nothing better is found.
        measured: What was evaluated, in order; not ``start``, whose outcome is known.
    """

    goal: Goal
    intensity_gco2_per_j: float
    measure: Measure
    start: Outcome
    measured: list[Outcome] = field(default_factory=list[Outcome])

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

    def consider(self, known: Iterable[Outcome]) -> None:
        """Take the best of outcomes that are known already, at the same load, without measuring anything."""
        for outcome in known:
            if self._worth(outcome) > self._worth(self.best):
                self.best = outcome

    def try_graph(self, graph: ConfigGraph) -> tuple[Outcome, bool]:
        """Measure a configuration; return its outcome and whether it is the best so far."""
        outcome = self.measure(graph)
        self.measured.append(outcome)
        better = self._worth(outcome) > self._worth(self.best)
        if better:
            self.best = outcome
        return outcome, better

    def _worth(self, outcome: Outcome) -> tuple[bool, float]:
        """Order outcomes: those within the limits by objective come after those that break one, by energy."""
        if self.goal.allows(outcome.accuracy, outcome.p95_s):
            return True, self.objective(outcome)
        return False, -self.energy(outcome)


def anneal(
    search: Search, application: Application, gpus: int, rng: np.random.Generator, config: AnnealingConfig
) -> None:
    """Search as the paper prints it: one random neighbour of the centre is measured per iteration (equations 6, 7)."""
    centre, without_gain, iteration = search.start, 0, 0
    while without_gain < config.patience and iteration < config.max_evaluations:
        graph = random_neighbour(centre.graph, application.fits, gpus, rng)
        outcome, better = search.try_graph(graph)
        without_gain = 0 if better else without_gain + 1
        if _accepts(search.energy(centre), search.energy(outcome), config.temperature(iteration), rng):
            centre = outcome
        iteration += 1


def _accepts(now: float, proposed: float, temperature: float, rng: np.random.Generator) -> bool:
    """Return whether the centre moves: to lower energy always, to higher by chance (equation 7)."""
    return proposed <= now or rng.random() < math.exp(-(proposed - now) / temperature)


def anneal_screened(
    search: Search,
    application: Application,
    gpus: int,
    rate_per_s: float,
    rng: np.random.Generator,
    config: AnnealingConfig,
) -> None:
    """Search with predictions first: what is measured is the best that a walk over predicted neighbours found.

    Every measurement corrects the predicted latencies by how far they were off there. It ends when no prediction
    promises a gain, or as the paper's search does.
    """
    screen = _Screen(search, application, gpus, rate_per_s, rng, config)
    screen.learn(search.start)
    without_gain = 0
    while without_gain < config.patience and len(search.measured) < config.max_evaluations:
        graph = screen.promising()
        if graph is None:
            return
        outcome, better = search.try_graph(graph)
        screen.learn(outcome)
        without_gain = 0 if better else without_gain + 1


@dataclass
class _Screen:
    """Predictions of configurations near those that were measured."""

    search: Search
    application: Application
    gpus: int
    rate_per_s: float
    rng: np.random.Generator
    config: AnnealingConfig
    seen: set[bytes] = field(default_factory=set[bytes])
    latency_factor: float = 1.0
    accuracy_offset: float = 0.0

    def learn(self, outcome: Outcome) -> None:
        """Take over a measurement."""
        self.seen.add(outcome.graph.key)
        found = predict(self.application, outcome.graph.weights[None], self.gpus, self.rate_per_s)
        self.accuracy_offset = outcome.accuracy - float(found.accuracy[0])
        if np.isfinite(found.p95_s[0]) and len(self.seen) > 1:
            self.latency_factor = outcome.p95_s / float(found.p95_s[0])

    def promising(self) -> ConfigGraph | None:
        """Return what is predicted to be best, by a walk from the best so far; None if that promises no gain.

        The walk goes to the best neighbour it has not been at, better or not, and ends when it has not found a better
        one for some steps.
        """
        best = self.search.best
        worth = -math.inf
        if self.search.goal.allows(best.accuracy, best.p95_s):
            worth = self.search.objective(best) + self.config.least_gain
        promised: ConfigGraph | None = None
        centre, least, idle_steps = best.graph, self._energies([best.graph])[0], 0
        visited = {centre.key}
        while idle_steps < _IDLE_STEPS:
            drawn = (
                random_neighbour(centre, self.application.fits, self.gpus, self.rng)
                for _ in range(self.config.neighbours)
            )
            near = [graph for graph in drawn if graph.key not in visited]
            if not near:
                break
            energies = self._energies(near)
            at = int(np.argmin(energies))
            centre = near[at]
            visited.add(centre.key)
            idle_steps = 0 if energies[at] < least else idle_steps + 1
            least = min(least, energies[at])
            for graph, energy in zip(near, energies, strict=True):
                if -energy > worth and graph.key not in self.seen and energy < _BELOW_FLOOR:
                    promised, worth = graph, -energy
        return promised

    def _energies(self, graphs: list[ConfigGraph]) -> list[float]:
        """Return the predicted energies; far above all others, and by how far it is broken, where a limit is."""
        weights = np.stack([graph.weights for graph in graphs])
        found = predict(self.application, weights, self.gpus, self.rate_per_s)
        goal, limit_s = self.search.goal, self.search.goal.baseline.p95_s
        energies: list[float] = []
        columns = (found.accuracy + self.accuracy_offset, found.energy_j, found.p95_s * self.latency_factor, found.load)
        for accuracy, energy_j, p95_s, load in zip(*(column.tolist() for column in columns), strict=True):
            objective = goal.objective(accuracy, energy_j * self.search.intensity_gco2_per_j)
            if not goal.keeps_floor(accuracy):
                energies.append(_BELOW_FLOOR + goal.baseline.accuracy - accuracy)
            elif load >= 1:
                energies.append(_OVERLOADED * load)
            elif p95_s > limit_s:
                energies.append(_LATE + min(p95_s / limit_s, _LATE))
            else:
                energies.append(annealing_energy(objective, p95_s, limit_s))
        return energies
