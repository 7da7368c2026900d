"""What the policy's levers did for one job, in grams and minutes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from services.contracts.explanations import LeverEffect
from services.contracts.jobs import JobSpec
from services.core.domain.ids import JobId
from services.core.policies.levers import (
    MINUTE_S,
    Effect,
    ExplainsLevers,
    Lever,
    SizeRecord,
    nothing,
    unknown,
    width_in_ledger,
)
from services.scheduler.planning.live_view import DryRound
from services.scheduler.repository.explanations import ExplainedRow, GangRecordRow, SizeRow

SENTENCE = (
    "Levers: each alone against the same job without it, for what the job has left; PUE is not included, and effects "
    "do not add up."
)
IN_LEDGER = "Levers: by what the ledger has of this job; what it does not tell is unknown."


def of_round(dry: DryRound, job_id: JobId) -> list[LeverEffect]:
    """Return the effects on a job that waits or runs, by a round that was not applied; none under other policies."""
    if not isinstance(dry.policy, ExplainsLevers) or job_id not in dry.snapshot.jobs.index:
        return []
    return shown(dry.policy.levers(dry.snapshot, dry.memory, job_id))


def of_ended(
    row: ExplainedRow,
    spec: JobSpec,
    sizes: Sequence[SizeRow],
    gangs: Sequence[GangRecordRow],
    unshifted_gco2: float | None,
) -> list[LeverEffect]:
    """Return the effects on a job that has ended.

    Args:
        row: The job.
        spec: Its spec.
        sizes: What it did at each size, in the ledger.
        gangs: The gangs that it had.
        unshifted_gco2: What its energy would have emitted from its submission on, without a pause; None: unknown.
    """
    if not gangs or not row.energy_j:
        return []
    records = [SizeRecord(each.gpus, each.progress, each.energy_j, each.duration_s) for each in sizes]
    width = width_in_ledger(records, spec.gpus.min, row.carbon_gco2 / row.energy_j)
    own = spec.base_batch
    batch = (
        nothing(Lever.BATCH, "Its batch was its user's.")
        if own is None or all(gang.batch_size == own for gang in gangs)
        else unknown(Lever.BATCH, "How fast it would have been with the base batch was not measured.")
    )
    limit = (
        nothing(Lever.POWER_LIMIT, "It always had the default power limit.")
        if not any(gang.was_limited for gang in gangs)
        else unknown(Lever.POWER_LIMIT, "How long it had which limit is not in the ledger.")
    )
    hours = unknown(Lever.HOURS, "The intensity since its submission is not known.")
    began_s = (gangs[0].started_at - row.submitted_at).total_seconds()
    paused_s = sum(
        (later.started_at - (gang.ended_at or gang.started_at)).total_seconds() for gang, later in pairwise(gangs)
    )
    if unshifted_gco2 is not None:
        hours = nothing(Lever.HOURS, "It hardly waited.")
    if unshifted_gco2 is not None and began_s + paused_s > MINUTE_S:
        detail = "Against the same energy from its submission on without a pause; waiting for GPUs is included."
        hours = Effect(Lever.HOURS, unshifted_gco2 - row.carbon_gco2, (began_s + paused_s) / MINUTE_S, detail)
    order = unknown(Lever.ORDER, "How long it would have waited otherwise is not known.")
    sleep = unknown(Lever.SLEEP, "Which nodes slept because of it is not recorded.")
    return shown((width, batch, limit, hours, order, sleep))


def shown(effects: Sequence[Effect]) -> list[LeverEffect]:
    """Return effects as they are shown."""
    return [
        LeverEffect(
            lever=each.lever.value,
            carbon_saved_gco2=each.carbon_saved_gco2,
            minutes_added=each.minutes_added,
            detail=each.detail,
        )
        for each in effects
    ]
