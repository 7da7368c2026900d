"""What is run again of which published table; ``tests/lab/reproductions/test_published.py`` says why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from lab.experiments.cell import run_cell
from lab.placement.planner import plan_layout
from lab.reproductions import (
    asrpt,
    asrpt_forest,
    asrpt_layouts,
    batches_beside,
    batches_day,
    carbon_faults,
    carbon_report,
    carbon_start,
    cells,
    clover,
    freesh_day,
    freesh_horizon,
    freesh_readings,
    freesh_serving,
    green_compatible,
    iteration_times,
    joint_anywhere,
    joint_certificate,
    joint_pairs,
    joint_zones,
    lost_work,
    one_gpu,
    orders,
    powerflow,
    powerflow_day,
    powerflow_fitted,
    powerflow_traces,
    router,
    serving_clocks,
    traffic,
)
from lab.serving.requests import read_requests
from lab.serving.site import Site, papers_pools
from services.core.policies.freesh.classes import PARTITIONS
from services.core.profiles.traffic import LastPeak, backtest
from services.kit.policies import load_policies
from services.learning.carbon_history import History, history_of
from services.learning.traffic_boosting import Boosting
from tests.benchmarks import bench_placement
from tests.support.published import Again, but_for_rounding, cell, data, first, part, ran


def column(names: str, *rows: tuple[str, ...]) -> str:
    """Return a table of these columns' names, with a bar between them, and rows."""
    lines = [" | ".join(row) for row in rows]
    return "\n".join(f"| {line} |" for line in (names, "|".join("-" * (names.count("|") + 1)), *lines))


# A-SRPT


def run_of(experiment: str, label: str, trace: str = "") -> asrpt.Run:
    """Return a run as A-SRPT's tables take it."""
    result = ran(experiment, label, trace)
    return asrpt.Run(result["inputs"], result["summary"], result["predictions"])


def asrpt_jct(experiment: str, label: str, trace: str, table: str = "") -> Again:
    """Return the mean completion time of seed 1."""
    make = partial(lambda: asrpt.compared([run_of(experiment, label, trace)]))
    return Again("a-srpt", table or experiment, make, (f"{label} |",), f"{trace}: mean JCT", first)


def measured(kind: str, row: str) -> str:
    """Return the errors of iteration times of one row."""
    every = getattr(iteration_times, kind)(data() / "profiles")
    return iteration_times.errors_table([each for each in every if each.row == row])


def placed() -> str:
    """Return how good placements of VGG19 on 8 GPUs are."""
    found = {"vgg19 on 8 GPUs": bench_placement.against_the_optimum(plan_layout("vgg19", 8), bench_placement.PATTERNS)}
    return iteration_times.placement_table({"small": found, "large": {}})


def ways() -> str:
    """Return the ways to predict that need no forest, which takes a minute."""
    names = ("mean of the group", "median of the group")
    return part(asrpt_forest, asrpt_forest.compared, WAYS={name: asrpt_forest.WAYS[name] for name in names})


ASRPT = [
    Again("a-srpt", "placement", placed, ("vgg19 on 8 GPUs | heavy-edge",), "above the optimum"),
    Again("a-srpt", "placement", placed, ("vgg19 on 8 GPUs | refined",), "iteration"),
    Again("a-srpt", "a-srpt-layouts", asrpt_layouts.by_layout),
    Again("a-srpt", "training-steps", lambda: measured("training_steps", "training step, rtx")),
    Again("a-srpt", "speeds", lambda: measured("speeds", "training step, V100 (Gavel)")),
    Again("a-srpt", "heavy", lambda: iteration_times.heavy_table(list(iteration_times.speeds(data() / "profiles")))),
    Again("a-srpt", "collectives", lambda: measured("collectives", "send-recv, H100, 10 MB and more")),
    asrpt_jct("a-srpt-jobs", "a-srpt", "37,911 jobs"),
    asrpt_jct("a-srpt-jobs-150k", "spwf", "151,644 jobs"),
    asrpt_jct("a-srpt-small", "a-srpt", "1,290 jobs"),
    asrpt_jct("a-srpt-small", "a-srpt, machine runs", "1,290 jobs"),
    asrpt_jct("a-srpt-small", "wcs-duration", "1,290 jobs"),
    asrpt_jct("a-srpt-single", "a-srpt", "80 %"),
    asrpt_jct("a-srpt-bandwidth", "spwf", "50 Gb/s"),
    Again(
        "a-srpt", "a-srpt-tau", lambda: asrpt.waits_for_servers([run_of("a-srpt-tau", "tau 100", "1 Gb/s")]), ("100",)
    ),
    Again(
        "a-srpt", "a-srpt-passing", lambda: asrpt.passing([run_of("a-srpt-passing", "others pass, tau 100", "1 Gb/s")])
    ),
    Again("a-srpt", "a-srpt-predictors", lambda: asrpt.predictors([run_of("a-srpt-predictors", "a-srpt, perfect")])),
    Again("a-srpt", "a-srpt-forest", ways),
    Again("a-srpt", "a-srpt-theorem", lambda: asrpt.theorem([run_of("a-srpt-small", "a-srpt")])),
]


# Clover


def clover_row() -> str:
    """Return a scheme that needs no search on the second trace."""
    trace = clover.TRACES[1]
    run = clover.mean_run(clover.SEEDS[:1], carbon=trace, scheme=clover.Scheme.CO2OPT)
    carbon, accuracy = f"{-run['carbon_saving_pct']:+.1f} %", f"{-run['accuracy_loss_pct']:+.2f} %"
    return f"| {trace}, CO2OPT | {carbon} | {accuracy} | {run['p95_over_sla']:.3f} | {run['objective_mean']:.2f} |  |"


def followed() -> str:
    """Return the objective of CO2OPT by the hour."""
    run = clover.mean_run(clover.SEEDS[:1], carbon=clover.TRACES[0], scheme=clover.Scheme.CO2OPT)
    return column("hour | CO2OPT", ("12", f"{run['timeline'][12]['objective']:.2f}"))


def searched() -> str:
    """Return what the screened search costs."""
    run = clover.mean_run(carbon=clover.TRACES[0], scheme=clover.Scheme.CLOVER)
    return column("search | objective", ("Clover, screened", f"{run['objective_mean']:.2f}"))


CLOVER = [
    Again("clover", "schemes", clover_row),
    Again("clover", "following", followed, ("12",), "CO2OPT"),
    Again("clover", "searches", searched, ("Clover, screened",), "objective"),
    Again("clover", "weights", lambda: part(clover, clover.weights, LAMBDAS=(0.9,), FLOORS=())),
    Again("clover", "floors", lambda: part(clover, clover.floors, FLOORS=(0.2,))),
    Again(
        "clover",
        "floors_on_traces",
        lambda: part(clover, clover.floors_on_traces, FLOORS=(0.8,), TRACES=clover.TRACES[1:2]),
        ("loss of at most 0.8 %",),
        "ciso-september",
    ),
    Again("clover", "fewer", lambda: part(clover, clover.fewer, GPUS=(2,))),
    Again("clover", "exhaustive", lambda: part(clover, clover.exhaustive, INTENSITIES=(100.0,))),
]


# Forecasts of carbon intensity


@cache
def of_cells() -> dict[str, str]:
    """Return both tables of jobs in cells, by their names."""
    return cells.made(data())


@cache
def sweden(signal: str, tested: int = carbon_report.TESTED, *, anew: bool = False) -> dict[str, carbon_report.Year]:
    """Return the forecasts of a year in Sweden."""
    return {"SE": carbon_report.year_of(data() / "carbon", "SE", signal, tested, anew=anew)}


def sweden_alone() -> dict[str, History]:
    """Return the hours of Sweden, which taught the pretrained model nothing."""
    times, values, _ = carbon_report.hours_of(data() / "carbon/em_hourly/SE_2021_2023.csv.gz", "(direct)")
    return {"SE": history_of(times, values, carbon_start.END)}


def faults() -> str:
    """Return the errors of the first day in PJM's grid with no fault."""
    some = {"none": carbon_faults.FAULTS["none"]}
    make = partial(carbon_faults.table, data() / "carbon")
    return part(carbon_faults, make, FEW_REGRETS=("US-MIDA-PJM",), FAULTS=some)


FORECASTS = [
    Again("first-days", "judged", lambda: carbon_start.judged_table(sweden_alone())),
    Again("first-days", "lengths", lambda: carbon_start.lengths_table(sweden_alone())),
    Again("forecasts", "errors", lambda: carbon_report.errors_table(sweden("direct"))),
    Again("forecasts", "regret", lambda: carbon_report.regret_table(sweden("direct"))),
    Again("forecasts", "rolling", lambda: carbon_report.rolling_table(sweden("direct", anew=True))),
    Again(
        "forecasts",
        "default",
        lambda: part(carbon_report, partial(carbon_report.default_table, data() / "carbon"), ZONES=("SE",)),
    ),
    Again(
        "forecasts",
        "generation",
        lambda: part(
            carbon_report, partial(carbon_report.generation_table, data() / "carbon"), GENERATION_ZONES=("SE",)
        ),
    ),
    Again(
        "forecasts", "first-months", lambda: carbon_report.first_months_table(data() / "carbon", ("SE",))
    ),
    Again("forecasts", "faults", faults, ("US-MIDA-PJM",), "none"),
    *(
        Again("forecasts", table, partial(lambda year: carbon_report.intervals_table(sweden("direct", year)), year),
              ("SE",), head)
        for table, year in (("intervals", carbon_report.TESTED), ("intervals-chosen", carbon_report.CHOSEN_ON))
        for head in ("inside, days 1 to 4", "width", "penalty, days 1 to 4")
    ),
    Again("forecasts", "marginal", lambda: carbon_report.marginal_table(data() / "carbon")),
    Again("forecasts", "lifecycle", lambda: carbon_report.lifecycle_table(sweden("lifecycle"))),
    Again("forecasts", "chosen", lambda: carbon_report.errors_table(sweden("direct", carbon_report.CHOSEN_ON))),
]  # fmt: skip


# FREESH's pools


def two_days() -> tuple[tuple[float, float, int], tuple[float, float, int]]:
    """Return what the day comes to under the carbon objective and under that of energy."""
    inputs = freesh_day.read(data())
    carbon, energy = (freesh_day.totals(freesh_day.day(inputs, **each)) for each in ({}, freesh_day.UNTIED))
    return carbon, energy


def two_objectives() -> str:
    """Return rows of the day, less the changes."""
    rows = zip(("carbon", "energy"), two_days(), strict=True)
    return column("objective | carbon", *((name, f"{of[0]:.2f} kg") for name, of in rows))


def tied() -> str:
    """Return the carbon objective's gain against the plans of least energy that the solver returns."""
    carbon, energy = two_days()
    return f"| as HiGHS returns it | {100 * (carbon[0] / energy[0] - 1):+.1f} % |"


def by_half_hours(days: Callable[[freesh_horizon.Day], list[freesh_horizon.Day]]) -> str:
    """Return plans of half an hour, foreseen, whose starts are not priced."""
    every = days(freesh_horizon.the_authors_day(freesh_day.read(data())))
    with_foresight = part(freesh_horizon, partial(freesh_horizon.table, every), MINUTES=(30,))
    return with_foresight.splitlines()[2]


def seven_days(day: freesh_horizon.Day) -> list[freesh_horizon.Day]:
    """Return the days with the hourly intensities of three zones."""
    return [freesh_horizon.with_zones(day, data(), each) for each in freesh_horizon.DAYS]


POOLS = [
    Again(
        "freesh-pools", "published", lambda: freesh_day.published(data(), freesh_day.read(data())), of=but_for_rounding
    ),
    Again("freesh-pools", "day", two_objectives, ("carbon |",), "carbon"),
    Again("freesh-pools", "ties", tied),
    Again("freesh-pools", "horizon", lambda: by_half_hours(lambda day: [day])),
    Again("freesh-pools", "horizon-hourly", lambda: by_half_hours(seven_days)),
    Again("freesh-pools", "below-full-load", lambda: freesh_day.below_full_load(freesh_day.read(data()))),
    Again(
        "freesh-pools",
        "sensitivity",
        lambda: part(
            freesh_day, partial(freesh_day.sensitivity, freesh_day.read(data())), SIZES=(0.75,), LOADS=(0.5, 1.0)
        ),
        ("x 0.75",),
        "demand x 0.5",
    ),
]


# FREESH's serving


@cache
def the_hour() -> freesh_serving.Hour:
    """Return the paper's hour."""
    return freesh_serving.the_hour(data())


@cache
def served() -> freesh_serving.Figures:
    """Return FREESH's hour, means of both seeds."""
    return the_hour().simulated(the_hour().plans(), freesh_serving.FREESH)


def simple_load() -> str:
    """Return least laxity first at the simple load, of one seed."""
    one = the_hour().of_one_seed()
    of = one.simulated(one.plans(), freesh_serving.FREESH)
    rows = (f"{of['energy_wh']:.0f} Wh", f"{of['e2e_mean_s']:.2f} s", f"{of['jain']:.2f}")
    return column("| | energy | mean | Jain", ("LLF", "here", *rows))


def azure() -> Any:
    """Return Azure's conversations."""
    return read_requests(data() / "llm" / "azure_2023_conv.csv.gz")


def one_rate() -> str:
    """Return queues at five requests of class SS a second."""
    paper = {("SS", 5.0): freesh_serving.PAPER_TABLE_5["SS", 5.0]}
    return part(freesh_serving, lambda: freesh_serving.table_5(azure()), PAPER_TABLE_5=paper)


def one_controller() -> str:
    """Return MIAD with the paper's parameters on one GPU."""
    paper = {"MIAD (2.0, 100)": freesh_serving.PAPER_TABLE_10["MIAD (2.0, 100)"]}
    return part(freesh_serving, lambda: freesh_serving.table_10(azure()), PAPER_TABLE_10=paper)


@cache
def three_seeds() -> freesh_serving.Hour:
    """Return the hour with the seeds of the other readings."""
    return freesh_serving.the_hour(data(), freesh_readings.SEEDS)


def lowest_of_twice() -> str:
    """Return LLF at the lowest of the loads of the second Table 2."""
    found = freesh_readings.Readings(three_seeds()).at("LLF", freesh_readings.LOADS[0])
    return column("| energy | mean", ("LLF, 1.2x", f"{found['energy_wh']:.0f} Wh", f"{found['e2e_mean_s']:.1f} s"))


def fastest_mode() -> str:
    """Return the orders on four H100s."""
    return part(freesh_readings, lambda: freesh_readings.figure_7(azure()), MODES=("H100_TP4",))


def right_classes() -> str:
    """Return how many classes are right at the paper's error."""
    hour, site = three_seeds(), Site(papers_pools())
    mae, accuracy = freesh_readings.MAE_TOKENS, freesh_readings.accuracy
    shares = [accuracy(site, hour.plans(), trace, mae, seed) for seed, trace in hour.traces.items()]
    return column("mean error | right", (f"{mae:.0f} tokens", f"{100 * sum(shares) / len(shares):.0f} %"))


def papers_window() -> str:
    """Return the paper's window."""
    return part(freesh_readings, lambda: freesh_readings.figure_18(azure()), ALPHAS=(1.4,))


def no_starts() -> str:
    """Return the simple load, whose starts take no time."""
    found = three_seeds().simulated(three_seeds().plans(), freesh_serving.FREESH)
    row = ("1x, starts take 0 s", f"{found['energy_wh']:.0f} Wh", f"{found['preemptions']:.0f}")
    return column("load | energy | preemptions", row)


def lowest_load() -> str:
    """Return the default governor and MIAD at a quarter of the load."""
    some = dict(list(serving_clocks.POLICIES.items())[:2])
    return part(serving_clocks, lambda: serving_clocks.clocks(serving_clocks.the_hour()), LOADS=(0.25,), POLICIES=some)


def one_pair() -> str:
    """Return the paper's parameters of MIAD."""
    make = partial(lambda: serving_clocks.parameters(serving_clocks.the_hour()))
    return part(serving_clocks, make, FACTORS=(2.0,), STEPS_MHZ=(100.0,))


SERVING = [
    Again("freesh-serving", "end-to-end", lambda: column("| FREESH", ("energy", f"{served()['energy_wh']:.4g}")),
          ("energy |",), "FREESH"),
    Again("freesh-serving", "figure-6", lambda: column("| mean", ("FREESH", f"{served()['e2e_mean_s']:.4g} s")),
          ("FREESH |",), "mean"),
    *(Again("freesh-serving", "table-2", simple_load, ("LLF | here",), head) for head in ("energy", "mean", "Jain")),
    *(Again("freesh-serving", "table-2-read", lowest_of_twice, ("LLF, 1.2x |",), head) for head in ("energy", "mean")),
    Again("freesh-serving", "figure-7", fastest_mode),
    Again("freesh-serving", "figure-8", right_classes, ("110 tokens |",), "right"),
    Again("freesh-serving", "figure-18", papers_window),
    *(Again("freesh-serving", "starts-and-margins", no_starts, ("1x, starts take 0 s |",), head)
      for head in ("energy", "preemptions")),
    Again("freesh-serving", "table-5", one_rate),
    Again("freesh-serving", "table-10", one_controller),
    Again("freesh-serving", "clocks-azure", lowest_load),
    Again("freesh-serving", "miad-parameters", one_pair, ("2 |",), "100 MHz"),
]  # fmt: skip


# PowerFlow


def split(make: Callable[..., str], label: str) -> str:
    """Return a table of one policy on the day with the batch of a job split over its GPUs."""
    trace = powerflow_day.KEPT_IN_ALL
    return of_day(powerflow_day.DAY, partial(make, trace=trace), (label,), (1, 2, 3), trace)


def of_day(
    experiment: str, table: Callable[[Path], str], labels: tuple[str, ...], seeds: tuple[int, ...], trace: str = ""
) -> str:
    """Return a table of some of an experiment's cells, those of one of its traces."""
    with TemporaryDirectory() as folder:
        for name in (powerflow_day.DAY, powerflow_day.DOWN):
            keep(Path(folder) / name, [])
        keep(Path(folder) / experiment, [ran(experiment, label, trace, seed) for label in labels for seed in seeds])
        return table(Path(folder))


def keep(folder: Path, results: list[dict[str, Any]]) -> None:
    """Write results as an experiment leaves them."""
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    for at, result in enumerate(results):
        (folder / "cells" / f"{at}.json").write_text(json.dumps(result), encoding="utf-8")
    (folder / "index.json").write_text(json.dumps([[str(at)] for at in range(len(results))]), encoding="utf-8")


def fitted() -> str:
    """Return fitted against profiled models at eta 0.7."""
    with TemporaryDirectory() as folder:
        keep(Path(folder) / "powerflow-fitted", [ran("powerflow-fitted", "eta 0.7, each kind measured")])
        keep(Path(folder) / "powerflow-profiled", [ran("powerflow-profiled", "powerflow, eta 0.7")])
        return powerflow_fitted.table(Path(folder))


def afs() -> str:
    """Return AFS' fastest point."""
    of = ran("powerflow-afs", "afs")["summary"]
    return column("| AFS", ("day", f"{of['avg_jct_s'] / 60:.1f} min, {of['energy_kwh']:,.0f} kWh"))


def zeus(experiment: str, trace: str) -> str:
    """Return the mean energy of the two with Zeus on one trace of the sensitivity analysis."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["powerflow_traces", f"{folder}/results/powerflow-traces"])
        powerflow_traces.main()
        patched.chdir(folder)
        runs = [run_cell(cell(experiment, label, trace))["summary"] for label in ("gandiva+zeus", "zeus+las")]
    return column("| energy", (trace, f"{sum(run['energy_kwh'] for run in runs) / 2:,.0f} kWh"))


def profiles(table: str, folder: str) -> str:
    """Return the errors of the models on one source's tables."""
    return powerflow.TABLES[table](data() / "profiles" / folder)


def some_models(make: Callable[[Path], str], *names: str) -> str:
    """Return the errors on those of Sia's tables that have so few configurations that a fit takes no time."""
    every = list(powerflow.sia_tables(data() / "profiles"))
    some = [each for each in every if each[:2] == names]
    return part(powerflow, partial(make, Path()), sia_tables=lambda data: some)


def boards() -> str:
    """Return the errors on what Zeus measured of one workload on one board."""
    rows = powerflow.rows_of(data() / "profiles" / "zeus" / "summary_power_p100.csv")
    some = [row for row in rows if (row["dataset"], row["network"]) == ("imagenet", "resnet50")]
    return part(powerflow, partial(powerflow.zeus, Path()), rows_of=lambda file: some if "p100" in file.name else [])


def unseen() -> str:
    """Return the errors on one of Gavel's models and GPUs."""
    whole = re.compile(r"\('(ResNet-50) \(batch size (\d+)\)', (\d+)\)")
    made = part(powerflow, partial(powerflow.unseen, data() / "profiles"), GAVEL_JOB=whole)
    return "\n".join(line for line in made.splitlines() if "| K80 |" in line)


POWERFLOW = [
    Again("powerflow", "zeus", boards),
    Again("powerflow", "sia", lambda: some_models(powerflow.sia, "yolov3", "dgx")),
    Again("powerflow", "stairs", lambda: some_models(powerflow.stairs, "yolov3", "dgx")),
    Again("powerflow", "h200", lambda: profiles("h200", "")),
    Again("powerflow", "miso", lambda: profiles("miso", "")),
    Again("powerflow", "unseen", unseen),
    Again("powerflow", "packing", lambda: profiles("packing", "")),
    Again(
        "powerflow",
        "powerflow-day",
        lambda: of_day(powerflow_day.DAY, powerflow_day.day_table, ("powerflow, eta 1.0",), (1, 2, 3)),
        ("powerflow, eta 1.0 |",),
    ),
    Again(
        "powerflow",
        "powerflow-points",
        lambda: of_day(powerflow_day.DAY, powerflow_day.points_table, ("las, 118 W",), (1, 2, 3)),
        ("118 W",),
        "las, all nodes on",
    ),
    *(
        Again("powerflow", f"{table}-split", lambda make=make, label=label: split(make, label), (row,), head)
        for table, make, label, row, head in (
            ("powerflow-day", powerflow_day.day_table, "powerflow, eta 1.0", "powerflow, eta 1.0 |", ""),
            ("powerflow-points", powerflow_day.points_table, "afs, 179 W", "179 W", "afs, all nodes on"),
        )
    ),
    Again("powerflow", "powerflow-afs", afs, ("day",), "AFS"),
    *(Again("powerflow", "fitted", fitted, ("eta 0.7, each kind",), head) for head in ("mean JCT", "energy", "stops")),
    Again("powerflow", "sensitivity", lambda: zeus("powerflow-sensitivity", "1 GPU"), ("1 GPU",), "energy"),
    Again(
        "powerflow",
        "sensitivity-split",
        lambda: zeus("powerflow-sensitivity-split", "1 GPU, batch split"),
        ("1 GPU",),
        "energy",
    ),
    Again(
        "../../docs/powerflow",
        "marginal",
        lambda: of_day(powerflow_day.MARGINAL, powerflow_day.marginal_table, ("powerflow, eta 0.7",), (1,)),
    ),
]


# Orders of the grid

ORDERS = [
    Again("../../docs/grid", "notice", partial(orders.of_notice, "fifo", 600.0)),
    Again("../../docs/grid", "ten-hours", partial(orders.of_hours, "las")),
]


# Batches, router, traffic and the simulator


def batches_at(peak_share: float) -> str:
    """Return the row of one load in the grids without a very clean one."""
    sets = dict([list(batches_day.SETS.items())[1]])
    return str(part(batches_day, lambda: batches_day.table(data()), SETS=sets, PEAK_SHARES=(peak_share,)))


def beside_lines() -> str:
    """Return the row of one load, without limits."""
    return str(part(batches_beside, lambda: batches_beside.table(data()), CLASSES=((),), SHARES=(0.5,)))


def short_hours(make: Callable[[], str]) -> str:
    """Return a table of the log of code and the second partition alone."""
    return part(traffic, make, TRACES={"code": "code"}, PARTITIONS={"b": PARTITIONS["b"]})


def without_lstm() -> str:
    """Return the last peak and gradient boosting on the hour of code."""
    make = partial(traffic.hour, data())
    return short_hours(lambda: part(traffic, make, forecasters=lambda: [LastPeak(), Boosting()], HIGH=LastPeak()))


def last_minutes() -> str:
    """Return the last peak where the LSTM could be trained, from minute 40 on."""
    cuts = traffic.hours(data(), "code", "b")
    scores = traffic.pooled(backtest(cut, LastPeak(), range(8, len(cut)), refit_steps=1) for cut in cuts)
    return "\n".join([*traffic.head("Code, partition b", [scores]), *traffic.table([scores])])


def of_the_day() -> str:
    """Return the last peak on the published day."""
    peaks = traffic.day_of_peaks(data(), "b")
    scores = [backtest(peaks, LastPeak(), range(len(peaks) // 5, len(peaks)), refit_steps=12)]
    return "\n".join([*traffic.head("Partition b", scores), *traffic.table(scores)])


def planned() -> str:
    """Return what pools are planned for in the hour of code."""
    return short_hours(lambda: "\n".join(traffic.plans_of_hours(data())))


def of_code() -> str:
    """Return how the lengths of code's answers are predicted."""
    return part(router, partial(router.lengths_table, data()), TRACES={"code": "code"})


@cache
def paired() -> joint_pairs.Found:
    """Return the figures of all pairs of workload and cluster."""
    load_policies()
    with TemporaryDirectory() as folder:
        return joint_pairs.figures(joint_pairs.CHOSE + joint_pairs.JUDGES, data(), Path(folder))


def judged() -> str:
    """Return the table of the cases drawn by chance that judge."""
    load_policies()
    with TemporaryDirectory() as folder:
        return joint_anywhere.judged(Path(folder))


LAST = "last peak"
OTHERS = [
    *(Again("joint", name, lambda make=make: make(paired())) for name, make in joint_pairs.TABLES.items()),
    Again("joint", "joint-anywhere", judged),
    *(
        Again("joint", f"joint-certificate{name}", partial(joint_certificate.certificate_table, ("GB",), of))
        for name, of in joint_certificate.TABLES.items()
    ),
    Again("green", "green-compatible", green_compatible.compatible_table),
    Again("joint", "joint-zones", lambda: joint_zones.zones_table(data())),
    Again("joint", "cells", lambda: of_cells()["cells"]),
    Again("joint", "cells-gap", lambda: of_cells()["cells-gap"]),
    *(
        Again("green", "lost-work", partial(lost_work.of_run, "32x2:RTX3090", "green", run_s))
        for run_s in (0.0, 3_600.0)
    ),
    *(
        Again("green", "lost-saves", partial(lost_work.of_way, "32x2:RTX3090", "green", way))
        for way in list(lost_work.WAYS)[:2]
    ),
    Again("router", "lengths", of_code),
    Again("router", "places", lambda: router.places_table(data())),
    *(Again("traffic", "plans", planned, ("Code, partition b", row)) for row in (LAST, "for the planner")),
    *(
        Again("one-gpu", make.__name__, partial(make, one_gpu.kept()))
        for make in (one_gpu.booked, one_gpu.levels, one_gpu.job)
    ),
    Again("batches", "day", lambda: batches_at(0.7)),
    Again("batches", "beside", beside_lines),
    *(Again("traffic", "day", of_the_day, ("Partition b", LAST), head) for head in ("SS", "LS", "spare")),
    *(Again("traffic", "hour", without_lstm, ("Code, partition b", row)) for row in (LAST, "gradient boosting |")),
    *(Again("traffic", "hour-lstm", last_minutes, ("Code, partition b", LAST), head) for head in ("SS", "LS", "spare")),
]
AGAIN = [*ASRPT, *CLOVER, *FORECASTS, *POOLS, *SERVING, *POWERFLOW, *ORDERS, *OTHERS]
