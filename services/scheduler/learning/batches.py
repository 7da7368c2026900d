"""What live jobs do at each gang size with the batch chosen for it, where their users let policies choose.

How long a step takes by size and batch comes from the fit to the kind's measurements or, before there are any, from the
prior of its family and GPU model. The gradient noise scale is the job's own report, else what others of its kind have
reported, else the base batch itself: then a larger batch pays off only where it makes steps much faster.

Source: Pollux sections 3 and 4.1.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats, Ints
from services.core.domain.controls import ControlKind
from services.core.profiles.boards import board_of
from services.core.profiles.goodput import StepTable, best_batches
from services.core.profiles.priors import ANY_FAMILY
from services.core.profiles.profile import JobProfile
from services.scheduler.learning.learned import WIDEST, step_times
from services.scheduler.repository.documents import StoredStepTimes
from services.scheduler.repository.kept_jobs import JobRows
from services.scheduler.repository.profiles import TableRow

DIGITS = 2  #: Significant digits of noise scales: a little more or less changes no batch


@dataclass(frozen=True)
class _Kind:
    """What the choice depends on; jobs that share all of it share a row. ``by_batch``: JSON text, None: the prior."""

    by_batch: str | None
    family: str
    gpu_model: str
    gpus_per_node: int
    permitted: tuple[int, int]
    base: float
    noise_scale: float


def with_permitted(
    snapshot: Snapshot, jobs: JobRows, tables: Sequence[TableRow], noise_scales: Mapping[str, float]
) -> Snapshot:
    """Return the snapshot with the batches that users permit, and what jobs are predicted to do with the best of them.

    Args:
        jobs: The cluster's jobs, in the order of the snapshot's table.
        tables: What was learned about kinds of jobs, the latest fit last.
        noise_scales: By kind, for jobs that have reported none.
    """
    permitting = np.flatnonzero(np.isfinite(jobs.columns["batch_min"])).tolist()
    if not permitting or not snapshot.gpu_models:
        return snapshot
    learned = {(row.kind, row.gpu_model): row.by_batch for row in tables if row.by_batch is not None}
    low, high, curve = (np.full(len(jobs), -1, dtype=np.int64) for _ in range(3))
    rows: dict[_Kind, int] = {}
    for at in permitting:
        job = jobs[at]
        assert job.batch_min is not None
        assert job.batch_max is not None
        assert job.base_batch is not None
        low[at], high[at] = job.batch_min, job.batch_max
        model = _model_of(snapshot, at)
        gpu_model = snapshot.gpu_models[model]
        widest = snapshot.nodes.gpus[snapshot.nodes.gpu_model == model]
        noise = job.noise_scale or noise_scales.get(job.kind) or job.base_batch
        kind = _Kind(
            by_batch=learned.get((job.kind, gpu_model)),
            family=job.family or ANY_FAMILY,
            gpu_model=gpu_model,
            gpus_per_node=int(widest.max(initial=1)),
            permitted=(job.batch_min, job.batch_max),
            base=job.base_batch,
            noise_scale=float(f"{noise:.{DIGITS}g}"),
        )
        curve[at] = rows.setdefault(kind, len(rows))
    found = [_best(kind) for kind in rows]
    return replace(
        snapshot,
        jobs=replace(snapshot.jobs, batch_min=low, batch_max=high, goodput_curve=curve),
        goodput_curves=np.stack([np.stack((goodput, goodput)) for _, goodput, _ in found]),
        goodput_batches=np.stack([np.stack((batches, batches)) for batches, _, _ in found]),
        goodput_gains=np.stack([np.stack((gain, gain)) for _, _, gain in found]),
    )


def _model_of(snapshot: Snapshot, job: int) -> int:
    """Return the GPU model that a job runs on, or else the first that it may use."""
    placement = snapshot.jobs.placements[job]
    on = None if placement is None else snapshot.nodes.index.get(placement.shares[0].node_id)
    return int(snapshot.jobs.eligible[job].argmax()) if on is None else int(snapshot.nodes.gpu_model[on])


@lru_cache(maxsize=1_024)
def _best(kind: _Kind) -> tuple[Ints, Floats, Floats]:
    """Return ``best_batches`` at 1, 2, ... ``WIDEST`` GPUs."""
    stored: StoredStepTimes
    if kind.by_batch is not None:
        stored = json.loads(kind.by_batch)
    else:
        prior = JobProfile.of(kind.gpu_model, kind.family, ControlKind.POWER_LIMIT)
        stored = step_times(prior, kind.base, board_of(kind.gpu_model).peak_w, kind.gpus_per_node)
    times = StepTable(*(np.array(stored[name]) for name in ("gpus", "batch", "step_s")))
    return best_batches(times, kind.noise_scale, kind.base, kind.permitted, WIDEST)
