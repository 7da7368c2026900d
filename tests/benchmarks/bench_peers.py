"""Tiresias' published simulator and ours on the same jobs, in one run: processor seconds of whole processes.

``python -m tests.benchmarks.bench_peers SIMULATOR``, with the folder ``simulator`` of github.com/SymbioticLab/Tiresias
at 959f9b0 and its needs (NumPy) in this Python: 5,000 made-up jobs on 2,048 GPUs under LAS, three times each in turn,
the median of each. Theirs decides at every event. Ours takes a round of all jobs every 60 s, which are about as many,
and every 30 min, as it does by default, with passive rounds between; nobody pays for starts and stops. Theirs was
written for Python 2; ``sys.maxint`` is all that Python 3 lacks.
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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from services.simulator.engine import EngineOptions, simulate
from services.simulator.workload import ClusterSpec, Workload
from tests.benchmarks.bench_simulator import short_jobs
from tests.benchmarks.results import write_result
from tests.support.workloads import START_S, a_trace

THEIRS = (
    "import runpy, sys; sys.maxint = sys.maxsize; sys.path.insert(0, '.'); sys.argv[0] = 'run_sim.py'; "
    "runpy.run_path('run_sim.py', run_name='__main__')"
)
REPEATS = 3


def jobs() -> Workload:
    """Return the jobs of both; they take whole seconds."""
    made = short_jobs(5_000, 12.0, 7_000.0, (1, 1, 2, 4, 8))
    return replace(made, work_s=np.ceil(made.work_s) * made.min_gpus)


def ours(interval_s: float) -> None:
    """Run ours, and print the mean completion time, seconds, and the number of rounds."""
    options = EngineOptions(round_interval_s=interval_s, rigid=True, checkpoint_every_s=1.0)
    result = simulate("las", jobs(), ClusterSpec.parse("256x8:V100"), a_trace(), options=options)
    print(json.dumps({"mean_jct_s": result.avg_jct_s, "rounds": result.rounds}))


def theirs(folder: Path, scratch: Path) -> dict[str, float]:
    """Run theirs, and return the same."""
    workload, trace = jobs(), scratch / "jobs.csv"
    with trace.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["job_id", "num_gpu", "submit_time", "iterations", "model_name", "duration", "interval"])
        for at in range(len(workload)):
            submitted_s, work_s = (
                int(workload.submitted_s[at] - START_S),
                int(workload.work_s[at] / workload.min_gpus[at]),
            )
            out.writerow([at, int(workload.min_gpus[at]), submitted_s, 100, "vgg19", work_s, 12])
    options = ["--cluster_spec=n256g8.csv", "--scheme=count", "--schedule=dlas-gpu"]
    command = [sys.executable, "-c", THEIRS, *options, f"--trace_file={trace}", f"--log_path={scratch / 'log'}"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    with (scratch / "log" / "job.csv").open() as file:
        times = [float(row["JCT"]) for row in csv.DictReader(file)]
    return {"mean_jct_s": statistics.fmean(times), "rounds": float("nan")}


def child(interval_s: float) -> dict[str, float]:
    """Run ours in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_peers", "--ours", str(interval_s)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def cpu_s(work: Callable[[], dict[str, float]]) -> tuple[float, dict[str, float]]:
    """Return the processor seconds of the processes that ``work`` starts, and what it returns."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, found


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--ours", type=float)
    given = parser.parse_args()
    if given.ours is not None:
        ours(given.ours)
        return
    if given.folder is None:
        parser.error("name the folder of Tiresias' simulator")
    folder: Path = given.folder.resolve()
    spent: dict[str, list[float]] = {}
    found: dict[str, dict[str, float]] = {}
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as scratch:
            runs = {
                "Tiresias' simulator": lambda: theirs(folder, Path(scratch)),
                "ours, rounds every 60 s": lambda: child(60.0),
                "ours, rounds every 30 min": lambda: child(1_800.0),
            }
            for name, work in runs.items():
                seconds, found[name] = cpu_s(work)
                spent.setdefault(name, []).append(seconds)
    median = {name: statistics.median(each) for name, each in spent.items()}
    first = median["Tiresias' simulator"]
    for name, seconds in median.items():
        mean_s, rounds = found[name]["mean_jct_s"], found[name]["rounds"]
        print(f"{name:28} {seconds:7.2f} s  {first / seconds:5.1f} x  mean JCT {mean_s:9.1f} s  {rounds:7.0f} rounds")
    write_result("peers", {name: {"cpu_s": median[name], **found[name]} for name in median})


if __name__ == "__main__":
    main()
