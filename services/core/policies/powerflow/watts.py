"""What the cluster draws once a plan is carried out, gang by gang and node by node, and the settings that keep a limit.

Algorithm 1 counts the jobs it allocates to. A round must count more: gangs that are stopping draw until they are gone,
free devices draw what they do when idle, and a gang that resizes stops first. So the second half of the algorithm is
run on the gangs that really go on or start, with what everything else draws taken off the limit. Where even their
lowest settings do not fit, the last start of the plan waits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from services.core.cycle.plan import Action, Hold, Plan, PowerNode, Preempt, Reason, Setting, Start, set_to
from services.core.cycle.snapshot import Bools, Floats, Phase, Snapshot
from services.core.domain.ids import JobId
from services.core.policies.powerflow.allocate import known_work_s
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.settings import allocate_settings
from services.core.policies.powerflow.view import Tables


@dataclass(frozen=True)
class Gang:
    """A gang that runs once the plan is carried out.

    Attributes:
        job, model, gpus: The job's index, the GPU model's, and the size.
        starts: Whether this plan starts it.
        pinned: Whether its setting is not to be touched: it is being measured.
    """

    job: int
    model: int
    gpus: int
    starts: bool
    pinned: bool


@dataclass(frozen=True)
class Draw:
    """What a plan leads to, watts."""

    gangs: list[Gang]
    stopping_w: float
    idle_w: float


def set_within(
    snapshot: Snapshot,
    plan: Plan,
    tables: Tables,
    limit_w: float,
    config: PowerflowConfig,
    pinned: Collection[JobId],
    *,
    all_placed: bool,
) -> Plan:
    """Return the plan with settings that keep the limit, without the starts it leaves no power for.

    Nodes that the plan leaves unused are powered down where they may be, but for the spare ones.

    Args:
        snapshot: The cluster.
        plan: Starts, stops and holds.
        tables: What gangs do.
        limit_w: What the cluster may draw; inf for no limit.
        config: Parameters.
        pinned: Jobs whose gangs are being measured: they are taken to draw what they may from their present setting on
            downwards.
        all_placed: Whether nobody waits for a node; else unused ones stay awake.
    """
    actions = list(plan.actions)
    while True:
        nodes = _unused(snapshot, actions, config) if all_placed else ()
        draw = draw_of(snapshot, actions, nodes, tables, pinned)
        speed, power_w = _rows(snapshot, draw.gangs, tables)
        left_w = limit_w - draw.stopping_w - draw.idle_w
        lowest_w = float(np.where(speed > 0, power_w, np.inf).min(axis=1).sum()) if draw.gangs else 0.0
        last = next((action for action in reversed(actions) if isinstance(action, Start)), None)
        if lowest_w <= left_w or last is None:
            break
        at = actions.index(last)
        actions[at : at + 1] = [Hold(last.job_id, Reason.POWER_LIMIT)] if snapshot.reasons else []
    chosen = allocate_settings(speed, power_w, left_w, _weights(snapshot, draw.gangs, tables, config))
    settings = [
        action
        for gang, index in zip(draw.gangs, chosen.tolist(), strict=True)
        if (action := _setting(snapshot, tables, gang, index)) is not None
    ]
    return Plan(plan.snapshot_version, (*actions, *settings), nodes)


def present_draw_w(snapshot: Snapshot, tables: Tables) -> float:
    """Return what the models say that the cluster draws now, at the settings that gangs have."""
    draw = draw_of(snapshot, (), (), tables)
    gangs = (float(tables.gang(g.job, g.model, g.gpus)[1][_now(snapshot, tables, g)]) for g in draw.gangs)
    return sum(gangs) + draw.stopping_w + draw.idle_w


def draw_of(
    snapshot: Snapshot,
    actions: Collection[Action],
    nodes: Collection[PowerNode],
    tables: Tables,
    pinned: Collection[JobId] = (),
) -> Draw:
    """Return what runs and what everything else draws once these actions are carried out."""
    jobs, model_of = snapshot.jobs, dict(zip(snapshot.nodes.ids, snapshot.nodes.gpu_model.tolist(), strict=True))
    stops = {action.job_id for action in actions if isinstance(action, Preempt)}
    starts = {action.job_id: action for action in actions if isinstance(action, Start)}
    gangs: list[Gang] = []
    stopping_w = 0.0
    for job in np.flatnonzero(jobs.gpus > 0).tolist():
        job_id, placement = jobs.ids[job], jobs.placements[job]
        model = model_of.get(placement.shares[0].node_id) if placement is not None else None
        if model is None:
            continue  # its node is lost
        gang = Gang(job, model, int(jobs.gpus[job]), False, job_id in pinned)
        if job_id in stops or jobs.phase[job] == Phase.PREEMPTING:
            stopping_w += float(tables.gang(job, model, gang.gpus)[1][_now(snapshot, tables, gang)])
        else:
            gangs.append(gang)
    if starts:
        index = {job_id: at for at, job_id in enumerate(jobs.ids) if job_id in starts}
        gangs += [
            Gang(index[job_id], model_of[start.placement.shares[0].node_id], start.gpus, True, job_id in pinned)
            for job_id, start in starts.items()
        ]
    return Draw(gangs, stopping_w, idle_draw_w(snapshot, starts.values(), nodes))


def idle_draw_w(snapshot: Snapshot, starts: Collection[Start], changes: Collection[PowerNode]) -> float:
    """Return what devices that nobody holds draw on nodes that are awake, once starts and changes are carried out."""
    if not snapshot.idle_w.size:
        return 0.0
    nodes, free = snapshot.nodes, snapshot.nodes.free_gpus.copy()
    awake: Bools = ~nodes.asleep
    if starts or changes:
        where = dict(zip(nodes.ids, range(len(nodes)), strict=True))
        for change in changes:
            awake[where[change.node_id]] = change.on
        for start in starts:
            for share in start.placement.shares:
                free[where[share.node_id]] -= len(share.devices)
                awake[where[share.node_id]] = True
    return float((free * snapshot.idle_w[nodes.gpu_model])[awake].sum())


def _unused(snapshot: Snapshot, actions: list[Action], config: PowerflowConfig) -> tuple[PowerNode, ...]:
    """Return which nodes to power down: those nobody uses or starts on, but for the first few."""
    nodes = snapshot.nodes
    if not config.power_down or not nodes.may_sleep.any():
        return ()
    starts = (action for action in actions if isinstance(action, Start))
    used = {share.node_id for start in starts for share in start.placement.shares}
    empty = np.flatnonzero(nodes.may_sleep & ~nodes.asleep & (nodes.free_gpus == nodes.gpus))
    unused = [node for node in empty.tolist() if nodes.ids[node] not in used]
    return tuple(PowerNode(nodes.ids[node], False, Reason.UNUSED) for node in unused[config.spare_nodes :])


def _rows(snapshot: Snapshot, gangs: list[Gang], tables: Tables) -> tuple[Floats, Floats]:
    """Return speed and power of every gang by setting, 0 where it has no such setting: (n_gangs, n_settings) each."""
    found = [tables.gang(gang.job, gang.model, gang.gpus) for gang in gangs]
    width = max((speed.size for speed, _ in found), default=1)
    speed, power_w = np.zeros((2, len(gangs), width))
    for row, (gang, (of_speed, of_power_w)) in enumerate(zip(gangs, found, strict=True)):
        if gang.pinned:
            at = _now_or_above(snapshot, tables, gang)
            speed[row, at], power_w[row, at] = of_speed[at], of_power_w[: at + 1].max()
        else:
            speed[row, : of_speed.size], power_w[row, : of_speed.size] = of_speed, of_power_w
    return speed, power_w


def _weights(snapshot: Snapshot, gangs: list[Gang], tables: Tables, config: PowerflowConfig) -> Floats | None:
    if config.marginal != "power":
        return None
    left_s = snapshot.jobs.remaining_s
    work_s = [
        left_s[gang.job] * tables.gang(gang.job, gang.model, int(snapshot.jobs.min_gpus[gang.job]))[0][-1]
        for gang in gangs
    ]
    return known_work_s(np.array(work_s, dtype=np.float64))


def _now(snapshot: Snapshot, tables: Tables, gang: Gang) -> int:
    """Return the index of the setting a gang has; the default where none is set."""
    table = tables.of(gang.job, gang.model)
    value = float("nan") if table.kind is None or gang.starts else float(snapshot.jobs.setting(table.kind)[gang.job])
    return table.values.size - 1 if np.isnan(value) else int(np.abs(table.values - value).argmin())


def _now_or_above(snapshot: Snapshot, tables: Tables, gang: Gang) -> int:
    """Return the index of the least known setting that is not below the one a gang has."""
    table = tables.of(gang.job, gang.model)
    value = float("nan") if table.kind is None or gang.starts else float(snapshot.jobs.setting(table.kind)[gang.job])
    last = table.values.size - 1
    return last if np.isnan(value) else min(int(np.searchsorted(table.values, value - 1e-6)), last)


def _setting(snapshot: Snapshot, tables: Tables, gang: Gang, index: int) -> Setting | None:
    """Return the action that puts a gang to a setting, None where it has it."""
    table = tables.of(gang.job, gang.model)
    if table.kind is None or gang.pinned:
        return None
    default = index == table.values.size - 1
    value = None if default else float(table.values[index])
    now = float("nan") if gang.starts else float(snapshot.jobs.setting(table.kind)[gang.job])
    if (value is None and np.isnan(now)) or value == now:
        return None
    reason = Reason.DEFAULT_SETTING if default else Reason.POWER_LIMIT
    return set_to(snapshot.jobs.ids[gang.job], table.kind, value, reason)
