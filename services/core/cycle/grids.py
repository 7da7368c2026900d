"""Which grid each job draws from, when the nodes of a cluster lie in several zones.

A job that holds GPUs draws from the zones of their nodes, in proportion to its GPUs in each. Where a waiting job will
run is not known, because placers do not consider zones. It is assumed to draw from all nodes that accept work and whose
GPUs it may use, in proportion to their numbers of GPUs, free or not. That does not change with every start and end
elsewhere, so a job that waits for a certain hour keeps waiting for it.

A job that draws from several grids has the mean of their curves, weighted by its shares. In a cluster with one zone
every job simply has the curve of that zone, at no cost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.domain.carbon import CarbonCurve, mixed

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class JobCurves:
    """The carbon curves of the grids from which some jobs draw power."""

    curves: tuple[CarbonCurve, ...]  #: Each distinct curve
    of: Ints | None = None  #: (n_jobs,) index into ``curves``; None: every job has the first

    def of_job(self, row: int) -> CarbonCurve:
        return self.curves[0 if self.of is None else int(self.of[row])]

    def each(self, figure: Callable[[CarbonCurve], float]) -> float | Floats:
        """Return a figure for each job's curve: (n_jobs,), or one number if all have one curve."""
        if self.of is None:
            return figure(self.curves[0])
        return np.array([figure(curve) for curve in self.curves])[self.of]

    def by_curve(self, answer: Callable[[CarbonCurve, Any], NDArray[Scalar]]) -> NDArray[Scalar]:
        """Return the values of ``answer`` for all jobs: (n_jobs,).

        Args:
            answer: Called with each curve and an index that selects its jobs' rows of a column: (n_jobs,) to (n_rows,).
        """
        if self.of is None:
            return answer(self.curves[0], slice(None))
        parts = [(rows := np.flatnonzero(self.of == at), answer(curve, rows)) for at, curve in enumerate(self.curves)]
        answers = np.empty(self.of.shape, dtype=parts[0][1].dtype)
        for rows, part in parts:
            answers[rows] = part
        return answers


def eligible_curves(snapshot: Snapshot, which: Ints) -> JobCurves:
    """Return the curves of the nodes that each of these jobs may run on, wherever it runs now."""
    if len(snapshot.outlooks) == 1 or not which.size:
        return _of_first(snapshot)
    return _mixes(snapshot, _eligible_gpus(snapshot, which))


def present_curves(snapshot: Snapshot, which: Ints) -> JobCurves:
    """Return the curve of each of these jobs: its nodes', or the eligible ones' if it holds no GPUs."""
    if len(snapshot.outlooks) == 1 or not which.size:
        return _of_first(snapshot)
    nodes, gpus = snapshot.nodes, _eligible_gpus(snapshot, which)
    which_jobs: list[int] = which.tolist()
    for row, job in enumerate(which_jobs):
        held = np.zeros(len(snapshot.outlooks))
        for node, devices in snapshot.held_by(job):
            held[nodes.zone[node]] += len(devices)
        if held.any():
            gpus[row] = held
    return _mixes(snapshot, gpus)


def cluster_intensity(snapshot: Snapshot) -> float:
    """Return the present intensity, gCO2/kWh; with several zones, their mean weighted by their nodes' GPUs."""
    now = [outlook.curve.at(snapshot.now_s) for outlook in snapshot.outlooks]
    if len(now) == 1:
        return now[0]
    gpus = np.bincount(snapshot.nodes.zone, snapshot.nodes.gpus, minlength=len(now))
    return float(gpus @ np.array(now) / gpus.sum()) if gpus.any() else now[0]


def _of_first(snapshot: Snapshot) -> JobCurves:
    return JobCurves((snapshot.outlooks[0].curve,))


def _eligible_gpus(snapshot: Snapshot, which: Ints) -> Floats:
    """Return the GPUs that each job may use in each zone, on nodes that accept work: (n_which, n_zones).

    A job that may use none at present, because its nodes are drained or it is about to stop for good, is given all
    GPUs.
    """
    nodes = snapshot.nodes
    of_model = np.zeros((len(snapshot.gpu_models), len(snapshot.outlooks)))
    np.add.at(of_model, (nodes.gpu_model, nodes.zone), np.where(nodes.schedulable, nodes.gpus, 0))
    everywhere = np.bincount(nodes.zone, nodes.gpus, minlength=len(snapshot.outlooks))
    gpus: Floats = snapshot.jobs.eligible[which] @ of_model
    gpus[gpus.sum(axis=1) == 0] = everywhere if everywhere.any() else 1.0
    return gpus


def _mixes(snapshot: Snapshot, gpus: Floats) -> JobCurves:
    """Return the mean curves of jobs with these GPUs in each zone: (n_jobs, n_zones), no row all zeros."""
    shares, of = np.unique(gpus / gpus.sum(axis=1, keepdims=True), axis=0, return_inverse=True)
    curves = [outlook.curve for outlook in snapshot.outlooks]
    return JobCurves(tuple(mixed(curves, each) for each in shares.tolist()), of.reshape(-1))
