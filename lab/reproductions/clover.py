"""The tables of ``lab/results/clover.md``: Clover's Figures 9 to 16 on the bundled profile.

    python -m lab.reproductions.clover PAGE

In PAGE, what stands between ``<!-- NAME -->`` and ``<!-- end -->`` is made anew. All runs are
``wattshift lab inference`` with EfficientNet on H200s; searches are means over ``SEEDS``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any

import numpy as np

from lab.inference.profiles import read_application
from lab.inference.run import InferenceRun, Scheme
from lab.inference.schemes import best_measured
from lab.reproductions.marked import fill
from services.core.domain.units import J_PER_KWH
from services.core.policies.clover.anneal import AnnealingConfig, Search, anneal
from services.core.policies.clover.application import Application
from services.core.policies.clover.config_graph import ConfigGraph
from services.core.policies.clover.evaluation import Arrivals, QueueEvaluator
from services.core.policies.clover.layouts import LAYOUT_COUNTS
from services.core.policies.clover.objective import Baseline, Goal
from services.core.policies.clover.optimum import optimum
from services.core.policies.clover.prediction import predict
from services.core.policies.clover.screen import Screen, ScreenConfig, search_screened

SEEDS = (1, 2, 3)
TRACES = ("ciso-march", "ciso-september", "eso-march")
LAMBDAS, FLOORS, GPUS = (0.1, 0.3, 0.5, 0.7, 0.9), (0.2, 0.4, 0.6, 0.8), (10, 4, 2)
INTENSITIES = (60.0, 100.0, 200.0, 300.0)
MANY = AnnealingConfig(patience=30, max_evaluations=1_000)
Figures = dict[str, Any]


@cache
def mean_run(seeds: Sequence[int] = SEEDS, **options: Any) -> Figures:
    """Return the figures of a run, each the mean over seeds; the worst hour's latency is the worst of all."""
    runs = [InferenceRun(seed=seed, **options).simulate() for seed in seeds]
    found: Figures = {
        name: float(np.mean([run[name] for run in runs]))
        for name, value in runs[0].items()
        if isinstance(value, int | float)
    }
    return found | {"p95_over_sla": max(run["p95_over_sla"] for run in runs), "timeline": runs[0]["timeline"]}


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table whose first column is text."""
    names = list(header)
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def schemes() -> str:
    """Return every scheme on every trace (Figures 9, 10 and 16)."""
    header = ("trace, scheme", "carbon", "accuracy", "worst p95/SLA", "objective", "of the bound")
    return markdown(header, [row for trace in TRACES for row in _schemes(trace)])


def _schemes(trace: str) -> list[list[str]]:
    bounded = trace == TRACES[0]  # a bound takes a minute
    bound = mean_run(seeds=(1,), carbon=trace, scheme=Scheme.CLOVER, bound=True) if bounded else {}
    rows: list[list[str]] = []
    for name, options in (
        ("BASE", {"scheme": Scheme.BASE}),
        ("CO2OPT", {"scheme": Scheme.CO2OPT}),
        ("BLOVER", {"scheme": Scheme.BLOVER}),
        ("Clover as printed", {"scheme": Scheme.CLOVER, "screen": False}),
        ("Clover, screened", {"scheme": Scheme.CLOVER}),
        ("ORACLE", {"scheme": Scheme.ORACLE}),
    ):
        seeds = SEEDS if options["scheme"] in (Scheme.BLOVER, Scheme.CLOVER) else SEEDS[:1]
        found = mean_run(seeds=seeds, carbon=trace, **options)
        rows.append(
            [
                f"{trace}, {name}",
                f"{-found['carbon_saving_pct']:+.1f} %",
                f"{-found['accuracy_loss_pct']:+.2f} %",
                f"{found['p95_over_sla']:.3f}",
                f"{found['objective_mean']:.2f}",
                f"{100 * found['objective_mean'] / bound['bound_mean']:.1f} %" if bounded else "",
            ]
        )
    if not bounded:
        return rows
    best = f"{bound['optimum_mean']:.2f}"
    share = f"{100 * bound['optimum_mean'] / bound['bound_mean']:.1f} %"
    return [*rows, [f"{trace}, best of the integer programmes", "", "", "", best, share]]


def searches() -> str:
    """Return what the searches cost (Figure 12) on the first trace."""
    header = ("search", "evaluations", "that met the SLA", "time optimising", "objective")
    rows: list[list[str]] = []
    for name, options in (
        ("BLOVER", {"scheme": Scheme.BLOVER}),
        ("Clover as printed", {"scheme": Scheme.CLOVER, "screen": False}),
        ("Clover, screened", {"scheme": Scheme.CLOVER}),
    ):
        found = mean_run(seeds=SEEDS, carbon=TRACES[0], **options)
        rows.append(
            [
                name,
                f"{found['evaluations']:.1f}",
                f"{100 * found['sla_ok_share']:.0f} %",
                f"{100 * found['optimisation_time_share']:.2f} %",
                f"{found['objective_mean']:.2f}",
            ]
        )
    return markdown(header, rows)


def following() -> str:
    """Return the objective over time (Figure 11)."""
    header = ("hour", "gCO2/kWh", "BASE", "CO2OPT", "BLOVER", "Clover as printed", "Clover, screened", "ORACLE")
    runs = [
        mean_run(seeds=SEEDS[:1], carbon=TRACES[0], scheme=Scheme.BASE),
        mean_run(seeds=SEEDS[:1], carbon=TRACES[0], scheme=Scheme.CO2OPT),
        mean_run(seeds=SEEDS, carbon=TRACES[0], scheme=Scheme.BLOVER),
        mean_run(seeds=SEEDS, carbon=TRACES[0], scheme=Scheme.CLOVER, screen=False),
        mean_run(seeds=SEEDS, carbon=TRACES[0], scheme=Scheme.CLOVER),
        mean_run(seeds=SEEDS[:1], carbon=TRACES[0], scheme=Scheme.ORACLE),
    ]
    return markdown(
        header,
        [
            [str(hour), f"{runs[0]['timeline'][hour]['gco2_per_kwh']:.0f}"]
            + [f"{run['timeline'][hour]['objective']:.2f}" for run in runs]
            for hour in (*range(0, 48, 6), 47)
        ],
    )


def weights() -> str:
    """Return what lambda and the accuracy floor do at 100 gCO2/kWh, one hour (Figure 14)."""
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        flat = Path(folder) / "flat.csv"
        flat.write_text("flat\n" + "100\n" * 48)
        for name, options in (
            *((f"lambda {weight:g}", {"carbon_weight": weight}) for weight in LAMBDAS),
            *((f"loss of at most {loss:g} %, lambda 0.5", {"max_accuracy_loss_pct": loss}) for loss in FLOORS),
            *(
                (f"the same on 2 GPUs for 10: {loss:g} %", _fewer(2) | {"max_accuracy_loss_pct": loss})
                for loss in FLOORS
            ),
        ):
            found = mean_run(carbon=str(flat), **options)
            rows.append([name, *_saving(found)])
    return markdown(("", "carbon", "accuracy", "worst p95/SLA"), rows)


def fewer() -> str:
    """Return BASE and Clover with fewer GPUs at the load and the SLA of ten (Figure 15)."""
    rows = [
        [f"{gpus} GPUs, {scheme.value}", *_saving(mean_run(carbon=TRACES[0], scheme=scheme, **_fewer(gpus)))]
        for gpus in GPUS
        for scheme in (Scheme.BASE, Scheme.CLOVER)
    ]
    return markdown(("", "carbon", "accuracy", "worst p95/SLA"), rows)


def _fewer(gpus: int) -> dict[str, Any]:
    return {"gpus": gpus, "reference_gpus": 10}


def _saving(found: Figures) -> list[str]:
    return [
        f"{-found['carbon_saving_pct']:+.1f} %",
        f"{-found['accuracy_loss_pct']:+.2f} %",
        f"{found['p95_over_sla']:.3f}",
    ]


def all_graphs(application: Application) -> list[ConfigGraph]:
    """Return every configuration of one GPU, slices left empty included."""
    found: set[ConfigGraph] = set()
    empty = len(application.variants)
    for counts in LAYOUT_COUNTS:
        choices = [combinations_with_replacement(range(empty + 1), count) for count in counts]
        for chosen in product(*map(list, choices)):
            weights = np.zeros((empty + 1, len(counts)), dtype=np.int64)
            for column, variants in enumerate(chosen):
                np.add.at(weights[:, column], list(variants), 1)
            if weights[:empty].any() and not weights[:empty][~application.fits].any():
                found.add(ConfigGraph(weights[:empty]))
    return sorted(found, key=lambda graph: graph.key)


def exhaustive() -> str:
    """Return the searches on one GPU against all of its configurations."""
    application = read_application("efficientnet")
    graphs = all_graphs(application)
    base = application.base(1)
    rate_per_s = 0.8 * application.capacity_per_s(base.weights)
    evaluator = QueueEvaluator(application, 1, rate_per_s, Arrivals.drawn(np.random.default_rng(1)))
    reference = evaluator.measure(base)
    p95_s = predict(application, np.stack([graph.weights for graph in graphs]), 1, rate_per_s).p95_s
    known = [
        evaluator.measure(graph) for graph, late in zip(graphs, p95_s, strict=True) if late <= 1.5 * reference.p95_s
    ]
    rows: list[list[str]] = []
    for intensity in INTENSITIES:
        at = intensity / J_PER_KWH
        baseline = Baseline(reference.accuracy, reference.energy_j * 100 / J_PER_KWH, reference.p95_s)
        goal = Goal(baseline)
        best = max(
            goal.objective(each.accuracy, each.energy_j * at)
            for each in known
            if goal.allows(each.accuracy, each.p95_s)
        )
        found = optimum(application, 1, rate_per_s, goal, at)
        proposed = None if found is None else best_measured(found, evaluator.measure, goal, at)
        programme = "-" if proposed is None else f"{goal.objective(proposed.accuracy, proposed.energy_j * at):.2f}"
        figures: list[str] = []
        for screened in (False, True):
            worth, evaluations = [], []
            for seed in range(1, 11):
                search, rng = Search(goal, at, evaluator.measure, reference), np.random.default_rng(seed)
                if screened:
                    model = QueueEvaluator(application, 1, rate_per_s, Arrivals.drawn(rng))
                    screen = Screen(application, 1, rate_per_s, model.measure, rng)
                    search_screened(search, screen, AnnealingConfig())
                else:
                    anneal(search, application, 1, rng, AnnealingConfig())
                worth.append(search.objective(search.best))
                evaluations.append(len(search.measured))
            figures.append(f"{np.mean(worth):.2f}, worst {min(worth):.2f}, in {np.mean(evaluations):.1f}")
        bound = "-" if found is None else f"{found.bound:.2f}"
        rows.append([f"{intensity:g} gCO2/kWh", f"{best:.2f}", bound, programme, *figures])
    header = ("", "true optimum", "bound", "integer programmes", "as printed", "screened")
    return f"{len(graphs):,} configurations, {len(known):,} of them measured.\n\n" + markdown(header, rows)


def floors() -> str:
    """Return the searches under accuracy floors, ten GPUs at 200 gCO2/kWh, against the best that is known.

    That is the best of all that a far wider screen proposes, measured: a programme per interval of rests, neighbours of
    the 120 best, twice the tolerances, and as model what is measured itself.
    """
    application, gpus, at = read_application("efficientnet"), 10, 200 / J_PER_KWH
    base = application.base(gpus)
    rate_per_s = 0.8 * application.capacity_per_s(base.weights)
    wide = ScreenConfig(
        programmes=24,
        leaders=120,
        modelled=1_000,
        accuracy_tolerance=0.03,
        late_tolerance=0.02,
        objective_tolerance=0.4,
    )
    rows: list[list[str]] = []
    for loss in FLOORS:
        shares: list[float] = []
        found: dict[str, list[float]] = {name: [] for name in ("best", "bound", "printed", "tried", "screened", "ran")}
        for seed in SEEDS:
            evaluator, model = (
                QueueEvaluator(application, gpus, rate_per_s, Arrivals.drawn(np.random.default_rng((seed, each))))
                for each in range(2)
            )
            reference = evaluator.measure(base)
            goal = Goal(
                Baseline(reference.accuracy, reference.energy_j * at, reference.p95_s), max_accuracy_loss_pct=loss
            )
            searches = [Search(goal, at, evaluator.measure, reference) for _ in range(3)]
            rngs = [np.random.default_rng(seed) for _ in range(3)]
            best, printed, screened = searches
            search_screened(best, Screen(application, gpus, rate_per_s, evaluator.measure, rngs[0], wide), MANY)
            anneal(printed, application, gpus, rngs[1], AnnealingConfig())
            screen = Screen(application, gpus, rate_per_s, model.measure, rngs[2])
            search_screened(screened, screen, AnnealingConfig())
            bound = optimum(application, gpus, rate_per_s, goal, at)
            found["best"].append(best.objective(best.best))
            found["bound"].append(np.nan if bound is None else bound.bound)
            found["printed"].append(printed.objective(printed.best))
            found["tried"].append(len(printed.measured))
            found["screened"].append(screened.objective(screened.best))
            found["ran"].append(len(screened.measured))
            shares.append(100 * found["screened"][-1] / found["best"][-1])
        mean = {name: float(np.mean(values)) for name, values in found.items()}
        rows.append(
            [
                f"loss of at most {loss:g} %",
                f"{mean['bound']:.2f}",
                f"{mean['best']:.2f}",
                f"{mean['printed']:.2f} in {mean['tried']:.1f}",
                f"{mean['screened']:.2f} in {mean['ran']:.1f}",
                f"{min(shares):.1f} %",
            ]
        )
    header = ("", "bound", "best known", "as printed", "screened", "of the best known, worst seed")
    return markdown(header, rows)


def floors_on_traces() -> str:
    """Return Clover with floors on all traces: the worst seed's mean objective, and the most evaluations."""
    rows: list[list[str]] = []
    for loss in FLOORS:
        row = [f"loss of at most {loss:g} %"]
        for trace in TRACES:
            runs = [
                InferenceRun(carbon=trace, hours=12, seed=seed, max_accuracy_loss_pct=loss).simulate() for seed in SEEDS
            ]
            least, most = min(run["objective_mean"] for run in runs), max(run["evaluations"] for run in runs)
            row.append(f"{least:.2f} in {most}")
        rows.append(row)
    return markdown(("", *TRACES), rows)


def main(page: Path) -> None:
    """Make the tables of a page anew; each is written once it is made."""
    for table in (floors, exhaustive, weights, searches, following, fewer, schemes, floors_on_traces):
        fill(page, {table.__name__: table})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
