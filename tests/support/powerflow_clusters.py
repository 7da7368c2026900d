"""Whole clusters for PowerFlow: jobs with fitted models of their own, all waiting or some at work already."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from services.core.cycle.plan import Plan, SetControl, Start
from services.core.cycle.snapshot import Gangs, Phase, Snapshot
from services.core.domain.arrays import Ints
from services.core.domain.controls import ControlKind
from services.core.domain.gangs import GangTable
from services.core.profiles.capped import CappedModel
from services.core.profiles.priors import FAMILIES
from services.core.profiles.profile import JobModel, JobProfile
from tests.support.builders import NOON_S, a_job, a_node, a_snapshot
from tests.support.performance_table import PerformanceTable

BOARD, PER_NODE, IDLE_W, HOST_W = "V100", 8, 50.0, 40.0
MOST_GPUS = 64
SIZES: Ints = np.int64(1) << np.arange(MOST_GPUS.bit_length(), dtype=np.int64)
SETTINGS = {ControlKind.POWER_LIMIT: np.linspace(100.0, 250.0, 16), ControlKind.CLOCK: np.linspace(630.0, 1_530.0, 16)}


def fitted_models(rng: np.random.Generator, kinds: int, axis: ControlKind = ControlKind.POWER_LIMIT) -> list[JobModel]:
    """Return models as fitting leaves them, each of another job: those of the families, parameters up to 10 % off."""
    families = [JobProfile.of(BOARD, family, axis).model for family in sorted(FAMILIES)]
    models: list[JobModel] = []
    for kind in range(kinds):
        model = families[kind % len(families)]
        if isinstance(model, CappedModel):
            models.append(replace(model, vector=model.vector * rng.uniform(1.0, 1.1, model.vector.size)))
        else:
            known = model.throughput.parameters
            parameters = known._make(np.array(known) * rng.uniform(1.0, 1.1, len(known)))
            speed = replace(model.throughput, parameters=parameters)
            models.append(replace(model, throughput=speed))
    return models


def gangs_of(models: list[JobModel], axis: ControlKind = ControlKind.POWER_LIMIT) -> tuple[Gangs, ...]:
    """Return what gangs of every model do, at powers of two and sixteen settings."""
    sizes, values = SIZES.astype(np.float64), SETTINGS[axis]
    grid = PerformanceTable(models).evaluate(np.full(len(models), 256.0), sizes, values, PER_NODE)
    speed, power_w = 1.0 / grid.step_time_s, grid.power_w + sizes[:, None] * HOST_W
    return tuple({0: GangTable(SIZES, *each, axis, values)} for each in zip(speed, power_w, strict=True))


def waiting_cluster(
    n_jobs: int, gpus: int, gangs: tuple[Gangs, ...], *, seed: int = 3, axis: ControlKind = ControlKind.POWER_LIMIT
) -> Snapshot:
    """Return nodes of eight GPUs, none in use, and elastic jobs that all wait; nodes may be powered down."""
    rng = np.random.default_rng(seed)
    nodes = [a_node(f"n{at:05}", gpus=PER_NODE, model=BOARD) for at in range(gpus // PER_NODE)]
    snapshot = a_snapshot([a_job(f"j{at:05}") for at in range(n_jobs)], nodes)
    jobs = replace(
        snapshot.jobs,
        submitted_s=NOON_S - rng.integers(60, 86_400, n_jobs),
        max_gpus=rng.choice(SIZES[2:], n_jobs),
        remaining_s=rng.lognormal(9.0, 1.0, n_jobs),
        control_curve=np.arange(n_jobs) % len(gangs),
    )
    return replace(
        snapshot,
        jobs=jobs,
        nodes=replace(snapshot.nodes, may_sleep=np.ones(len(nodes), dtype=np.bool_)),
        gangs=gangs,
        control_curves=({},) * len(gangs),
        settable=(frozenset({axis}),),
        idle_w=np.array([IDLE_W]),
        next_active_s=NOON_S + 300.0,
    )


def an_hour_on(snapshot: Snapshot, plan: Plan, *, ended: float, seed: int = 4) -> Snapshot:
    """Return the cluster after the plan, all its gangs running for an hour; a share of them has ended, as many wait."""
    rng = np.random.default_rng(seed)
    jobs, nodes = snapshot.jobs, snapshot.nodes
    columns = {name: getattr(jobs, name).copy() for name in ("phase", "gpus", "waiting_since_s", "remaining_s")}
    columns |= {"power_limit_w": jobs.power_limit_w.copy(), "clock_mhz": jobs.clock_mhz.copy()}
    placements, free = list(jobs.placements), [set(devices) for devices in nodes.free_devices]
    for action in plan.actions:
        job = jobs.index.get(action.job_id, -1)
        if isinstance(action, Start) and rng.random() >= ended:
            columns["phase"][job], columns["gpus"][job] = Phase.RUNNING, action.gpus
            placements[job] = action.placement
            for share in action.placement.shares:
                free[nodes.index[share.node_id]] -= set(share.devices)
        elif isinstance(action, SetControl) and columns["gpus"][job]:
            column = "power_limit_w" if action.kind is ControlKind.POWER_LIMIT else "clock_mhz"
            columns[column][job] = np.nan if action.value is None else action.value
    runs = columns["gpus"] > 0
    columns["remaining_s"] *= np.where(runs, 0.9, 1.0)
    columns["waiting_since_s"] = np.where(runs, snapshot.now_s, jobs.waiting_since_s)
    free_devices = tuple(tuple(sorted(each)) for each in free)
    free_gpus = np.fromiter(map(len, free), np.int64, len(free))
    return replace(
        snapshot,
        now_s=snapshot.now_s + 3_600.0,
        next_active_s=snapshot.next_active_s + 3_600.0,
        jobs=replace(jobs, placements=tuple(placements), **columns),
        nodes=replace(nodes, free_devices=free_devices, free_gpus=free_gpus),
    )
