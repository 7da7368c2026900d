"""The layer over every policy that meets the grid's orders.

The policy sees the cluster as it would be without orders, and its plan stands as far as the orders allow. What exceeds
a limit is taken back by these means, each only if those before it do not suffice:

1. power limits and clocks of flexible gangs, each within its class: no slower than its user allows;
2. flexible gangs that would start do so on fewer GPUs, or wait; then running ones that may be stopped restart on fewer
   GPUs, or pause, with their grace period in which they write a checkpoint: those of the largest class first, then of
   the lowest priority, then those that have just saved, then the youngest. Gangs become narrower where their job
   permits it, and only under policies that will give them back their size (``PolicyEntry.resizes``);
3. flexible gangs that may not be stopped go below their class;
4. gangs of class 0: their limits and clocks, then their starts wait, then they pause.

A fall of the limit that has been announced is met with less work lost: the flexible gangs that it would stop, as far
as lengths are known, do not start if they could not save before it (``widths.pays``), and those that tell when they
save stop right after they have done so for the last time, if they have had ``SHORTEST_S``.

Service instances are left alone: what they draw is taken off the limit beforehand; serving plans pools and fleets with
less in ordered zones by itself. How far each gang is slowed is PowerFlow's choice (``powerflow.controls``), on the
values that the class permits; the last watts go to one more gang.
Nothing is remembered: the same plan, limit and draw give the same result, so that a gang that was paused waits as long
as the order leaves no room for it, and a value that an order had set goes back to the policy's when it ends.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from services.core.cycle.capacity import resumed_size
from services.core.cycle.plan import (
    Action,
    Hold,
    Plan,
    Preempt,
    ProfileControls,
    SetControl,
    Start,
    set_to,
)
from services.core.cycle.policy import Layer, Memory, Policy
from services.core.cycle.rounds import with_holds
from services.core.cycle.run_cycle import CycleResult, run_cycle
from services.core.cycle.snapshot import RUNNING, STARTING, Snapshot
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId
from services.core.domain.orders import STOPS_AHEAD_S, PowerOrder
from services.core.domain.reasons import Reason
from services.core.policies.orders import widths
from services.core.policies.orders.tables import OrderTables, in_zone, within
from services.core.policies.powerflow.controls import allocate_controls
from services.core.policies.powerflow.watts import Draw, Idle, draw_of
from services.core.policies.registry import entry_of
from services.core.policies.sparing import Sparing, urgent
from services.core.policies.windows import SHORTEST_S, Keeping, closed

CHECK_S = 10.0  #: Between looks whether a gang has saved its work that is late with it
NOISE = 0.05
"""Watts or MHz that are no change: the same sum, taken in another order, is not quite the same number."""
Values = dict[tuple[JobId, ControlKind], float | None]  #: What devices of gangs are set to, None for the default


def run_under_orders(policy: Policy[Memory], snapshot: Snapshot, memory: Memory) -> CycleResult[Memory]:
    """Return ``run_cycle``'s plan, within orders, windows and guaranteed runs; ``PlanError``: as for ``run_cycle``."""
    if snapshot.min_run_s or snapshot.saves:
        policy = Sparing(policy, hurries=bool(snapshot.saves) and urgent(snapshot, policy))
    if snapshot.windows:
        policy, snapshot = Keeping(policy, snapshot), closed(snapshot)
    if not snapshot.orders and np.isnan(snapshot.jobs.unordered_w).all():
        return run_cycle(policy, snapshot, memory)
    return run_cycle(Obeying(policy), snapshot, memory)


@dataclass(frozen=True)
class Reach:
    """What the scope of an order draws once every means is used, by the models as they are corrected, watts."""

    idle_w: float  #: Free GPUs and their hosts
    bound_w: float  #: Gangs that may not be stopped, at their lowest limits
    other_w: float  #: As ``PowerOrder.other_w``

    @property
    def least_w(self) -> float:
        return self.idle_w + self.bound_w + self.other_w


def reach_of(snapshot: Snapshot, order: PowerOrder) -> Reach:
    """Return how far orders can bring down what the scope of one draws, as the cluster is."""
    meeting = _Meeting(snapshot, [], {}, OrderTables.of_round(snapshot), order, resizes=False)
    idle_w, bound_w = meeting.least_w()
    return Reach(order.ratio * idle_w, order.ratio * bound_w, order.other_w)


class Obeying(Layer[Memory]):
    """A policy whose plans keep within orders; its memory is the policy's own."""

    def decide(self, snapshot: Snapshot, memory: Memory) -> tuple[Plan, Memory]:
        tables = OrderTables.of_round(snapshot) if any(order.bears for order in snapshot.orders) else None
        shown, entry = _without_orders(snapshot), entry_of(self.name)
        resizes = entry is not None and entry.resizes
        if tables is not None and resizes:
            shown = widths.without_growth(shown, tables)
        plan, following = self.inner.decide(shown, memory)
        return _within_orders(snapshot, plan, tables, resizes=resizes), following


def _without_orders(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot as policies see it: with no control value that an order set, and no measurement under one.

    Under the cluster's own limit, gangs are measured as long as it slows none.
    """
    jobs, by_order = snapshot.jobs, ~np.isnan(snapshot.jobs.unordered_w)
    if by_order.any():
        own = {name: np.where(by_order, np.nan, getattr(jobs, name)) for name in ("power_limit_w", "clock_mhz")}
        snapshot = snapshot.again(jobs=type(jobs).of_columns({**vars(jobs), **own}))
    ordered = by_order.any() or any(order.limits and not order.stands for order in snapshot.orders)
    return snapshot.again(measures=snapshot.measures and not ordered)


def _within_orders(snapshot: Snapshot, plan: Plan, tables: OrderTables | None, *, resizes: bool) -> Plan:
    """Return a plan with what the orders of a snapshot require, and without what they had required before."""
    jobs = snapshot.jobs
    by_policy: Values = {(each.job_id, each.kind): each.value for each in plan.actions if isinstance(each, SetControl)}
    reasons = {(each.job_id, each.kind): each.reason for each in plan.actions if isinstance(each, SetControl)}
    for job in np.flatnonzero(~np.isnan(jobs.unordered_w)).tolist():
        for kind in ControlKind:
            if not math.isnan(jobs.control_value(kind).item(job)):
                by_policy.setdefault((jobs.ids[job], kind), None)
    values: Values = dict(by_policy)
    actions: list[Action] = [each for each in plan.actions if not isinstance(each, SetControl)]
    for order in snapshot.orders:
        if order.limits and tables is not None:
            actions = list(_Meeting(snapshot, actions, values, tables, order, resizes).met())
    again_s = min((order.changes_s for order in snapshot.orders), default=math.inf)
    for order in snapshot.orders:
        if math.isfinite(order.falls_w) and tables is not None:
            meeting = _Meeting(snapshot, actions, values, tables, order, resizes)
            actions, again_s = list(meeting.ahead()), min(again_s, meeting.again_s)
    if again_s < (plan.look_again_s or math.inf):
        plan = replace(plan, look_again_s=again_s)
    controls = tuple(_controls(snapshot, actions, values, by_policy, reasons))
    if any(isinstance(each, ProfileControls) for each in actions):
        touched = {each.job_id for each in (*actions, *controls) if isinstance(each, (SetControl, Preempt, Hold))}
        actions = [each for each in actions if not (isinstance(each, ProfileControls) and each.job_id in touched)]
    return replace(plan, actions=(*with_holds(snapshot, actions), *controls))


def _controls(
    snapshot: Snapshot,
    actions: Iterable[Action],
    values: Values,
    by_policy: Values,
    reasons: dict[tuple[JobId, ControlKind], Reason],
) -> Iterator[SetControl]:
    """Yield what has to be set for gangs that go on or start; a device that two share is its first one's to set."""
    jobs = snapshot.jobs
    starts = {each.job_id for each in actions if isinstance(each, Start) and not each.shares}
    stops = {each.job_id for each in actions if isinstance(each, Preempt)}
    for (job_id, kind), value in values.items():
        job = jobs.index[job_id]
        if job_id in stops or not (job_id in starts or jobs.phase.item(job) in (STARTING, RUNNING)):
            continue
        now = math.nan if job_id in starts else jobs.control_value(kind).item(job)
        if math.isnan(now) if value is None else abs(value - now) < NOISE:
            continue
        own = by_policy[job_id, kind] if (job_id, kind) in by_policy else None if math.isnan(now) else now
        reason = Reason.GRID_ORDER if value != own else reasons.get((job_id, kind), Reason.DEFAULT_CONTROL)
        yield set_to(job_id, kind, value, reason)


@dataclass
class _Meeting:
    """One order, applied to a plan; columns are (n_gangs,), tables (n_gangs, n_values)."""

    snapshot: Snapshot
    actions: list[Action]
    values: Values  #: What gangs are set to by the policy and by the orders before this one; changed here
    tables: OrderTables
    order: PowerOrder
    resizes: bool  #: Whether gangs may become narrower
    draw: Draw = field(init=False)
    flex: Floats = field(init=False)  #: How much slower each gang may become
    places: Ints = field(init=False)  #: The index of each gang's table
    speed: Floats = field(init=False)  #: As a share of that at the default
    power_w: Floats = field(init=False)
    top: Ints = field(init=False)  #: The index of the value that each gang would have without this order
    again_s: float = field(init=False, default=math.inf)  #: When a gang will save that is to stop then, UTC seconds

    def met(self) -> Iterator[Action]:
        """Yield the actions within the order, without controls, which are put into ``values``."""
        idle_w, released_w = self._look(self.snapshot.now_s)
        draw, known, rows = self.draw, self.tables.stacked, np.arange(self.draw.jobs.size)
        limits_w = np.array([self.order.limit_w, min(self.order.limit_w, self.order.soon_w)]) / self.order.ratio
        allowed, sizes = self._means(float(limits_w[1]) - idle_w - released_w, self.snapshot.now_s)
        goes_on = np.where(draw.starts, sizes > 0, sizes == draw.gpus)
        left_w = float(limits_w[0]) - idle_w - draw.stopping_w
        left_w -= float((self._idle_each_w() * (draw.gpus - np.where(goes_on, sizes, 0))).sum())
        left_w -= float(self.power_w[rows, self._at(present=True)][~goes_on & ~draw.starts].sum())
        less: list[int] = np.flatnonzero(sizes < draw.gpus).tolist()
        changed = {self.snapshot.jobs.ids[draw.jobs.item(row)]: sizes.item(row) for row in less}
        for row in (row for row in less if goes_on[row]):
            speed, self.power_w[row] = self._at_size(row, sizes.item(row))
            self.speed[row] = speed / speed[known.n_values[self.places[row]] - 1]
            draw.gpus[row] = sizes[row]
        self._set(allowed, goes_on, left_w)
        yield from self._changed(changed)

    def ahead(self) -> Iterator[Action]:
        """Yield the actions without what the next fall of the limit would stop, where it is better stopped now."""
        snapshot, now_s, stop_s = self.snapshot, self.snapshot.now_s, self.order.falls_s - STOPS_AHEAD_S
        idle_w, released_w = self._look(stop_s)
        draw, flex = self.draw, self.flex
        sizes = self._means(self.order.falls_w / self.order.ratio - idle_w - released_w, stop_s)[1]
        last_s, every_s = widths.saves_of(snapshot, draw.jobs)
        goes = (flex > 0) & (sizes < draw.gpus)
        due_s = last_s + every_s
        due_s = np.where(due_s > stop_s, snapshot.jobs.waiting_since_s[draw.jobs] + SHORTEST_S, due_s)
        last = (last_s + every_s > stop_s) & (due_s <= now_s)
        now = np.where(draw.starts, ~widths.pays(snapshot, draw.jobs, stop_s), last)
        later_s = np.maximum(due_s, now_s + CHECK_S)[goes & ~now & ~draw.starts & ~np.isnan(every_s)]
        self.again_s = float(later_s.min(initial=math.inf))
        rows: list[int] = np.flatnonzero(goes & now).tolist()
        yield from self._changed({snapshot.jobs.ids[draw.jobs.item(row)]: sizes.item(row) for row in rows})

    def least_w(self) -> tuple[float, float]:
        """Return what idle devices and gangs draw where nothing is allowed."""
        idle_w, released_w = self._look(self.snapshot.now_s)
        allowed, sizes = self._means(-math.inf, self.snapshot.now_s)
        stays, lowest_w = sizes > 0, np.where(allowed, self.power_w, np.inf).min(axis=1, initial=np.inf)
        freed_w = float((self._idle_each_w() * self.draw.gpus)[~stays].sum())
        return idle_w + released_w + freed_w, float(lowest_w[stays].sum())

    def _look(self, until_s: float) -> tuple[float, float]:
        """Look at the gangs that go on or start and do not end until then, as far as is known.

        Returns:
            What all other devices draw, watts: those that are free, and those that will be.
        """
        scope, jobs = in_zone(self.snapshot, self.order.zone), self.snapshot.jobs
        inside = within(scope, self.actions)
        draw = draw_of(scope, inside, self.tables)
        starts = [each for each in inside if isinstance(each, Start)]
        if until_s > self.snapshot.now_s:
            speed = partial(self.tables.default_speed, draw.jobs, draw.models)
            left_s = jobs.remaining_s[draw.jobs] * speed(jobs.min_gpus[draw.jobs]) / speed(draw.gpus)
            ends: Bools = (left_s > 0) & (self.snapshot.now_s + left_s <= until_s)
            rows: list[int] = draw.jobs[ends].tolist()
            ended = {jobs.ids[job] for job in rows}
            starts, draw = [each for each in starts if each.job_id not in ended], draw.of(~ends)
        self.draw, self.flex = draw, widths.flex_of(self.snapshot)[draw.jobs]
        speed, self.power_w = (each[:, 0] for each in self.tables.gangs(draw.jobs, draw.models, draw.gpus[:, None]))
        self.places, known = self.tables.places(draw.jobs, draw.models), self.tables.stacked
        highest = speed[np.arange(draw.jobs.size), known.n_values[self.places] - 1, None]
        self.speed = np.where(speed > 0, speed, 0.0) / highest
        self.top = self._at()
        return Idle(scope, starts).draw_w(), self._released_w(scope)

    def _idle_each_w(self) -> Floats:
        """Return what a device of each gang draws once it is free: (n_gangs,)."""
        idle_w, models = self.snapshot.idle_w, self.draw.models
        return idle_w[models] if idle_w.size else np.zeros(models.size)

    def _at_size(self, row: int, gpus: int) -> tuple[Floats, Floats]:
        """Return speed and power of a gang at another size: (n_values,) each."""
        job, model = self.draw.jobs[row : row + 1], self.draw.models[row : row + 1]
        speed, power_w = self.tables.gangs(job, model, np.array([[gpus]]))
        return speed[0, 0], power_w[0, 0]

    def _released_w(self, scope: Snapshot) -> float:
        """Return what the devices of gangs that stop already, or by the policy's plan, draw once they are free."""
        nodes, draw, n_models = scope.nodes, self.draw, len(scope.gpu_models)
        if not scope.idle_w.size:
            return 0.0
        going = np.bincount(draw.models[~draw.starts], draw.gpus[~draw.starts], n_models)
        held = np.bincount(nodes.gpu_model, nodes.gpus - nodes.free_gpus, n_models)
        return float((np.maximum(held - going, 0) * scope.idle_w).sum())

    def _at(self, *, present: bool = False) -> Ints:
        """Return the index of the value that each gang would have without the order, or that it has now."""
        draw, jobs, known = self.draw, self.snapshot.jobs, self.tables.stacked
        at: list[int] = (known.n_values[self.places] - 1).tolist()
        of: list[int] = self.places.tolist()
        for row, place in enumerate(of):
            kind = known.kinds[place]
            if kind is None:
                continue
            job = int(draw.jobs[row])
            value = None if draw.starts[row] else jobs.control_value(kind).item(job)
            if not present:
                value = self.values.get((jobs.ids[job], kind), value)
            if value is not None and not math.isnan(value):
                at[row] = max(int(np.searchsorted(known.values[place, : at[row] + 1], value + 1e-6)) - 1, 0)
        return np.array(at, dtype=np.int64)

    def _means(self, left_w: float, at_s: float) -> tuple[Bools, Ints]:
        """Return the values that gangs may have, and their sizes: 0 for those that stop or do not start.

        Args:
            left_w: What gangs may draw once all that stops is gone.
            at_s: When that is, UTC seconds.
        """
        snapshot, draw, flex = self.snapshot, self.draw, self.flex
        jobs, rows = snapshot.jobs, np.arange(draw.jobs.size)
        columns: Ints = np.arange(self.speed.shape[1], dtype=np.int64)
        below: Bools = (columns <= self.top[:, None]) & (self.speed > 0)
        allowed: Bools = below & (self.speed >= 1 - flex[:, None] - 1e-9) & (flex > 0)[:, None]
        allowed[rows, self.top] = True
        each_w, sizes = self._idle_each_w(), draw.gpus.copy()
        stoppable, runs = jobs.preemptible[draw.jobs], jobs.phase[draw.jobs] == RUNNING
        held: list[int] = draw.jobs.tolist()
        ids = [jobs.ids[job] for job in held]
        since_s = np.where(draw.starts, np.inf, jobs.waiting_since_s[draw.jobs])
        unsaved = np.where(draw.starts, 0.0, widths.unsaved_s(snapshot, draw.jobs, at_s))
        by: Any = (ids, -since_s, unsaved, jobs.priority[draw.jobs], -flex)
        first: Ints = np.lexsort(by)

        def at_least_w(row: int, gpus: int) -> float:
            drawn_w = self._at_size(row, gpus)[1][allowed[row]].min() if gpus else 0.0
            return float(drawn_w) + each_w.item(row) * (draw.gpus.item(row) - gpus)

        def at_most(values: Bools, which: Bools) -> None:
            nonlocal over_w
            allowed[which] = values[which]
            lowest_w[:] = np.where(allowed, self.power_w, np.inf).min(axis=1)
            less: list[int] = np.flatnonzero(sizes < draw.gpus).tolist()
            for row in less:
                lowest_w[row] = at_least_w(row, sizes.item(row))
            over_w = float(lowest_w.sum()) - left_w

        def reduce(which: Bools, *, narrows: bool) -> None:
            nonlocal over_w
            turns: list[int] = first[which[first]].tolist()
            for row in turns:
                for gpus in widths.narrower(snapshot, held[row], draw.gpus.item(row)) if narrows else [0]:
                    if over_w <= 0:
                        return
                    less_w = at_least_w(row, gpus) - lowest_w.item(row)
                    if not narrows or less_w < 0:
                        sizes[row], over_w = gpus, over_w + less_w
                        lowest_w[row] += less_w

        lowest_w, over_w, soft = np.zeros(rows.size), 0.0, flex > 0
        at_most(allowed, soft)
        reduce(soft & draw.starts & self.resizes, narrows=True)
        reduce(soft & draw.starts, narrows=False)
        reduce(soft & stoppable & runs & self.resizes, narrows=True)
        reduce(soft & stoppable & ~draw.starts, narrows=False)
        for which in (soft, ~soft):
            if over_w > 0:
                at_most(below, which)
        reduce(~soft & draw.starts, narrows=False)
        reduce(~soft & stoppable & ~draw.starts, narrows=False)
        return allowed, sizes

    def _set(self, allowed: Bools, goes_on: Bools, left_w: float) -> None:
        """Choose values of gangs, within those allowed: of flexible ones first, then of the others."""
        at, rows, flex = self.top.copy(), np.arange(self.top.size), self.flex
        for which in (goes_on & (flex > 0), goes_on & (flex == 0)):
            others_w = float(self.power_w[rows, at][goes_on & ~which].sum())
            if which.any():
                speed = np.where(allowed, self.speed, 0.0)[which]
                at[which] = allocate_controls(speed, self.power_w[which], left_w - others_w)
        drawn_w = self.power_w[rows, at]
        spare_w = left_w - float(drawn_w[goes_on].sum())
        known, ids = self.tables.stacked, self.snapshot.jobs.ids
        changed = np.flatnonzero(goes_on & (at != self.top))
        hard = bool((flex[changed] == 0).any())
        for row in changed.tolist():
            place, value = int(self.places[row]), known.values[self.places[row], at[row]].item()
            kind = known.kinds[place]
            if kind is None:
                continue
            above = known.values[place, at[row] + 1].item()
            its_w = 0.0 if hard and flex.item(row) > 0 else spare_w  # none for flexible gangs while class 0 is touched
            if kind is ControlKind.POWER_LIMIT and its_w > 0:  # a limit that is x W higher lets a GPU draw x W more
                more_w = math.floor(min(its_w / self.draw.gpus.item(row), above - value))
                value, spare_w = value + more_w, spare_w - more_w * self.draw.gpus.item(row)
            self.values[ids[int(self.draw.jobs[row])], kind] = value

    def _changed(self, sizes: dict[JobId, int]) -> Iterator[Action]:
        """Yield the actions with gangs stopped, narrower or not started, by the size that each is to have."""
        jobs, starts = self.snapshot.jobs, set[JobId]()
        for each in self.actions:
            if isinstance(each, Start) and each.job_id in sizes:
                starts.add(each.job_id)
                gpus = sizes[each.job_id]
                wait = Hold(each.job_id, Reason.GRID_ORDER, None if self.order.stands else self.order.ends_s)
                yield widths.narrowed(self.snapshot, each, gpus) if gpus else wait
            else:
                yield each
        for job_id in sorted(set(sizes) - starts):
            gpus = sizes[job_id]
            again = gpus or resumed_size(jobs, jobs.index[job_id])
            yield Preempt(job_id, Reason.SCALE_IN if gpus else Reason.GRID_ORDER, again)
