"""An inference service through some hours of a grid, under one scheme."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from lab.inference.graphs import node_link
from lab.inference.hours import HOUR_S, read_hours
from lab.inference.profiles import read_application
from lab.inference.schemes import best_measured, co2opt, random_search, uniform_graphs
from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.domain.units import J_PER_KWH
from services.core.policies.clover.anneal import AnnealingConfig, Search, anneal
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.evaluation import QUANTILES, Arrivals, Outcome, QueueEvaluator
from services.core.policies.clover.layouts import LAYOUTS, SLICES, realise
from services.core.policies.clover.objective import Baseline, Goal
from services.core.policies.clover.optimum import optimum
from services.core.policies.clover.prediction import predict
from services.core.policies.clover.screen import Screen, search_screened

PUE = 1.5
_HOPELESS = 1.5  # predictions of latency are a few per cent off
_LATENCY_MARGINS = (1.0, 0.9, 0.75)  # of the SLA, until a proposal keeps it with its waits
LIMIT_S = 300.0
"""An optimisation ends after 5 minutes (§4.2)."""
MAX_RECUT_S = 300.0


class Scheme(StrEnum):
    """Who chooses configurations (§5.1)."""

    CLOVER = "clover"
    BASE = "base"
    CO2OPT = "co2opt"
    BLOVER = "blover"
    ORACLE = "oracle"


@dataclass(frozen=True)
class InferenceRun:
    """What to simulate.

    Attributes:
        carbon: A bundled trace or a file.
        family: Of models.
        gpus: How many there are.
        scheme: Who chooses.
        carbon_weight: Lambda.
        hours: How many.
        seed: Of requests and of the search.
        profile, shared_profile, accuracy: Files, or None for the bundled ones.
        max_accuracy_loss_pct: The accuracy floor; None for none.
        reference_gpus: GPUs of BASE, whose load and latency count; None for ``gpus``.
        load: Share of BASE's capacity that requests take.
        evaluation_s: Seconds of traffic that an evaluation takes.
        recut_s: Seconds that a GPU is out of service when its layout changes; GPUs are cut one after the other.
        trigger_pct: Change of intensity that starts an optimisation.
        screen: Whether Clover predicts configurations before it measures any.
        bound: Whether to compute the optimum by integer programmes as well.
    """

    carbon: str
    family: str = "efficientnet"
    gpus: int = 10
    scheme: Scheme = Scheme.CLOVER
    carbon_weight: float = 0.5
    hours: int = 48
    seed: int = 1
    profile: Path | None = None
    shared_profile: Path | None = None
    accuracy: Path | None = None
    max_accuracy_loss_pct: float | None = None
    reference_gpus: int | None = None
    load: float = 0.8
    evaluation_s: float = 10.0
    recut_s: float = 0.0
    trigger_pct: float = 5.0
    screen: bool = True
    bound: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= 1_000 or not 1 <= (self.reference_gpus or 1) <= 1_000:
            raise DomainError("--gpus and --reference-gpus are between 1 and 1000")
        if not 0 < self.load < 1:
            raise DomainError(f"--load is a share of BASE's capacity between 0 and 1, not {self.load:g}")
        if not 0 < self.evaluation_s <= LIMIT_S:
            raise DomainError(f"--evaluation-s is above 0 and at most {LIMIT_S:g}, not {self.evaluation_s:g}")
        if not 0 <= self.recut_s <= MAX_RECUT_S:
            raise DomainError(f"--recut-s is between 0 and {MAX_RECUT_S:g}, not {self.recut_s:g}")
        if not 0 <= self.trigger_pct <= 1_000:
            raise DomainError(f"--trigger-pct is between 0 and 1000, not {self.trigger_pct:g}")

    def simulate(self) -> dict[str, Any]:
        """Return the figures.

        Raises:
            DomainError: A file cannot be used, or no configuration is possible.
        """
        began_s = time.perf_counter()
        hours, notes = read_hours(self.carbon, self.hours)
        application = read_application(self.family, self.profile, self.shared_profile, self.accuracy)
        found = _Service(self, application, hours).run()
        return found | {"wall_s": round(time.perf_counter() - began_s, 3)} | ({"notes": notes} if notes else {})


@dataclass
class _Interval:
    """What happened in an hour: each outcome with the seconds it served."""

    intensity: float
    served: list[tuple[Outcome, float]] = field(default_factory=list[tuple[Outcome, float]])
    evaluations: int = 0
    bound: float | None = None
    optimum: float | None = None

    @property
    def left_s(self) -> float:
        """Seconds of the hour that nothing has served yet."""
        return max(0.0, HOUR_S - sum(s for _, s in self.served))


class _Service:
    """The service, its baseline and its present configuration."""

    def __init__(self, run: InferenceRun, application: Application, hours: Floats) -> None:
        self.run_, self.application, self.hours = run, application, hours
        self.rng = np.random.default_rng(run.seed)
        arrivals = Arrivals.drawn(self.rng)
        reference = application.base(run.reference_gpus or run.gpus)
        self.rate_per_s = run.load * application.capacity_per_s(reference.weights)
        self.base = QueueEvaluator(application, reference.instances, self.rate_per_s, arrivals).measure(reference)
        self.evaluator = QueueEvaluator(application, run.gpus, self.rate_per_s, arrivals)
        others = np.random.default_rng((run.seed, 1))  # what is measured serves other requests than the model
        model = QueueEvaluator(application, run.gpus, self.rate_per_s, Arrivals.drawn(others))
        self.screen = Screen(application, run.gpus, self.rate_per_s, model.measure, others)
        carbon = self.base.energy_j * _gco2_per_j(float(np.mean(hours)))
        baseline = Baseline(self.base.accuracy, carbon, self.base.p95_s)
        self.goal = Goal(baseline, run.carbon_weight, run.max_accuracy_loss_pct)
        self.evaluated: list[Outcome] = []
        self.layouts = [0] * run.gpus
        self.recut, self.recut_s = 0, 0.0

    def run(self) -> dict[str, Any]:
        """Return the figures of all hours."""
        run = self.run_
        present = self.evaluator.measure(self.application.base(run.gpus))
        if run.scheme is Scheme.CO2OPT:
            present = self.evaluator.measure(co2opt(self.application, run.gpus))
        uniform: list[Outcome] = []
        if run.scheme is Scheme.ORACLE:
            uniform = self._uniform()
        config = AnnealingConfig(max_evaluations=max(int(LIMIT_S / run.evaluation_s), 1))
        optimised_at: float | None = None
        intervals: list[_Interval] = []
        for intensity in self.hours.tolist():
            interval = _Interval(intensity)
            if run.scheme is Scheme.ORACLE:
                search = self._search(intensity, present)
                search.best = max((search.best, *uniform), key=search.worth)
                present = search.best
            changed = optimised_at is None or abs(intensity / optimised_at - 1) * 100 > run.trigger_pct
            if run.scheme in (Scheme.CLOVER, Scheme.BLOVER) and changed:
                optimised_at = intensity
                search = self._search(intensity, present)
                self._optimise(search, config)
                present = search.best
                interval.evaluations = len(search.measured)
                self.evaluated += search.measured
                for outcome in search.measured:
                    self._cut(interval, outcome)
                    interval.served.append((outcome, min(run.evaluation_s, interval.left_s)))
            self._cut(interval, present)
            interval.served.append((present, interval.left_s))
            if run.bound:
                self._bound(interval)
            intervals.append(interval)
        return self._figures(intervals)

    def _uniform(self) -> list[Outcome]:
        """Measure ORACLE's configurations, but for those that are predicted to miss the SLA by far."""
        graphs = list(uniform_graphs(self.application, self.run_.gpus))
        weights = np.stack([graph.weights for graph in graphs])
        p95_s = predict(self.application, weights, self.run_.gpus, self.rate_per_s).p95_s
        hopeful = p95_s <= _HOPELESS * self.goal.baseline.p95_s
        return [self.evaluator.measure(graph) for graph, may in zip(graphs, hopeful, strict=True) if may]

    def _search(self, intensity: float, present: Outcome) -> Search:
        return Search(self.goal, _gco2_per_j(intensity), self.evaluator.measure, present)

    def _optimise(self, search: Search, config: AnnealingConfig) -> None:
        app, gpus = self.application, self.run_.gpus
        if self.run_.scheme is Scheme.BLOVER:
            random_search(search, app, gpus, self.rng, config)
        elif self.run_.screen:
            search.best = max((search.best, *self.evaluated), key=search.worth)
            search_screened(search, self.screen, config)
        else:
            anneal(search, app, gpus, self.rng, config)

    def _cut(self, interval: _Interval, outcome: Outcome) -> None:
        """Cut GPUs anew for a configuration; while each is out of service, the others serve."""
        found = realise(outcome.graph.slices, self.layouts)
        for gpu in found.recut:
            if self.run_.recut_s:
                without = self._without(found.layouts[gpu], outcome)
                interval.served.append((without, min(self.run_.recut_s, interval.left_s)))
        self.layouts = list(found.layouts)
        self.recut += len(found.recut)
        self.recut_s += len(found.recut) * self.run_.recut_s

    def _without(self, layout: int, outcome: Outcome) -> Outcome:
        """Return what a configuration does without the instances on a GPU of a layout.

        Of the slices of each type those of the most frequent variant are missing. The other GPUs may be cut already or
        not yet; they are taken as they will be. Where there is no other, requests wait for the cut to end.
        """
        weights = outcome.graph.weights.copy()
        lost: list[int] = list(LAYOUTS[layout])
        for column, size in enumerate(SLICES):
            for _ in range(lost.count(size)):
                row = int(weights[:, column].argmax())
                weights[row, column] = max(weights[row, column] - 1, 0)
        if weights.any():
            return self.evaluator.measure(ConfigGraph(weights))
        waits_s = outcome.latency_s + self.run_.recut_s * QUANTILES
        return replace(outcome, latency_s=waits_s, p95_s=float(np.quantile(waits_s, 0.95)))

    def _bound(self, interval: _Interval) -> None:
        """Note the bound of an hour and the best configuration that the programmes find."""
        at = _gco2_per_j(interval.intensity)
        for margin in _LATENCY_MARGINS:  # below 1 it leaves room for waiting
            tighter = replace(self.goal.baseline, p95_s=self.goal.baseline.p95_s * margin)
            goal = replace(self.goal, baseline=tighter)
            found = optimum(self.application, self.run_.gpus, self.rate_per_s, goal, at)
            if found is None:
                return
            interval.bound = found.bound if interval.bound is None else interval.bound
            best = best_measured(found, self.evaluator.measure, self.goal, at)
            if best is not None:
                interval.optimum = self.goal.objective(best.accuracy, best.energy_j * at)
                return

    def _figures(self, intervals: list[_Interval]) -> dict[str, Any]:
        run, base = self.run_, self.base
        total_s = HOUR_S * len(intervals)
        served = [(outcome, s, each.intensity) for each in intervals for outcome, s in each.served]
        accuracy = sum(outcome.accuracy * s for outcome, s, _ in served) / total_s
        requests = self.rate_per_s
        carbon_g = sum(outcome.energy_j * s * requests * _gco2_per_j(at) for outcome, s, at in served) * PUE
        base_g = sum(base.energy_j * HOUR_S * requests * _gco2_per_j(each.intensity) for each in intervals) * PUE
        energy_j = sum(outcome.energy_j * s for outcome, s, _ in served) * requests
        timeline: list[dict[str, Any]] = []
        before = self.application.base(run.gpus)
        for hour, interval in enumerate(intervals):
            chosen = interval.served[-1][0].graph
            timeline.append(self._hour(hour, interval) | {"edit_distance": before.distance(chosen)})
            before = chosen
        evaluations = sum(each.evaluations for each in intervals)
        kept = sum(self.goal.allows(each.accuracy, each.p95_s) for each in self.evaluated)
        found: dict[str, Any] = {
            "scheme": run.scheme.value,
            "family": run.family,
            "carbon": Path(run.carbon).name,
            "gpus": run.gpus,
            "lambda": run.carbon_weight,
            "hours": len(intervals),
            "seed": run.seed,
            "carbon_saving_pct": 100 * (1 - carbon_g / base_g),
            "accuracy_loss_pct": 100 * (1 - accuracy / base.accuracy),
            "p95_over_sla": max(each["p95_over_sla"] for each in timeline),
            "objective_mean": float(np.mean([each["objective"] for each in timeline])),
            "evaluations": evaluations,
            "sla_ok_share": kept / evaluations if evaluations else None,
            "optimisation_time_share": evaluations * run.evaluation_s / total_s,
            "gpus_recut": self.recut,
            "recut_time_share": self.recut_s / total_s,
            "sla_ms": 1_000 * base.p95_s,
            "requests_per_s": requests,
            "energy_kwh": energy_j / J_PER_KWH,
            "base_energy_j_per_request": base.energy_j,
            "carbon_kg": carbon_g / 1_000,
            "timeline": timeline,
            "last_graph": node_link(before, self.application.variants),
        }
        if run.bound:
            found["bound_mean"] = _mean([each.bound for each in intervals])
            found["optimum_mean"] = _mean([each.optimum for each in intervals])
        return found

    def _hour(self, hour: int, interval: _Interval) -> dict[str, Any]:
        gco2_per_j = _gco2_per_j(interval.intensity)
        objective = sum(
            self.goal.objective(outcome.accuracy, outcome.energy_j * gco2_per_j) * s for outcome, s in interval.served
        )
        chosen = interval.served[-1][0]
        return {
            "hour": hour,
            "gco2_per_kwh": interval.intensity,
            "objective": objective / HOUR_S,
            "p95_over_sla": _p95_s(interval.served) / self.goal.baseline.p95_s,
            "accuracy_pct": chosen.accuracy,
            "energy_j_per_request": chosen.energy_j,
            "evaluations": interval.evaluations,
            "configuration": {
                f"{variant} on {size}": int(chosen.graph.weights[row, column])
                for row, variant in enumerate(self.application.variants)
                for column, size in enumerate(("1g", "2g", "3g", "4g", "7g"))
                if chosen.graph.weights[row, column]
            },
            **({} if interval.bound is None else {"bound": interval.bound, "optimum": interval.optimum}),
        }


def _mean(values: list[float | None]) -> float | None:
    """Return the mean, if every hour has a value."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if len(known) == len(values) else None


def _p95_s(served: list[tuple[Outcome, float]]) -> float:
    """Return the 95th percentile of latency over all requests of an interval."""
    if len(served) == 1:
        return served[0][0].p95_s
    latency_s = np.concatenate([outcome.latency_s for outcome, _ in served])
    weight = np.concatenate([np.full(outcome.latency_s.size, s / outcome.latency_s.size) for outcome, s in served])
    order = np.argsort(latency_s)
    reached = np.cumsum(weight[order])
    return float(latency_s[order][np.searchsorted(reached, 0.95 * reached[-1])])


def _gco2_per_j(gco2_per_kwh: float) -> float:
    return gco2_per_kwh / J_PER_KWH
