"""Our simulator against Tiresias' published one, job by job, on the job list it comes with.

``tiresias_60_job.csv`` is ``simulator/60_job.csv`` of https://github.com/SymbioticLab/Tiresias at 959f9b0, unchanged;
``tiresias_jct.csv`` holds the completion times (s) that simulator printed for it, one column per run, made with Python
2.7 and NumPy 1.16 in its folder ``simulator``, for S in fifo, fjf, shortest, dlas-gpu and clusters n4g4 (a spec file
``1,4,4,128,256``: 4 nodes of 4 GPUs) and n2g4 (``1,2,4,128,256``)::

    python2.7 run_sim.py --cluster_spec=n2g4.csv --scheme=count --trace_file=60_job.csv --schedule=S --log_path=out-S

That simulator has no cost of starting and stopping, decides at every event and counts GPUs only; so jobs here have
neither restart nor checkpoint, gangs lose nothing by spanning nodes, and rounds are held every second, all its times
being whole seconds.

As published, its thresholds are so high that this list preempts nobody. The last two columns have ``queue_limit = [300,
1200, 18000]`` in its ``jobs.py``, as its README says to set it. It then demotes some wide gangs late: the event that
demotes them is planned for ``(limit - executed_time) / num_gpu``, which forgets that executed time counts once per GPU.
The last column has ``executed_time * num_gpu`` there (in ``dlas_sim_jobs``, divided as floats).
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.core.domain.arrays import Floats
from services.simulator.engine import EngineOptions, simulate
from services.simulator.readers.jobs import read_raw
from services.simulator.recipes.stated import plain
from services.simulator.workload import ClusterSpec, Workload
from tests.support.workloads import a_trace

HERE = Path(__file__).parent
CLUSTERS = {"n4g4": ClusterSpec.parse("4x4:P100"), "n2g4": ClusterSpec.parse("2x4:P100")}
THRESHOLDS = {"queue_thresholds_gpu_s": [3_250.0, 7_200.0]}
EXACT = {
    "fifo": ("fifo", {"backfill": False}),
    "fjf": ("fifo", {"backfill": True}),
    "shortest": ("srtf", {}),
    "dlas-gpu": ("las", THRESHOLDS),
}
OPTIONS = EngineOptions(round_interval_s=1.0)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("schedule", EXACT)
def test_every_job_takes_the_time_it_takes_there(cluster: str, schedule: str) -> None:
    policy, parameters = EXACT[schedule]

    jct_s = completion_times(policy, parameters, cluster)

    assert jct_s.tolist() == published(f"{cluster} {schedule}").tolist()


def test_least_attained_service_with_preemption_differs_only_in_the_order_within_a_queue() -> None:
    """Ours ranks a queue by first start, theirs by when a job came into it, those without GPUs last."""
    ours = completion_times("las", {"queue_thresholds_gpu_s": [300.0, 1_200.0]}, "n2g4")
    as_published, on_time = published("n2g4 dlas-gpu 300 1200"), published("n2g4 dlas-gpu 300 1200 on time")

    assert np.count_nonzero(ours == on_time) == 58
    assert ours.mean() == pytest.approx(on_time.mean(), rel=0.002)
    assert ours.mean() == pytest.approx(as_published.mean(), rel=0.04)


def completion_times(policy: str, parameters: dict[str, object], cluster: str) -> Floats:
    """Return how long each job of the list takes, by its number: (60,) seconds."""
    result = simulate(policy, jobs(), CLUSTERS[cluster], a_trace(), parameters=parameters, options=OPTIONS)
    return np.round(result.columns.jct_s, 6)


def jobs() -> Workload:
    """Return the list, without what that simulator does not know."""
    workload = plain(read_raw(HERE / "tiresias_60_job.csv"), 1)
    free = tuple(replace(kind, restart_s=0.0, checkpoint_s=0.0) for kind in workload.profiles)
    return replace(workload, profiles=free)


def published(run: str) -> Floats:
    """Return the completion times of one of its runs, by job number: (60,) seconds."""
    with (HERE / "tiresias_jct.csv").open() as text:
        return np.array([float(row[run]) for row in csv.DictReader(text)])
