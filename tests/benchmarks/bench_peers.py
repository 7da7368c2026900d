"""Published simulators and ours on the same jobs, in one run: processor seconds of whole processes.

    python -m tests.benchmarks.bench_peers [--tiresias SIMULATOR] [--alibaba SIMULATOR] [--gaia GAIA] [--python PYTHON]

runs those that are given a folder, theirs and ours in turn, ``--repeats`` times, and prints medians; PYTHON is one with
what theirs need (NumPy, and pandas for GAIA's), this one by default. Nobody pays for starts and stops.

- *Tiresias*: the folder ``simulator`` of github.com/SymbioticLab/Tiresias at 959f9b0; 5,000 made-up jobs on 2,048 GPUs
  under LAS. Theirs decides at every event. Ours takes a round of all jobs every 60 s, which are about as many, and
  every 30 min, as it does by default, with passive rounds between.
- *Alibaba*: ``cluster-trace-gpu-v2020/simulator`` of github.com/alibaba/clusterdata at 7a6c496; 20,000 jobs of Alibaba
  PAI under shortest job first, one GPU of 6,500 each, a thousand a minute; as its own traces are not at hand, the jobs
  are the first of GAIA's sample, lengths times 0.62. Theirs steps second by second.
- *GAIA*: github.com/umassos/GAIA at 62a5efc; its thousand jobs of a month under ``suspend-resume`` (Wait Awhile) with a
  day to wait, on as many GPUs as they need, in the hours of Great Britain from 1 January 2023. Theirs steps by 5 s.

Theirs run as published, from their folders, less what a current Python lacks: ``sys.maxint``, and plots.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from services.simulator.engine import EngineOptions, simulate
from services.simulator.readers.carbon import read_carbon
from services.simulator.workload import CarbonTrace, ClusterSpec, Workload
from tests.benchmarks.jobs import pai_jobs, short_jobs
from tests.benchmarks.results import write_result
from tests.support.workloads import START_S, a_trace, a_workload

Figures = dict[str, float]
NAN = float("nan")
PAI = ClusterSpec.parse("812x8:V100,1x4:V100")
GAIA_DAYS, GAIA_STEP_S, GAIA_FIRST_ROW = 30, 5.0, 17_544 + 7_000
"""The days GAIA's simulator looks at, its step, and the row of its table of intensities at which they begin."""
WITHOUT_PLOTS = (
    "import sys, types; plots = types.ModuleType('matplotlib'); plots.pyplot = types.ModuleType('matplotlib.pyplot'); "
    "sys.modules.update({'matplotlib': plots, 'matplotlib.pyplot': plots.pyplot}); sys.path.insert(0, '.'); "
)
TIRESIAS = (
    "import runpy, sys; sys.maxint = sys.maxsize; sys.path.insert(0, '.'); sys.argv[0] = 'run_sim.py'; "
    "runpy.run_path('run_sim.py', run_name='__main__')"
)
ALIBABA = WITHOUT_PLOTS + (
    "from simulator import Simulator; print(Simulator(sys.argv[1], alloc_policy=0, preempt_policy=2, "
    "sort_node_policy=3, num_nodes=1, num_gpus=6500, num_cpus=150930, num_spare_node=0, pattern=0, "
    "arrival_rate=1000, num_jobs_limit=20000).simulator_go()[0][1])"
)


def tiresias_jobs() -> Workload:
    """Return 5,000 jobs that take whole seconds."""
    made = short_jobs(5_000, 12.0, 7_000.0, (1, 1, 2, 4, 8))
    return replace(made, work_s=np.ceil(made.work_s) * made.min_gpus)


def tiresias_ours(interval_s: float) -> Figures:
    """Run Tiresias' jobs, with a round of all jobs at such intervals."""
    return _ours("las", tiresias_jobs(), ClusterSpec.parse("256x8:V100"), a_trace(), interval_s)


def alibaba_jobs(pai: Path) -> Workload:
    """Return 20,000 jobs of PAI that take whole seconds and come by the minute."""
    made = pai_jobs(pai, 20_000)
    minutes = np.arange(len(made)) // 1_000
    return replace(made, submitted_s=START_S + 60.0 * minutes, work_s=np.maximum(np.floor(made.work_s), 1.0))


def alibaba_ours(pai: Path) -> Figures:
    """Run the same."""
    return _ours("sjf", alibaba_jobs(pai), PAI, a_trace(), 1_800.0)


def gaia_jobs(folder: Path) -> Workload:
    """Return GAIA's thousand jobs on one GPU each, at its steps."""
    with (folder / "src" / "cluster_traces" / "pai_1k.csv").open() as file:
        rows = [[GAIA_STEP_S * (float(row[name]) // GAIA_STEP_S) for name in ("arrival_time", "length")]
                for row in csv.DictReader(file)]  # fmt: skip
    return a_workload([(at_s, work_s, 1) for at_s, work_s in rows])


def gaia_grid() -> CarbonTrace:
    """Return the hours of a grid."""
    return read_carbon("GB", start="2023-01-01", days=GAIA_DAYS + 2)


def gaia_ours(folder: Path) -> Figures:
    """Run GAIA's jobs on a cluster that never lacks room."""
    return _ours("wait-awhile", gaia_jobs(folder), ClusterSpec.parse("125x8:V100"), gaia_grid(), 1_800.0)


def _ours(policy: str, jobs: Workload, cluster: ClusterSpec, grid: CarbonTrace, interval_s: float) -> Figures:
    options = EngineOptions(round_interval_s=interval_s, rigid=True, checkpoint_every_s=1.0)
    result = simulate(policy, jobs, cluster, grid, options=options)
    return {"mean_jct_s": result.avg_jct_s, "rounds": result.rounds}


def tiresias_theirs(python: str, folder: Path, scratch: Path) -> Figures:
    """Run Tiresias' simulator."""
    jobs, trace = tiresias_jobs(), scratch / "jobs.csv"
    columns = zip(jobs.min_gpus, jobs.submitted_s - START_S, jobs.work_s / jobs.min_gpus, strict=True)
    rows = [
        [at, int(gpus), int(at_s), 100, "vgg19", int(work_s), 12] for at, (gpus, at_s, work_s) in enumerate(columns)
    ]
    head = ["job_id", "num_gpu", "submit_time", "iterations", "model_name", "duration", "interval"]
    _write(trace, head, rows)
    options = ["--cluster_spec=n256g8.csv", "--scheme=count", "--schedule=dlas-gpu"]
    command = [python, "-c", TIRESIAS, *options, f"--trace_file={trace}", f"--log_path={scratch / 'log'}"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with (scratch / "log" / "job.csv").open() as file:
        times = [float(row["JCT"]) for row in csv.DictReader(file)]
    return {"mean_jct_s": statistics.fmean(times), "rounds": NAN}


def alibaba_theirs(python: str, folder: Path, pai: Path, scratch: Path) -> Figures:
    """Run Alibaba's simulator."""
    jobs, trace = alibaba_jobs(pai), scratch / "jobs.csv"
    rows = [[at, "u", 1, 1, int(at_s), 1, int(work_s)]
            for at, (at_s, work_s) in enumerate(zip(jobs.submitted_s - START_S, jobs.work_s, strict=True))]  # fmt: skip
    _write(trace, ["job_id", "user", "num_gpu", "num_cpu", "submit_time", "num_inst", "duration"], rows)
    command = [python, "-c", ALIBABA, str(trace)]
    printed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
    return {"mean_jct_s": float(printed.split()[-1]), "rounds": NAN}


def gaia_theirs(python: str, folder: Path, scratch: Path) -> Figures:
    """Run GAIA's simulator; its tables are at fixed places below the folder in which it runs."""
    jobs, grid = gaia_jobs(folder), gaia_grid()
    tables = {name: scratch / "src" / name for name in ("cluster_traces", "traces")}
    for table in (*tables.values(), scratch / "results" / "simulation" / "jobs"):
        table.mkdir(parents=True)
    rows = [[at_s, work_s, 1] for at_s, work_s in zip(jobs.submitted_s - START_S, jobs.work_s, strict=True)]
    _write(tables["cluster_traces"] / "jobs.csv", ["arrival_time", "length", "cpus"], rows)
    known = [[grid.curve.at(START_S + 3_600.0 * hour)] for hour in range(24 * GAIA_DAYS)]
    _write(tables["traces"] / "grid.csv", ["carbon_intensity_avg"], [[0.0]] * GAIA_FIRST_ROW + known)
    options = ["--scheduling-policy", "suspend-resume", "-w", "24x24", "-c", "grid", "-t", "jobs"]
    command = [python, str(folder / "src" / "run.py"), *options]
    subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.DEVNULL)
    (details,) = (scratch / "results" / "simulation" / "jobs").glob("details-*.csv")
    ended: dict[str, float] = defaultdict(float)
    with details.open() as file:
        for row in csv.DictReader(file):
            ended[row["ID"]] = max(ended[row["ID"]], GAIA_STEP_S * float(row["exit_time"]))
    times = [ended[str(at)] - (at_s - START_S) for at, at_s in enumerate(jobs.submitted_s)]
    return {"mean_jct_s": statistics.fmean(times), "rounds": NAN}


def _write(file: Path, head: list[str], rows: list[list[object]] | list[list[float]]) -> None:
    with file.open("w", newline="") as text:
        csv.writer(text).writerows([head, *rows])


def child(call: str) -> Figures:
    """Run ours in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_peers", "--ours", call]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cpu_s(work: Callable[[], Figures]) -> tuple[float, Figures]:
    """Return the processor seconds of the processes that ``work`` starts, and what it returns."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, found


def pairs(given: argparse.Namespace) -> dict[str, dict[str, Callable[[Path], Figures]]]:
    """Return by peer what is run in turn; what needs a folder that is not given is left out, which is said."""
    python: str = given.python
    tiresias, alibaba, gaia = given.tiresias, given.alibaba, given.gaia
    found: dict[str, dict[str, Callable[[Path], Figures]]] = {}
    if tiresias:
        found["tiresias"] = {
            "Tiresias' simulator": lambda scratch: tiresias_theirs(python, tiresias, scratch),
            "ours, rounds every 60 s": lambda _: child("tiresias 60"),
            "ours, rounds every 30 min": lambda _: child("tiresias 1800"),
        }
    if alibaba and gaia:
        pai = gaia / "src" / "cluster_traces" / "pai-100k.csv"
        found["alibaba"] = {
            "Alibaba's simulator": lambda scratch: alibaba_theirs(python, alibaba, pai, scratch),
            "ours, 20,000 PAI jobs": lambda _: child(f"alibaba {pai}"),
        }
    if gaia:
        found["gaia"] = {
            "GAIA's simulator": lambda scratch: gaia_theirs(python, gaia, scratch),
            "ours, GAIA's jobs": lambda _: child(f"gaia {gaia}"),
        }
    for name, needs in {"tiresias": "--tiresias", "alibaba": "--alibaba and --gaia", "gaia": "--gaia"}.items():
        if name not in found:
            print(f"left out: {name}, which needs {needs}", file=sys.stderr)
    return found


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser()
    for name in ("tiresias", "alibaba", "gaia"):
        parser.add_argument(f"--{name}", type=lambda text: Path(text).resolve())
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ours")
    given = parser.parse_args()
    if given.ours is not None:
        kind, _, of = given.ours.partition(" ")
        run = {"tiresias": lambda: tiresias_ours(float(of)), "alibaba": lambda: alibaba_ours(Path(of)),
               "gaia": lambda: gaia_ours(Path(of))}[kind]  # fmt: skip
        print(json.dumps(run()))
        return
    document: dict[str, Figures] = {}
    for runs in pairs(given).values():
        spent: dict[str, list[float]] = defaultdict(list)
        for _ in range(given.repeats):
            for name, work in runs.items():
                with tempfile.TemporaryDirectory() as scratch:
                    seconds, document[name] = cpu_s(lambda work=work, scratch=scratch: work(Path(scratch)))
                spent[name].append(seconds)
        first = statistics.median(spent[next(iter(runs))])
        for name, seconds in spent.items():
            median, of = statistics.median(seconds), document[name]
            document[name] = {"cpu_s": round(median, 2), **of}
            print(f"{name:28} {median:7.2f} s  {first / median:5.1f} x  mean JCT {of['mean_jct_s']:9.1f} s  "
                  f"{of['rounds']:7.0f} rounds", flush=True)  # fmt: skip
    write_result("peers", document)


if __name__ == "__main__":
    main()
