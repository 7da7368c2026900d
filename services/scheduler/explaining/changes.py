"""The one change that would start a waiting job, from the live state and in words."""

import math
from datetime import UTC, datetime

import numpy as np

from services.contracts.engines import OURS
from services.contracts.explanations import OneChange
from services.contracts.jobs import JobSpec
from services.core.cycle.snapshot import Trigger
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.one_change import Change, Elsewhere, Predicted, one_change
from services.scheduler.explaining.story import gpus_words
from services.scheduler.planning.dry_run import DRAFT
from services.scheduler.planning.job_table import asked_of, fits
from services.scheduler.planning.live_view import DryRound, Live, LiveView
from services.scheduler.repository.snapshots import JobRow, SpecRow


def change_of(
    view: LiveView, live: Live, dry: DryRound, job_id: JobId, spec: JobSpec, reason: str | None
) -> OneChange | None:
    """Return the smallest change that starts a job that waits, None if none is known; call it in a thread.

    Args:
        dry: The round in which it waits, passive.

    Raises:
        PlanError: The policy's plan for a changed state is not valid.
    """
    row = next(each for each in live.rows.jobs if each.id == job_id)
    if row.engine != OURS or row.leaves:  # its own engine's users and limits decide, or it is going anyhow
        return None
    found = one_change(
        dry.policy,
        (dry.snapshot, view.snapshot(live, Trigger.ACTIVE)),
        dry.before,
        job_id,
        as_id=DRAFT,
        predicted=_predicted(view, row, spec),
        why=None if reason is None else Reason(reason),
        one_size=spec.gpus.largest == spec.gpus.min and spec.layout is None,
        elsewhere=[] if row.gpu_model is None else _elsewhere(view, live, row, spec),
    )
    return None if found is None else shown(found, spec)


def _predicted(view: LiveView, row: JobRow, spec: JobSpec) -> Predicted:
    said = view.prediction(SpecRow(row.id, row.tenant_id, spec.model_dump(mode="json", exclude_none=True)))
    [gpu_s], [spread_gpu_s], [seen] = said.gpu_s, said.spread_gpu_s, said.seen
    return Predicted(gpu_s, spread_gpu_s / gpu_s if seen and gpu_s and spread_gpu_s else None)


def _elsewhere(view: LiveView, live: Live, row: JobRow, spec: JobSpec) -> list[Elsewhere]:
    kinds, found = view.cluster(live).kinds, list[Elsewhere]()
    for model in {kind.gpu_model for kind in kinds} - {row.gpu_model}:
        asked = model, *asked_of(row)[1:]
        eligible = np.array([fits(asked, kind) for kind in kinds], dtype=np.bool_)
        if eligible.any():
            there = spec.model_copy(update={"gpus": spec.gpus.model_copy(update={"model": model})})
            found.append(Elsewhere(model, eligible, _predicted(view, row, there)))
    return found


def shown(change: Change, spec: JobSpec) -> OneChange:
    """Return a change for the API and in words; ``spec``: of the job as it is."""
    if change.gpus is not None:
        return _worded(f"with {gpus_words(change.gpus)} instead of {spec.gpus.min}", what="gpus", gpus=change.gpus)
    if change.elsewhere is not None:
        model = change.elsewhere.gpu_model
        return _worded(f"for {model} instead of {spec.gpus.model}", what="model", model=model)
    if change.flex is not None:
        flex = round(100 * change.flex)
        return _worded(f"with flex {flex}, so that orders of the grid may slow it down", what="flex", flex=flex)
    if change.deadline_s is None:
        return _worded("as preemptible", what="preemptible")
    if math.isinf(change.deadline_s):
        return _worded("without its deadline", what="deadline")
    at = datetime.fromtimestamp(change.deadline_s, UTC)
    return _worded(f"with a deadline at {at:%a %H:%M} UTC, in dirtier hours", what="deadline", deadline=at)


def _worded(words: str, **found: object) -> OneChange:
    detail = f"Withdrawn and submitted again {words}, it would start now."
    return OneChange.model_validate({**found, "detail": detail})
