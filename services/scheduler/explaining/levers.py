"""What the policy's levers did for one job, in grams and minutes."""

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from services.contracts.explanations import LeverEffect
from services.contracts.jobs import JobSpec
from services.core.domain.ids import JobId
from services.core.policies import levers
from services.core.policies.limits import LIMIT
from services.core.profiles.goodput import StepTable, batch_gain
from services.scheduler.learning.learned import curve_of, tables_of
from services.scheduler.planning.dry_run import DryRound
from services.scheduler.repository.documents import StoredStepTimes
from services.scheduler.repository.explanations import Ledger

SENTENCE = (
    "Levers: each alone against the same job without it, for what the job has left; PUE is not included, and effects "
    "do not add up."
)
IN_LEDGER = "Levers: by what the ledger has of this job; what it does not tell is unknown."


def of_round(dry: DryRound, job_id: JobId) -> list[LeverEffect]:
    """Return the effects on a waiting or running job, by a round not applied; none if its policy explains none."""
    if not isinstance(dry.policy, levers.ExplainsLevers) or job_id not in dry.snapshot.jobs.index:
        return []
    return shown(dry.policy.levers(dry.snapshot, dry.memory, job_id))


def of_ended(ledger: Ledger, spec: JobSpec, unshifted_gco2: float | None) -> list[LeverEffect]:
    """Return the effects on an ended job; ``unshifted_gco2``: what its energy emits without a pause, if known."""
    row, gangs = ledger.row, ledger.gangs
    if not gangs or not row.energy_j:
        return []
    records = [levers.SizeRecord(each.gpus, each.progress, each.energy_j, each.duration_s) for each in ledger.sizes]
    width = levers.width_in_ledger(records, spec.gpus.min, ledger.gco2_per_j)
    batch, limit = _batch(ledger, spec), _power_limit(ledger)
    hours = levers.unknown(levers.Lever.HOURS, "The intensity since its submission is not known.")
    began_s = (gangs[0].started_at - row.submitted_at).total_seconds()
    paused_s = sum(
        (later.started_at - (gang.ended_at or gang.started_at)).total_seconds() for gang, later in pairwise(gangs)
    )
    if unshifted_gco2 is not None:
        hours = levers.nothing(levers.Lever.HOURS, "It hardly waited.")
    if unshifted_gco2 is not None and began_s + paused_s > levers.MINUTE_S:
        detail = "Against the same energy from its submission on without a pause; waiting for GPUs is included."
        hours = levers.Effect(
            levers.Lever.HOURS, unshifted_gco2 - row.carbon_gco2, (began_s + paused_s) / levers.MINUTE_S, detail
        )
    order = levers.unknown(levers.Lever.ORDER, "How long it would have waited otherwise is not known.")
    sleep = levers.unknown(levers.Lever.SLEEP, "Which nodes slept because of it is not recorded.")
    return shown((width, batch, limit, hours, order, sleep))


def _power_limit(ledger: Ledger) -> levers.Effect:
    limited = sum(gang.was_limited for gang in ledger.gangs)
    if not limited:
        return levers.nothing(levers.Lever.POWER_LIMIT, "It always had the default power limit.")
    if len({each.allocation_id for each in ledger.limits}) < limited:
        return levers.unknown(
            levers.Lever.POWER_LIMIT, "How long it had which limit was not reported, or is no longer stored."
        )
    tables = next(iter(tables_of(ledger.tables).values()), None)
    records: list[levers.LimitRecord] = []
    for each in ledger.limits:
        table = None if tables is None else tables.get((each.gpu_model or "", LIMIT))
        if table is None:
            return levers.unknown(levers.Lever.POWER_LIMIT, "Its kind was not measured under power limits.")
        curve = curve_of(table, each.gpus)
        speed, power_w = curve.at(each.power_limit_w)
        records.append(levers.LimitRecord(each.gpus, each.duration_s, speed, power_w, curve.at(None)[1]))
    host_w = (ledger.row.energy_j - ledger.row.gpu_energy_j) / ledger.row.gpu_s if ledger.row.gpu_s else 0.0
    return levers.limits_in_ledger(records, host_w, ledger.gco2_per_j)


def _batch(ledger: Ledger, spec: JobSpec) -> levers.Effect:
    base, row = spec.base_batch, ledger.row
    others = [gang for gang in ledger.gangs if gang.batch_size not in (None, base)]
    if base is None or not others:
        return levers.nothing(levers.Lever.BATCH, "Its batch was its user's.")
    by_model = {each.gpu_model: each.by_batch for each in ledger.tables if each.by_batch is not None}
    records: list[levers.BatchRecord] = []
    for gang in others:
        stored = by_model.get(gang.gpu_model or "")
        if stored is None or not row.gpu_s or gang.batch_size is None:
            return levers.unknown(
                levers.Lever.BATCH, "How fast it would have been with the base batch was not measured."
            )
        known: StoredStepTimes = json.loads(stored)
        times = StepTable(*(np.array(known[name]) for name in ("gpus", "batch", "step_s")))
        gain = batch_gain(times, ledger.noise_scale or base, base, gang.gpus, gang.batch_size)
        ran_s = (gang.ended_at - gang.running_at).total_seconds() if gang.ended_at and gang.running_at else 0.0
        records.append(levers.BatchRecord(ran_s, row.energy_j / row.gpu_s * gang.gpus * ran_s, gain))
    return levers.batches_in_ledger(records, ledger.gco2_per_j)


def shown(effects: Sequence[levers.Effect]) -> list[LeverEffect]:
    return [LeverEffect.of(each, lever=each.lever.value) for each in effects]
