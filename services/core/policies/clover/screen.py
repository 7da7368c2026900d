"""What is worth measuring: configurations by three models, each finer than the one before.

Integer programmes propose where to begin (``optimum``). From there neighbours are predicted in closed form
(``prediction``), those of the best known configuration first, until those of all the leaders are known. The most
promising are run through the queue model, and the best that keeps the limits there is what to measure. The closed form
is off by about a hundredth of a point of accuracy and half a per cent of late requests, which matters where a floor is
tight, so it only has to keep the limits within tolerances. With many GPUs, more configurations lie within the
tolerances than are run; if those that were run yield nothing, some more follow that keep the limits even with the
errors that the closed form turned out to have.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.policies.clover.anneal import AnnealingConfig, Measure, Search
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.layouts import can_be_cut
from services.core.policies.clover.objective import Goal
from services.core.policies.clover.optimum import proposals
from services.core.policies.clover.prediction import TAIL, Predictions, predict

_BEYOND = 1e6  #: Worth of what is predicted to break a limit, below that of everything else
_FLOOR_FIRST = 1e3  #: A point of accuracy below the floor is as bad as this many times all requests being late


@dataclass(frozen=True)
class ScreenConfig:
    """How thoroughly to look; the defaults are ours."""

    least_gain: float = 0.02  #: What a configuration must promise beyond the best one's objective, per cent
    programmes: int = 3  #: How many integer programmes propose configurations
    anew_pct: float = 20.0  #: Change of intensity after which they propose again, per cent
    leaders: int = 40  #: Neighbours are predicted until those of this many of the best known configurations are known
    pairs: int = 256  #: Random neighbours of four edits, in addition to all of one and two
    kept: int = 32  #: How many of each configuration's best neighbours are remembered
    modelled: int = 64  #: Maximum runs of the queue model per proposal
    corrected: int = 16
    """Maximum further runs if those yield nothing, by predictions corrected for the errors found in them."""
    accuracy_tolerance: float = 0.015  #: How far the closed form may fall below the floor, points of accuracy
    late_tolerance: float = 0.01  #: How far it may exceed the permitted share of late requests
    objective_tolerance: float = 0.2  #: How far its objective may be too low, per cent


_Shortfall = tuple[float, float]
"""How much worse the queue model may be than the closed form: points of accuracy, share of late requests."""


@dataclass
class _Known:
    """Configurations that were predicted, in the order in which they became known."""

    graphs: list[ConfigGraph] = field(default_factory=list[ConfigGraph])
    """The configurations; ``places`` has their indices by key."""
    places: dict[bytes, int] = field(default_factory=dict[bytes, int])
    accuracy: list[float] = field(default_factory=list[float])  #: The predictions for each, as the next two
    energy_j: list[float] = field(default_factory=list[float])
    late: list[float] = field(default_factory=list[float])
    expanded: set[int] = field(default_factory=set[int])  #: The indices of those whose neighbours were predicted


class Screen:
    """Proposes what to measure for one application at one load, one SLA and one floor.

    It remembers what it predicted, and proposes nothing twice: what was measured in one search is known in the next,
    which has to begin with the best of that (``Search.best``).
    """

    def __init__(
        self,
        application: Application,
        gpus: int,
        rate_per_s: float,
        model: Measure,
        rng: np.random.Generator,
        config: ScreenConfig | None = None,
    ) -> None:
        self._application, self._gpus, self._rate_per_s = application, gpus, rate_per_s
        self._model, self._rng, self._config = model, rng, config or ScreenConfig()
        self._known = _Known()
        self._cells = np.flatnonzero(application.fits)
        self._proposed_at = math.nan
        self._proposed: set[bytes] = set()

    def promising(self, search: Search) -> ConfigGraph | None:
        """Return what to measure next; None if nothing promises a gain on the best that was measured."""
        best, goal, config = search.best, search.goal, self._config
        within = goal.allows(best.accuracy, best.p95_s)
        least = search.objective(best) + config.least_gain if within else -math.inf
        self._propose(search)
        worths = self._explored(search)
        self._proposed.add(search.start.graph.key)
        promised, shortfall = self._best_modelled(search, worths, least, config.modelled)
        if promised is None and shortfall is not None:
            promised, _ = self._best_modelled(search, self._worths(search, shortfall), least, config.corrected)
        if promised is None and not within:
            promised = self._less_broken(best.graph, worths)
        if promised is not None:
            self._proposed.add(promised.key)
        return promised

    def _best_modelled(
        self, search: Search, worths: Floats, least: float, most: int
    ) -> tuple[ConfigGraph | None, _Shortfall | None]:
        """Run the most promising configurations, at most ``most``, through the queue model.

        Returns:
            The best that keeps the limits and is worth more than ``least``; None if none is. Also the closed form's
            largest errors, if the runs were used up before the candidates; else None.
        """
        known, goal = self._known, search.goal
        promised: ConfigGraph | None = None
        off: list[tuple[float, float]] = []
        for place in _best_first(worths):
            graph = known.graphs[place]
            if worths[place] <= -_BEYOND or worths[place] + self._config.objective_tolerance <= least:
                break
            if len(off) == most:
                accuracy, late = np.max(off, axis=0).tolist()
                return promised, (accuracy, late)
            if graph.key in self._proposed:
                continue
            found = self._model(graph)
            late = float((found.latency_s > goal.baseline.p95_s).mean())
            off.append((known.accuracy[place] - found.accuracy, late - known.late[place]))
            worth = search.objective(found)
            if worth > least and goal.allows(found.accuracy, found.p95_s):
                promised, least = graph, worth
        return promised, None

    def _less_broken(self, best: ConfigGraph, worths: Floats) -> ConfigGraph | None:
        """Return the configuration that breaks the limits least if none keeps them; None if no better than the best."""
        known = self._known
        places = (place for place in _best_first(worths) if worths[place] > worths[known.places[best.key]])
        return next((known.graphs[place] for place in places if known.graphs[place].key not in self._proposed), None)

    def _propose(self, search: Search) -> None:
        """Add the incumbent, and the programmes' proposals if the intensity has changed."""
        at = search.intensity_gco2_per_j
        self._take([search.start.graph, search.best.graph], search.goal)
        if abs(at / self._proposed_at - 1) * 100 <= self._config.anew_pct:
            return
        self._proposed_at = at
        programmes = self._config.programmes
        found = proposals(self._application, self._gpus, self._rate_per_s, search.goal, at, programmes)
        self._take(found, search.goal)

    def _explored(self, search: Search) -> Floats:
        """Predict neighbours until those of all the leaders are known; return the worth of each configuration."""
        known = self._known
        while True:
            worths = self._worths(search)
            leaders = _best_first(worths)[: self._config.leaders]
            place = next((each for each in leaders if each not in known.expanded), None)
            if place is None:
                return worths
            known.expanded.add(place)
            self._expand(known.graphs[place], search)

    def _expand(self, centre: ConfigGraph, search: Search) -> None:
        weights = self._neighbours(centre.weights.ravel())
        shape = centre.weights.shape
        found = predict(self._application, weights.reshape(-1, *shape), self._gpus, self._rate_per_s)
        late = _late(found, search.goal)
        worths = self._worth(search, found.accuracy, found.energy_j, late)
        taken = 0
        for row in _best_first(worths):
            if taken == self._config.kept:
                return
            graph = ConfigGraph(weights[row].reshape(shape))
            if graph.key in self._known.places or not can_be_cut(graph.slices, self._gpus):
                continue
            self._add(graph, float(found.accuracy[row]), float(found.energy_j[row]), float(late[row]))
            taken += 1

    def _neighbours(self, centre: Ints) -> Ints:
        """Return all neighbours with one edit or two of opposite sign, and some with four: (n, variants * 5)."""
        unit = np.eye(centre.size, dtype=np.int64)
        there = np.flatnonzero(centre)
        gone, more = -unit[there], unit[self._cells]
        swaps = (gone[:, None, :] + more[None, :, :]).reshape(-1, centre.size)
        pairs = self._rng.integers(0, len(swaps), (self._config.pairs, 2)) if len(swaps) else np.zeros((0, 2), np.int64)
        edits = np.concatenate([gone, more, swaps, swaps[pairs[:, 0]] + swaps[pairs[:, 1]]])
        found = centre + edits
        return found[(found >= 0).all(axis=1) & found.any(axis=1) & edits.any(axis=1)]

    def _take(self, graphs: list[ConfigGraph], goal: Goal) -> None:
        new = [graph for graph in dict.fromkeys(graphs) if graph.key not in self._known.places]
        if not new:
            return
        found = predict(self._application, np.stack([graph.weights for graph in new]), self._gpus, self._rate_per_s)
        late = _late(found, goal)
        for row, graph in enumerate(new):
            self._add(graph, float(found.accuracy[row]), float(found.energy_j[row]), float(late[row]))

    def _add(self, graph: ConfigGraph, accuracy: float, energy_j: float, late: float) -> None:
        known = self._known
        known.places[graph.key] = len(known.graphs)
        known.graphs.append(graph)
        known.accuracy.append(accuracy)
        known.energy_j.append(energy_j)
        known.late.append(late)

    def _worths(self, search: Search, off: _Shortfall | None = None) -> Floats:
        known = self._known
        return self._worth(search, np.array(known.accuracy), np.array(known.energy_j), np.array(known.late), off)

    def _worth(
        self, search: Search, accuracy: Floats, energy_j: Floats, late: Floats, off: _Shortfall | None = None
    ) -> Floats:
        """Return the predicted objective, (n,); where limits are broken, far below it, by how much they are broken.

        The tolerances apply, or, with ``off``, the closed form is assumed to be off by that much.
        """
        goal, config = search.goal, self._config
        off_accuracy, off_late = off or (-config.accuracy_tolerance, -config.late_tolerance)
        carbon = energy_j * search.intensity_gco2_per_j
        delta_carbon = 1 - carbon / goal.baseline.carbon_gco2
        delta_accuracy = accuracy / goal.baseline.accuracy - 1
        objective = 100 * (goal.carbon_weight * delta_carbon + (1 - goal.carbon_weight) * delta_accuracy)
        below = np.maximum(goal.floor + off_accuracy - accuracy, 0.0)
        over = np.maximum(late + off_late - TAIL, 0.0)
        return np.where((below > 0) | (over > 0), -_BEYOND * (1 + _FLOOR_FIRST * below + over), objective)


def _best_first(worths: Floats) -> list[int]:
    """Return the indices, best first; ties keep their order."""
    return np.argsort(-worths, kind="stable").tolist()


def _late(found: Predictions, goal: Goal) -> Floats:
    """Return the share of late requests, or the load if the servers cannot keep up: (configurations,)."""
    return np.where(found.load < 1, found.late_share(goal.baseline.p95_s), found.load)


def search_screened(search: Search, screen: Screen, config: AnnealingConfig) -> None:
    """Measure what the screen proposes, until it promises no gain or the paper's stopping rules end the search."""
    without_gain = 0
    while without_gain < config.patience and len(search.measured) < config.max_evaluations:
        graph = screen.promising(search)
        if graph is None:
            return
        _, better = search.try_graph(graph)
        without_gain = 0 if better else without_gain + 1
