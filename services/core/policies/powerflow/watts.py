"""What the cluster draws once a plan is carried out, and the control values that keep it within a limit.

Algorithm 1 counts only the jobs to which it allocates. A round must count more: gangs that are stopping draw power
until they are gone, free devices draw idle power, and a gang that resizes stops first. So the second half of the
algorithm is run on the gangs that really continue or start, with the power of everything else subtracted from the
limit. If even their lowest control values do not fit, all unused nodes are powered down; then starts are not measured;
then the last starts wait.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from services.core.cycle.plan import Action, Control, Hold, Plan, PowerNode, Preempt, Start, set_to
from services.core.cycle.rounds import with_holds
from services.core.cycle.snapshot import PREEMPTING, Snapshot
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.powerflow.allocate import known_work_s
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.controls import allocate_controls
from services.core.policies.powerflow.view import Tables


@dataclass(frozen=True)
class Draw:
    """What draws power once a plan is carried out; columns are (n_gangs,): those that go on, then the plan's starts."""

    jobs: Ints  #: Index of each gang's job
    models: Ints  #: Index of its GPU model
    gpus: Ints  #: Its size
    starts: Bools  #: Whether this plan starts the gang
    pinned: Bools  #: Whether its control value must not be changed, because it is being measured
    stopping_w: float  #: What stopping gangs still draw, watts

    def of(self, at: Bools | slice) -> Draw:
        """Return the same for these gangs only."""
        return Draw(self.jobs[at], self.models[at], self.gpus[at], self.starts[at], self.pinned[at], self.stopping_w)


def set_within(
    snapshot: Snapshot,
    plan: Plan,
    tables: Tables,
    limit_w: float,
    config: PowerflowConfig,
    pinned: Collection[JobId],
    *,
    all_placed: bool,
) -> tuple[Plan, set[JobId]]:
    """Return the plan with control values that keep the limit, without the starts it leaves no power for.

    Nodes that the plan leaves unused are powered down where they may be, except for the spare ones. Also return the
    pinned jobs that start but are not to be measured, as the limit leaves no power for it.

    Args:
        snapshot: The cluster. plan: Starts, stops and holds. tables: What gangs do. limit_w: What the cluster may draw;
        inf for no limit. config: Parameters. pinned: Jobs whose gangs are being measured: they are assumed to draw the
        most that they may at their present control value or below. all_placed: Whether no job waits for a node;
        otherwise unused nodes stay awake while the limit allows it.
    """
    starts = [action for action in plan.actions if isinstance(action, Start)]
    draw = draw_of(snapshot, plan.actions, tables, pinned)
    free_speed, free_w = (each[:, 0] for each in tables.gangs(draw.jobs, draw.models, draw.gpus[:, None]))
    speed, power_w = _pinned(snapshot, draw, tables, free_speed, free_w)
    lowest_w, unpinned_w = _lowest_w(speed, power_w), _lowest_w(free_speed, free_w)
    measured = np.flatnonzero(draw.starts & draw.pinned & (unpinned_w < lowest_w)).tolist()
    idle = Idle(snapshot, starts)
    spare_nodes = config.spare_nodes if all_placed and config.power_down else None
    n_gangs, going_on = len(draw.jobs), len(draw.jobs) - len(starts)
    unmeasured: set[JobId] = set()
    while True:
        sleeps = idle.unused(spare_nodes)
        left_w = limit_w - draw.stopping_w - idle.draw_w(sleeps)
        if float(lowest_w[:n_gangs].sum()) <= left_w:
            break
        if config.power_down and spare_nodes != 0:
            spare_nodes = 0
        elif measured:
            row = measured.pop()
            unmeasured.add(snapshot.jobs.ids[int(draw.jobs[row])])
            draw.pinned[row], lowest_w[row] = False, unpinned_w[row]
            speed[row], power_w[row] = free_speed[row], free_w[row]
        elif n_gangs > going_on:
            n_gangs -= 1
            idle.count(starts[n_gangs - going_on], -1)
        else:
            break
    actions = _with_starts(snapshot, plan, starts[: n_gangs - going_on])
    draw, speed, power_w = draw.of(slice(n_gangs)), speed[:n_gangs], power_w[:n_gangs]
    chosen = allocate_controls(speed, power_w, left_w, _weights(snapshot, draw, tables, config))
    down: list[int] = sleeps.tolist()
    nodes = tuple(PowerNode(snapshot.nodes.ids[node], False, Reason.UNUSED) for node in down)
    return Plan(plan.snapshot_version, (*actions, *_controls(snapshot, draw, tables, chosen)), nodes), unmeasured


def _with_starts(snapshot: Snapshot, plan: Plan, starts: Collection[Start]) -> tuple[Action, ...]:
    """Return the plan's actions with only these of its starts; the other gangs wait for power."""
    kept = {start.job_id: start for start in starts}
    actions = (
        kept.get(each.job_id, Hold(each.job_id, Reason.POWER_LIMIT)) if isinstance(each, Start) else each
        for each in plan.actions
    )
    return with_holds(snapshot, actions)


def present_draw_w(snapshot: Snapshot, tables: Tables) -> float:
    """Return what the cluster draws now according to the models, at the present control values."""
    draw = draw_of(snapshot, (), tables)
    at_present_w = _at_present_w(snapshot, tables, draw.jobs, draw.models, draw.gpus)
    return sum(at_present_w) + draw.stopping_w + Idle(snapshot, ()).draw_w()


def draw_of(snapshot: Snapshot, actions: Collection[Action], tables: Tables, pinned: Collection[JobId] = ()) -> Draw:
    """Return what running and stopping gangs draw once these actions are carried out."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    where, ids = nodes.index, jobs.ids
    holders, models = _holders(snapshot)
    stops = {action.job_id for action in actions if isinstance(action, Preempt)}
    stopping = jobs.phase[holders] == PREEMPTING
    if stops:
        stopping |= np.fromiter((ids[job] in stops for job in holders.tolist()), np.bool_, holders.size)
    stopping_w = _at_present_w(snapshot, tables, holders[stopping], models[stopping], jobs.gpus[holders[stopping]])
    goes_on, starts = holders[~stopping], [action for action in actions if isinstance(action, Start)]
    of_starts = [jobs.index[start.job_id] for start in starts]
    on = [where[start.placement.shares[0].node_id] for start in starts]
    gangs = np.concatenate((goes_on, np.array(of_starts, dtype=np.int64)))
    return Draw(
        gangs,
        np.concatenate((models[~stopping], nodes.gpu_model[np.array(on, dtype=np.int64)])),
        np.concatenate((jobs.gpus[goes_on], np.array([start.gpus for start in starts], dtype=np.int64))),
        np.arange(gangs.size) >= goes_on.size,
        np.fromiter((ids[job] in pinned for job in gangs.tolist()), np.bool_, gangs.size),
        sum(stopping_w),
    )


def stated_error_w(snapshot: Snapshot, tables: Tables) -> float:
    """Return the models' stated error in what gangs draw now, including those that stop, watts.

    Errors are added up, because a model is wrong in the same direction for all its gangs.
    """
    jobs, models = _holders(snapshot)
    at_present_w = _at_present_w(snapshot, tables, jobs, models, snapshot.jobs.gpus[jobs])
    of_gangs = zip(jobs.tolist(), models.tolist(), at_present_w, strict=True)
    return sum(tables.of(job, model).power_error * power_w for job, model, power_w in of_gangs)


def _holders(snapshot: Snapshot) -> tuple[Ints, Ints]:
    """Return the jobs that hold devices, without those whose nodes are lost, and their GPU models: (n,) each."""
    where = snapshot.nodes.index
    holders = np.flatnonzero(snapshot.jobs.gpus > 0)
    sits = (snapshot.jobs.placements[job] for job in holders.tolist())
    first = [-1 if placement is None else where.get(placement.shares[0].node_id, -1) for placement in sits]
    on: Ints = np.array(first, dtype=np.int64)
    return holders[on >= 0], snapshot.nodes.gpu_model[on[on >= 0]]


class Idle:
    """The devices that are free once starts are carried out, and the nodes that are then unused."""

    def __init__(self, snapshot: Snapshot, starts: Collection[Start]) -> None:
        nodes = self._nodes = snapshot.nodes
        self._idle_w = snapshot.idle_w[nodes.gpu_model] if snapshot.idle_w.size else None
        self._free = nodes.free_gpus.copy()
        self._starts_on = np.zeros(len(nodes), dtype=np.int64)
        for start in starts:
            self.count(start, 1)

    def unused(self, spare_nodes: int | None) -> Ints:
        """Return which nodes to power down: the unused ones, except the first few as spares; None: none."""
        nodes = self._nodes
        if spare_nodes is None:
            return np.empty(0, dtype=np.int64)
        empty = nodes.may_sleep & ~nodes.asleep & (nodes.free_gpus == nodes.gpus) & (self._starts_on == 0)
        return np.flatnonzero(empty)[spare_nodes:]

    def draw_w(self, sleeps: Ints | None = None) -> float:
        """Return what free devices draw on nodes that are awake or wake for a start, watts."""
        if self._idle_w is None:
            return 0.0
        awake = ~self._nodes.asleep
        if sleeps is not None:
            awake[sleeps] = False
        awake |= self._starts_on > 0
        return float((self._free * self._idle_w)[awake].sum())

    def count(self, start: Start, times: int) -> None:
        """Count a start once more, 1, or no more, -1: then its devices are free again."""
        for share in start.placement.shares:
            node = self._nodes.index[share.node_id]
            self._free[node] -= times * len(share.devices)
            self._starts_on[node] += times


def _lowest_w(speed: Floats, power_w: Floats) -> Floats:
    """Return what gangs draw at their lowest control values: (n_gangs,)."""
    return np.where(speed > 0, power_w, np.inf).min(axis=1)


def _pinned(snapshot: Snapshot, draw: Draw, tables: Tables, speed: Floats, power_w: Floats) -> tuple[Floats, Floats]:
    """Return speed and power by control value, (n_gangs, n_values) each; pinned gangs have one value."""
    speed, power_w = speed.copy(), power_w.copy()
    for row in np.flatnonzero(draw.pinned).tolist():
        at = _now_or_above(snapshot, tables, int(draw.jobs[row]), int(draw.models[row]), starts=bool(draw.starts[row]))
        of_speed, most_w = speed[row, at], power_w[row, : at + 1].max()
        speed[row], power_w[row] = 0.0, 0.0
        speed[row, at], power_w[row, at] = of_speed, most_w
    return speed, power_w


def _weights(snapshot: Snapshot, draw: Draw, tables: Tables, config: PowerflowConfig) -> Floats | None:
    if config.marginal != "power":
        return None
    least = snapshot.jobs.min_gpus[draw.jobs]
    return known_work_s(snapshot.jobs.remaining_s[draw.jobs] * tables.default_speed(draw.jobs, draw.models, least))


def _values_now(snapshot: Snapshot, tables: Tables, places: Ints, jobs: Ints) -> Floats:
    """Return each job's present value of the control its table is for, NaN at the default: (n,)."""
    now = np.full(jobs.size, np.nan)
    kinds = tables.stacked.kinds
    for kind in ControlKind:
        of_kind = np.fromiter((each is kind for each in kinds), np.bool_, len(kinds))[places]
        now[of_kind] = snapshot.jobs.control_value(kind)[jobs[of_kind]]
    return now


def _at_present_w(snapshot: Snapshot, tables: Tables, jobs: Ints, models: Ints, gpus: Ints) -> list[float]:
    """Return the draw of gangs at their present control values; all are (n,)."""
    places = tables.places(jobs, models)
    now, known = _values_now(snapshot, tables, places, jobs), tables.stacked
    nearest = np.abs(known.values[places] - now[:, None]).argmin(axis=1)
    at = np.where(np.isnan(now), known.n_values[places] - 1, nearest)
    return known.at(places, gpus[:, None])[1][np.arange(jobs.size), 0, at].tolist()


def _now_or_above(snapshot: Snapshot, tables: Tables, job: int, model: int, *, starts: bool) -> int:
    """Return the index of the lowest known control value that is not below a gang's present one."""
    table = tables.of(job, model)
    value = float("nan") if table.kind is None or starts else float(snapshot.jobs.control_value(table.kind)[job])
    last = table.values.size - 1
    return last if np.isnan(value) else min(int(np.searchsorted(table.values, value - 1e-6)), last)


def _controls(snapshot: Snapshot, draw: Draw, tables: Tables, chosen: Ints) -> list[Control]:
    """Return the actions that set gangs to the chosen control values, where these differ from the present ones."""
    places, known = tables.places(draw.jobs, draw.models), tables.stacked
    now = np.where(draw.starts, np.nan, _values_now(snapshot, tables, places, draw.jobs))
    default, values = chosen == known.n_values[places] - 1, known.values[places, chosen]
    changes = ~draw.pinned & np.where(default, ~np.isnan(now), values != now)
    actions: list[Control] = []
    for row in np.flatnonzero(changes).tolist():
        kind = known.kinds[int(places[row])]
        if kind is not None:
            value, reason = (None, Reason.DEFAULT_CONTROL) if default[row] else (float(values[row]), Reason.POWER_LIMIT)
            actions.append(set_to(snapshot.jobs.ids[int(draw.jobs[row])], kind, value, reason))
    return actions


RELAXES = 0.5
LEAST, MOST = 0.5, 4.0
"""Bounds of the ratio: beyond them, something other than the models is wrong."""


def correction(snapshot: Snapshot, tables: Tables, known: float, *, measuring: bool) -> float:
    """Return the ratio of measured to modelled power for this round, by which the models' power is corrected.

    The paper trusts its models. They cover GPUs; but hosts and unknown jobs draw power too, and jobs change. So
    whenever the cluster's power has been measured in a steady state since the last change, it is compared with what the
    models predict for the same gangs at the same control values. If more is drawn, the ratio applies at once; if less,
    it falls by half of the difference each round, because a gang that has just begun or is saving a checkpoint draws
    little for a while. While gangs are being measured at every control value, it only rises. This is ours.

    Args:
        snapshot: The cluster with its measured power; if that is NaN, the known ratio is kept.
        measuring: Whether gangs are being measured at control values other than those counted for them.
    """
    modelled_w = present_draw_w(snapshot, tables) if math.isfinite(snapshot.measured_w) else 0.0
    if modelled_w <= 0:
        return known
    ratio = min(max(snapshot.measured_w / modelled_w, LEAST), MOST)
    if ratio >= known:
        return ratio
    return known if measuring else known + RELAXES * (ratio - known)
