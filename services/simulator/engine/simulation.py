"""The simulation itself: events move the cluster, rounds decide, plans are carried out.

At each instant all events are processed, then at most one round is run: an active one when the clock says so, otherwise
a passive one if a waiting job might start. A passive round is skipped only if it could change nothing: no job waits, or
fewer devices are free than the smallest waiting gang needs. In that case, a policy that never preempts has no active
round either. One more round follows when a plan asks for it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from services.core.cycle.levels import sums
from services.core.cycle.plan import Control, Plan, Preempt, Start
from services.core.cycle.policy import PlacesGangs, Policy, PowerLimited
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.arrays import Bools
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.domain.ids import JobId
from services.core.domain.placement import Placement
from services.core.domain.reasons import Reason
from services.core.domain.units import J_PER_KWH
from services.core.parallel.iteration import Network
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import build_policy, entry_of
from services.simulator.engine import behaviour, events
from services.simulator.engine.beginning import Beginning
from services.simulator.engine.cluster import Nodes
from services.simulator.engine.controls import Measurements
from services.simulator.engine.gangs import Gangs
from services.simulator.engine.gates import Turns
from services.simulator.engine.grid import Grid
from services.simulator.engine.live import FloatRow, IntRow, LiveJobs
from services.simulator.engine.options import EngineOptions, Foreseeing
from services.simulator.engine.orders import Orders
from services.simulator.engine.recorder import AboveLimit, Bill, Recorder, TenantTime
from services.simulator.engine.result import SimulationResult, result_of
from services.simulator.engine.slices import Slices
from services.simulator.workload import CarbonTrace, ClusterSpec, Workload

STALLED_S = 60 * 86_400.0
NOBODY = frozenset[JobId]()

Progress = Callable[[int, int], None]
"""Called now and then with the numbers of ended jobs and of all jobs; with the latter for both when all is done."""


def simulate(
    policy: str,
    workload: Workload,
    cluster: ClusterSpec,
    trace: CarbonTrace,
    *,
    parameters: Mapping[str, object] | None = None,
    options: EngineOptions | None = None,
    predictor: Foreseeing | None = None,
    progress: Progress | None = None,
    beginning: Beginning | None = None,
    elsewhere: Sequence[CarbonTrace] = (),
    until_started: str | None = None,
) -> SimulationResult:
    """Run a workload on a cluster under a policy, and return the result.

    ``predictor`` tells policies how long jobs will take; None: the workload does. With a ``beginning`` the run
    continues from a cluster at work, and reports progress at every active round. ``elsewhere`` are the grids of the
    zones that the cluster names, but for that of ``trace``, which also has the nodes that name none. The run is over
    when the job ``until_started`` has started.

    Raises:
        DomainError: There is a predictor, but no job of the workload recurs; or the cluster names a zone without grid.
        PolicyConfigError: The policy does not exist, or its parameters are invalid.
        PlanError: The policy broke an invariant of the cluster: a bug in it.
    """
    built = build_policy(policy, parameters or {})
    simulation = Simulation(
        built, workload, cluster, trace, options or EngineOptions(), predictor, beginning, elsewhere
    )
    row = None if until_started is None else workload.ids.index(until_started)
    return simulation.run(dict(parameters or {}), progress, row)


class Simulation:
    """One run: its clock, events, cluster and jobs."""

    def __init__(
        self,
        policy: Policy[Any],
        workload: Workload,
        cluster: ClusterSpec,
        trace: CarbonTrace,
        options: EngineOptions,
        predictor: Foreseeing | None = None,
        beginning: Beginning | None = None,
        elsewhere: Sequence[CarbonTrace] = (),
    ) -> None:
        self.policy, self._beginning = policy, beginning
        entry = entry_of(policy.name)
        self._preempts = entry is None or entry.preempts or bool(options.tenant_guarantees)
        self._replans = entry is not None and entry.replans
        self._tunes = behaviour.who_tunes(len(workload), options) if entry is not None and entry.tunes_batch else None
        self._limited = policy if isinstance(policy, PowerLimited) else None
        self._above = AboveLimit()
        self._orders = Orders(options.orders) if options.orders else None
        self._limits = bool(options.orders or options.windows)  # may want stops even where nothing waits
        self.options = options
        self.workload = workload.rigid() if options.rigid else workload
        if predictor is not None:
            self.workload = replace(self.workload, predicted_work_s=None)
        topology = options.topology
        has_levels = topology.levels or options.within or workload.within or workload.near
        self.nodes = Nodes(cluster, options.host_idle_w, topology if has_levels else None)
        self._devices = cluster.devices
        of_zone = {"": trace} | {each.zone: each for each in (trace, *elsewhere)}
        if unknown := [zone for zone in self.nodes.zones if zone not in of_zone]:
            raise DomainError(f"no grid of zone {unknown[0]} is known")
        traces = [of_zone[zone] for zone in self.nodes.zones]
        self.grids = [Grid(each, options.history_s, options.horizon_s) for each in traces]
        self._prices = traces[0].prices
        self._bill = None if self._prices is None else Bill(self._prices)
        models = self.nodes.models
        eligible = behaviour.eligible_models(self.workload, models)
        if self.workload.zone is not None and len(self.grids) > 1:
            zones, at_home = [traces[at].zone for at in self.nodes.zone_of], np.array(self.workload.zone)
            eligible &= (at_home[:, None] == "") | (at_home[:, None] == np.array(zones)[None, :])
        inter = options.inter_gbps * 1e9 / 8
        within = topology.bytes_per_s(self.nodes.levels, inter)
        self.network = Network(inter, options.intra_gbytes * 1e9, cluster.widest_node_gpus, within)
        if options.within:
            level = self.nodes.levels.index(options.within)
            wide = zip(self.workload.ids, self.workload.max_gpus.tolist(), strict=True)
            self.workload = replace(self.workload, within={each: level for each, most in wide if most > 1})
        tuning, shown_curves = None, dict[str, Any]()
        if self._tunes is not None:
            tuning = behaviour.tuned_curves(self.workload, models, self._tunes, cluster.gpus)
            shown_curves = {"goodput_curves": tuning.goodput, "goodput_batches": tuning.batches}
        self.live = LiveJobs(
            self.workload, eligible, behaviour.predicted_s(self.workload, models, self.network), tuning
        )
        placement = policy.placement if isinstance(policy, PlacesGangs) else options.placement
        self._foresight = None if predictor is None else predictor(self.workload)
        graphs = {at: kind.graph for at, kind in enumerate(self.workload.profiles) if kind.graph is not None}
        kinds = zip(map(JobId, self.workload.ids), self.workload.profile.tolist(), strict=True) if graphs else ()
        self.recorder = Recorder(self.workload, models)
        self.memory: Any = policy.initial()
        self.rounds = self.active_rounds = 0
        self._tables = behaviour.GangTables(self.workload, cluster, models, options)
        self._measurements = Measurements(self.workload, models, known=options.settings_known)
        self._events = events.Events()
        self._version = 0
        self._shown = Snapshot(
            version=0,
            now_s=math.nan,
            trigger=Trigger.ACTIVE,
            gpu_models=models,
            jobs=self.live.table(),
            nodes=self.nodes.table(),
            outlooks=(),
            tenant_gpu_quota=dict(options.tenant_gpu_quota),
            tenant_guarantees=options.tenant_guarantees,
            tenant_weights=options.tenant_weights or {},
            speed_curves=behaviour.speed_curves(self.workload, models, cluster.gpus),
            settable=(frozenset(ControlKind),) * len(models),
            idle_w=self.nodes.idle_w_of,
            limit_range_w=np.array([[board.lowest_limit_w, board.peak_w] for board in self.nodes.boards]),
            placement=options.placement,
            graphs={job_id: graphs[kind] for job_id, kind in kinds if kind in graphs},
            network=self.network,
            levels=self.nodes.levels,
            within={JobId(each): level for each, level in self.workload.within.items()},
            near={JobId(each): level for each, level in self.workload.near.items()},
            transfer=options.transfer,
            length_spreads={} if self._foresight is None else self._foresight.spreads,
            min_run_s=options.min_run_s,
            save_wait_s=options.round_interval_s if options.save_wait_s is None else options.save_wait_s,
            measures=True,
            reasons=False,
            **shown_curves,
        )
        self.gangs = Gangs(
            self.workload,
            self.nodes,
            self.live,
            behaviour.Behaviours(
                self.workload,
                models,
                options,
                self.network,
                placement,
                dict(zip(self.nodes.ids, self.nodes.domains.tolist(), strict=True)),
            ),
            self._measurements,
            self.recorder,
            self._events,
            options,
            foresight=self._foresight,
            tunes=self._tunes,
        )
        first_s = float(self.workload.submitted_s[0]) if len(workload) else 0.0
        self.gangs.now_s = self._began_s = first_s if beginning is None else beginning.now_s
        self.gangs.integrals = [grid.integral(self._began_s) for grid in self.grids]
        self.gangs.intensities = self._intensities
        self._zone_sums = np.zeros((len(self.grids), 2))
        self._zone_gpus = np.bincount(self.nodes.zone, self.nodes.gpus, len(self.grids))
        self._look_again_s, self._last_passive_s, self._peak_w = math.inf, -math.inf, 0.0
        self._sums = [0.0, 0.0, 0.0, 0.0]
        self._next_active_s = self._began_s
        self._idle_since: dict[int, float] = {}
        self._random = np.random.default_rng(options.seed)
        of_jobs = self.workload, eligible, self.live, self.recorder
        self._slices = Slices(*of_jobs, cluster, self.nodes, self._events, options, self.gangs)
        fits = self._fits(eligible, () if beginning is None else beginning.held)
        self._arrivals: list[int] = np.flatnonzero(fits).tolist()
        self._unrunnable = len(workload) - len(self._arrivals)
        several = len(set(workload.tenants)) > 1
        self._tenants = TenantTime(workload, options.tenant_weights or {}, cluster.gpus) if several else None
        self._turns = None if workload.gates is None else Turns(self.workload, self._arrivals)

    def _fits(self, eligible: Bools, held: Collection[int]) -> Bools:
        """Return which jobs may ever run on nodes that take work, or already do: (n_jobs,)."""
        workload, nodes = self.workload, self.nodes.table()
        takes = np.where(nodes.schedulable, nodes.gpus, 0)
        its = [np.where(nodes.gpu_model == at, takes, 0) for at in range(eligible.shape[1])]
        room = np.tile([int(each.sum()) for each in its], (len(workload), 1))
        for level in set(workload.within.values()):
            rows = [at for at, each in enumerate(workload.ids) if workload.within.get(each) == level]
            room[rows] = [int(sums(nodes.domains[:, level], each).max()) if level >= 0 else 0 for each in its]
        room[list(held)] = nodes.gpus.sum()
        fits: Bools = np.any(eligible & (room >= workload.min_gpus[:, None]), axis=1)
        for row in np.flatnonzero(self._slices.sevenths).tolist():
            fits[row] = self._slices.exists_for(row)
        quota = self.options.tenant_gpu_quota
        for row in [row for row, each in enumerate(workload.tenants) if each in quota] if quota else ():
            fits[row] &= row in held or workload.min_gpus.item(row) <= quota[workload.tenants[row]]
        return fits

    def _intensities(self) -> list[float]:
        return [grid.at(self.gangs.now_s) for grid in self.grids]

    @property
    def _alive(self) -> int:
        return self.live.count + self._slices.count

    @property
    def _held_w(self) -> float:
        return self.gangs.power_w + self._slices.held_w

    @property
    def _idle_w(self) -> float:
        return self.nodes.idle_w + self._slices.idle_w

    def run(
        self, parameters: dict[str, Any], progress: Progress | None = None, until_started: int | None = None
    ) -> SimulationResult:
        """Run until the last job has ended, or ``until_s``, or a job (its row) has started."""
        submitted: list[float] = self.workload.submitted_s[self._arrivals].tolist()
        until_s = math.inf if self.options.until_s is None else self.options.until_s
        last_start_s, arrived, reported = self.gangs.now_s, 0, 0
        self._next_active_s, report_rounds = self.gangs.now_s, 48
        if self._beginning is not None:
            submitted = self._take_over(self._beginning)
            self._next_active_s, report_rounds = self._beginning.next_active_s, 1
        for node in range(len(self.nodes.ids)) if self.options.node_mtbf_s is not None else ():
            self._plan_failure(node)
        self._idle(range(len(self.nodes.ids)))
        while self._alive or arrived < len(submitted):
            time_s = min(self._next_active_s, self._events.next_s)
            if arrived < len(submitted) and submitted[arrived] < time_s:
                time_s = submitted[arrived]
            time_s = min(time_s, self._look_again_s)
            if time_s > until_s:
                break
            self._advance(time_s)
            changed = self._take_events()
            if time_s >= self._look_again_s:
                self._look_again_s = math.inf
                changed = True
            while arrived < len(submitted) and submitted[arrived] <= time_s:
                row = self._arrivals[arrived]
                self._show((row,) if self._turns is None else self._turns.arrives(row))
                arrived += 1
                changed = True
            if time_s >= self._next_active_s:
                self._next_active_s += self.options.round_interval_s
                self._active()
                if self._held_w:
                    last_start_s = time_s
                elif self._alive and time_s - last_start_s > STALLED_S and arrived == len(submitted):
                    break
                if progress is not None and self.active_rounds >= reported:
                    reported = self.active_rounds + report_rounds
                    progress(self.recorder.completed, len(self.workload))
            elif self.gangs.learned or (changed and (self._replans or self._limits or self._may_start())):
                self._passive()
            if until_started is not None and self.recorder.has_started(until_started):
                return self._result(parameters)
        if math.isfinite(until_s) and until_s > self.gangs.now_s:
            self._advance(until_s)
        if progress is not None:
            progress(len(self.workload), len(self.workload))
        return self._result(parameters)

    def _show(self, rows: Iterable[int]) -> None:
        for row in rows:
            if self._slices.asks(row):
                self._slices.arrives(row, self._done_before(row))
            else:
                self.live.waits(self._arrive(row))

    def _done_before(self, row: int) -> float:
        """Return how much of a job's work was done before the run began."""
        return 0.0 if self._beginning is None else float(self._beginning.progress[row] * self.workload.work_s[row])

    def _take_over(self, beginning: Beginning) -> list[float]:
        """Put the gangs that are already running on their devices; return when the other jobs arrive, UTC seconds."""
        taken: set[Placement] = set()
        for row in [row for row in self._arrivals if row in beginning.held]:
            if self._slices.asks(row):
                self._slices.goes_on(row, beginning.held[row], self._done_before(row))
                continue
            self._arrive(row)
            placement = beginning.held[row]
            start = Start(self.recorder.ids[row], placement, Reason.IN_ORDER, shares=placement in taken)
            taken.add(placement)
            self.gangs.start(start, since_s=float(beginning.since_s[row]))
        self._arrivals = [row for row in self._arrivals if row not in beginning.held]
        return np.maximum(self.workload.submitted_s[self._arrivals], beginning.now_s).tolist()

    def _arrive(self, row: int) -> int:
        slot = self.live.arrive(row)
        if self._beginning is not None:
            self.live.resume(slot, row, self._beginning)
        if self._foresight is not None:
            share = self._foresight.at_arrival(row, self.gangs.now_s)
            self.live.floats[FloatRow.PREDICTED : FloatRow.REMAINING + 1, slot] *= share
        return slot

    def snapshot(self, trigger: Trigger) -> Snapshot:
        """Return what the policy sees now; its columns are views that the next event changes."""
        self._version += 1
        now_s = self.gangs.now_s
        return self._shown.again(
            version=self._version,
            now_s=now_s,
            trigger=trigger,
            jobs=self.live.table(),
            nodes=self.nodes.table(),
            outlooks=tuple(known for grid in self.grids for known in grid.outlooks(now_s)),
            control_curves=self._measurements.curves,
            gangs=self._tables.shown(self._measurements.curves) if self._replans else (),
            next_active_s=self._next_active_s,
            measured_w=self.gangs.power_w + self.nodes.idle_w if self.options.metered else math.nan,
            services_gpus=len(self._slices.gpus),
            services_w=self._slices.held_w + self._slices.idle_w,
            slice_units=self._slices.units(),
            slice_jobs=self._slices.jobs(),
            shared=tuple(pair for pair in self.gangs.beside.items() if pair[0] < pair[1]) if self.gangs.beside else (),
            measuring=self._measuring(),
            saves=self.gangs.saves(),
            windows=tuple(window for window in self.options.windows if window.end_s > now_s),
        )

    def _measuring(self) -> frozenset[JobId]:
        rows = self._measurements.rows()
        return frozenset(map(self.recorder.ids.__getitem__, rows)) if rows else NOBODY

    def _active(self) -> None:
        live = self.live
        live.refresh(self.gangs.now_s, self.gangs.integrals, self.options.min_profile_s)
        self.recorder.sample(
            self.gangs.now_s,
            self._intensities()[0]
            if len(self.grids) == 1
            else float(self._zone_gpus @ self._intensities() / self._zone_gpus.sum()),
            self._sums,
            live,
            self._slices.holding(),
            self._slices.queued,
            shared_gpus=len(self.gangs.beside) // 2,
        )
        if self._alive and (self._preempts or self._may_start()):
            self.active_rounds += 1
            self._round(Trigger.ACTIVE)

    def _may_start(self) -> bool:
        return self._slices.may_start() or self.live.may_start(self.nodes.free_total)

    def _passive(self) -> None:
        due_s = self._last_passive_s + self.options.passive_interval_s
        if due_s > self.gangs.now_s:
            if math.isfinite(due_s):
                self._events.push(due_s, events.WAKE, 0)
            return
        self._last_passive_s = self.gangs.now_s
        self._round(Trigger.PASSIVE)

    def _round(self, trigger: Trigger) -> None:
        self.rounds += 1
        self.gangs.learned = False
        self._slices.show()
        snapshot, again_s = self.snapshot(trigger), math.inf
        if self._orders is not None:
            drawn_w = self.gangs.power_w + self.nodes.idle_w
            snapshot, again_s = self._orders.shown(snapshot, drawn_w, snapshot.services_w)
        result = run_under_orders(self.policy, snapshot, self.memory)
        self.memory = result.memory
        self._look_again_s = min(again_s, math.inf if result.plan.look_again_s is None else result.plan.look_again_s)
        self._carry_out(result.plan)
        if self._tenants is not None:
            self._tenants.sample(self.gangs.now_s, self.live)
        self._slices.hide()
        if self._limited is not None:
            power_w = self.gangs.power_w + self.nodes.idle_w
            if not self._above.held(power_w, self._limited.power_limit_w(self.snapshot(trigger))):
                self._above.stated(power_w, self._limited.power_error_w(self.snapshot(trigger)))

    def _carry_out(self, plan: Plan) -> None:
        if plan.hurries:
            self.gangs.hurry()
        for action in plan.actions:
            if type(action) is Start:
                if self._slices.is_shown(action.job_id):
                    self._slices.start(action)
                else:
                    self.gangs.start(action)
            elif type(action) is Preempt:
                self.gangs.preempt(self.live.slot[action.job_id], action.wait_s)
            elif isinstance(action, Control):
                self.gangs.set(action)
        for each in plan.nodes:
            node = self.nodes.where[each.node_id]
            if each.on:
                self.nodes.wake(node, self.gangs.now_s, self.options.boot_s)
            else:
                self.nodes.switch_off(node)

    def _idle(self, nodes: Iterable[int]) -> None:
        """Schedule the power-down of nodes that have just become unused."""
        if self.options.power_down_after_s is not None:
            for node in nodes:
                self._idle_since[node] = self.gangs.now_s
                self._events.push(self.gangs.now_s + self.options.power_down_after_s, events.POWER_DOWN, node)

    def _take_events(self) -> bool:
        """Process every event up to now; return whether any of them may let a job start."""
        live, gangs, now_s = self.live, self.gangs, self.gangs.now_s
        changed = False
        while (event := self._events.pop(now_s)) is not None:
            _, kind, _, subject, generation = event
            if kind in (events.RELEASE, events.COMPLETE, events.STAGE):
                slot = live.slot.get(self.recorder.ids[subject])
                if slot is None:
                    changed = self._ends_on_slice(subject, kind, generation) or changed
                    continue
                if live.ints.item(IntRow.GENERATION, slot) != generation:
                    continue
                if kind == events.STAGE:
                    gangs.retime(slot, stage_begins=True)
                    continue
                self._idle((gangs.release if kind == events.RELEASE else gangs.complete)(slot))
                if kind == events.COMPLETE and self._turns is not None:
                    self._show(self._turns.ended(subject))
            elif kind == events.STEP:
                slot = live.slot.get(self.recorder.ids[subject])
                if slot is not None:
                    gangs.step(slot, generation)
                continue
            elif kind == events.SAVE:
                if gangs.leaving.get(subject) == event[0]:
                    gangs.preempt(live.slot[self.recorder.ids[subject]])
            elif kind == events.FAIL:
                self._fail(subject)
            elif kind == events.RECOVER:
                self.nodes.recover(subject)
                self._slices.follow(subject)
                self._plan_failure(subject)
            elif kind == events.POWER_DOWN:
                since_s = self._idle_since.get(subject, math.inf)
                if now_s - since_s >= (self.options.power_down_after_s or 0.0) - 1e-6:
                    self.nodes.switch_off(subject)
                continue
            changed = True
        return changed

    def _ends_on_slice(self, row: int, kind: int, generation: int) -> bool:
        """Process the event of a job that is not live, as jobs on slices are not; return whether one may now start."""
        if not self._slices.ends(row, kind, generation):
            return False
        if kind == events.COMPLETE and self._turns is not None:
            self._show(self._turns.ended(row))
        return True

    def _plan_failure(self, node: int) -> None:
        mtbf_s = self.options.node_mtbf_s
        assert mtbf_s is not None
        self._events.push(self.gangs.now_s + float(self._random.exponential(mtbf_s)), events.FAIL, node)

    def _fail(self, node: int) -> None:
        """Fail a node: its gangs stop, fall back to their last checkpoint and wait again once leases have expired."""
        live = self.live
        node_id = self.nodes.ids[node]
        self.nodes.fail(node)
        self._slices.fail(node)
        for slot in range(live.count):
            placement = live.placements[slot]
            if placement is not None and any(share.node_id == node_id for share in placement.shares):
                self.recorder.failures[live.ints.item(IntRow.ROW, slot)] += 1
                self.gangs.stop(slot, self.options.lease_s, keeps_work=False)
        repair_s = self.options.lease_s + float(self._random.exponential(self.options.node_repair_s))
        self._events.push(self.gangs.now_s + repair_s, events.RECOVER, node)

    def _advance(self, time_s: float) -> None:
        """Advance the clock; power is constant in between, so energy and carbon are exact."""
        gangs = self.gangs
        seconds = time_s - gangs.now_s
        if seconds <= 0:
            return
        integrals = [grid.integral(time_s) for grid in self.grids]
        idle_w = self._idle_w
        power_w, sums = self._held_w + idle_w, self._sums
        sums[0] += power_w * seconds
        sums[2] += idle_w * seconds
        if len(integrals) == 1:
            grid = (integrals[0] - gangs.integrals[0]) / J_PER_KWH
            sums[1] += power_w * grid
            sums[3] += idle_w * grid
        else:
            zone_idle_w = np.array(self.nodes.zone_idle_w)
            zone_w, grids = np.array(gangs.zone_w) + zone_idle_w, np.subtract(integrals, gangs.integrals) / J_PER_KWH
            sums[1] += float(zone_w @ grids)
            sums[3] += float(zone_idle_w @ grids)
            self._zone_sums += np.stack((zone_w * seconds, zone_w * grids), axis=1)
        self._peak_w = max(self._peak_w, power_w)
        if self._bill is not None:
            self._bill.draw(gangs.now_s, time_s, power_w)
        if self._orders is not None:
            self._orders.draw(gangs.now_s, time_s, power_w)
        self._above.draw(gangs.power_w + self.nodes.idle_w, seconds)
        gangs.now_s, gangs.integrals = time_s, integrals

    def _result(self, parameters: dict[str, Any]) -> SimulationResult:
        for slot in range(self.live.count):
            if self.live.placements[slot] is not None:
                self.gangs.settle(slot)
        self._slices.settle()
        energy_j, carbon_g = np.add(self._sums[:2], self.gangs.transferred).tolist()
        predicted = self.workload.predicted_work_s if self._foresight is None else self._foresight.work_s
        traces, paid = [grid.trace for grid in self.grids], dict[str, Any]()
        if self._bill is not None and self._prices is not None:
            money, demand_money = self._bill.figures()
            paid = {"currency": self._prices.currency, "money": money, "demand_money": demand_money}
        return result_of(
            self.recorder.columns(self.workload.work_s if predicted is None else predicted),
            self.recorder.series(),
            {} if self._tenants is None else self._tenants.served(self.gangs.now_s),
            devices=self._devices,
            shared_s=self.gangs.shared_s,
            policy=self.policy.name,
            parameters=parameters,
            zone=",".join(trace.zone for trace in traces),
            signal=traces[0].signal.value,
            unrunnable=self._unrunnable,
            energy_kwh=energy_j / J_PER_KWH,
            carbon_kg=carbon_g / 1_000.0,
            idle_energy_kwh=self._sums[2] / J_PER_KWH,
            idle_carbon_kg=self._sums[3] / 1_000.0,
            peak_power_w=self._peak_w,
            lost_gpu_hours=self.gangs.lost_gpu_s / 3_600.0,
            rounds=self.rounds,
            active_rounds=self.active_rounds,
            beyond_trace_s=max(0.0, *(self.gangs.now_s - trace.curve.end_s for trace in traces)),
            **self._above.figures(self.gangs.now_s - self._began_s),
            slices=self._slices.figures(),
            orders=() if self._orders is None else self._orders.figures(self.gangs.now_s),
            zones=self._zones() if len(self.grids) > 1 else {},
            **paid,
        )

    def _zones(self) -> dict[str, dict[str, float]]:
        """Return what each zone's nodes used, and the checkpoints that moved there."""
        gpus, arrivals = self._zone_gpus.tolist(), self.gangs.arrivals
        return {
            grid.trace.zone: {
                "gpus": gpus[at],
                "energy_kwh": energy_j / J_PER_KWH,
                "carbon_kg": carbon_g / 1_000.0,
                "checkpoints": arrivals[at],
            }
            for at, (grid, (energy_j, carbon_g)) in enumerate(zip(self.grids, self._zone_sums.tolist(), strict=True))
        }
