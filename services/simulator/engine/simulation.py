"""The simulation itself: events move the cluster, rounds decide, plans are carried out.

Events are ordered by ``(time_s, kind, sequence)``. At each instant everything that happens is taken in, then at most
one round is held: an active one by the clock, else a passive one where a waiting job might start. A passive round is
left out only where it could change nothing: nobody waits, or fewer devices are free than the smallest waiting gang.
Then a policy that never preempts is not asked by the clock either. One more round is held when a plan asks for it.

Under a policy that lets jobs tune their batch size (``PolicyEntry.tunes_batch``), a job that can goes through stages of
its work, each with its own speed and power.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from services.core.cycle.plan import Plan, Preempt, ProfileSettings, Setting, Start
from services.core.cycle.policy import Policy
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import PREEMPTING, QUEUED, STARTING, Floats, Ints, Snapshot, Trigger
from services.core.domain.ids import JobId
from services.core.domain.settings import SettingKind
from services.core.domain.units import J_PER_KWH
from services.core.parallel.iteration import Network
from services.core.policies.registry import POLICIES, build_policy
from services.core.profiles.recurrence import Predictor
from services.simulator.engine.above import AboveLimit
from services.simulator.engine.behaviour import (
    FIXED_BATCH,
    Behaviours,
    GangTables,
    Run,
    eligible_models,
    goodput_curves,
    predicted_s,
    speed_curves,
)
from services.simulator.engine.cluster import Nodes
from services.simulator.engine.foresight import Foresight
from services.simulator.engine.grid import Grid
from services.simulator.engine.live import F, I, LiveJobs
from services.simulator.engine.options import EngineOptions
from services.simulator.engine.recorder import Recorder
from services.simulator.engine.result import SimulationResult, Totals, result_of
from services.simulator.engine.settings import Measurements
from services.simulator.engine.waiting import Waiting
from services.simulator.workload import CarbonTrace, ClusterSpec, Workload

RELEASE, COMPLETE, RECOVER, FAIL, POWER_DOWN, WAKE, STEP, STAGE = range(8)
SETTING_ROWS = {SettingKind.POWER_LIMIT: F.POWER_LIMIT, SettingKind.CLOCK: F.CLOCK}
STALLED_S = 60 * 86_400.0

Progress = Callable[[int, int], None]
"""Told now and then how many jobs of how many have ended."""


def simulate(
    policy: str,
    workload: Workload,
    cluster: ClusterSpec,
    trace: CarbonTrace,
    *,
    parameters: Mapping[str, object] | None = None,
    options: EngineOptions | None = None,
    predictor: Predictor | None = None,
    progress: Progress | None = None,
) -> SimulationResult:
    """Return what a policy makes of a workload on a cluster.

    ``predictor`` tells policies how long jobs will take; None: the workload does.

    Raises:
        DomainError: a predictor for a workload of which nothing recurs.
        PolicyConfigError: no such policy, or bad parameters.
        PlanError: the policy broke an invariant of the cluster: a bug in it.
    """
    built = build_policy(policy, parameters or {})
    simulation = Simulation(built, workload, cluster, trace, options or EngineOptions(), predictor)
    return simulation.run(dict(parameters or {}), progress)


class Simulation:
    """One run: its clock, events, cluster and jobs."""

    def __init__(
        self,
        policy: Policy[Any],
        workload: Workload,
        cluster: ClusterSpec,
        trace: CarbonTrace,
        options: EngineOptions,
        predictor: Predictor | None = None,
    ) -> None:
        self.policy = policy
        entry = POLICIES.get(policy.name)
        self._preempts = entry is None or entry.preempts
        self._replans = entry is not None and entry.replans
        waits_by = () if entry is None else entry.waits_by
        self._tunes = entry is not None and entry.tunes_batch
        self._limit_of: Callable[[Snapshot], float] | None = getattr(policy, "power_limit_w", None)
        self._error_of: Callable[[Snapshot], float] = getattr(policy, "power_error_w", lambda _: 0.0)
        self._above = AboveLimit()
        self.options = options
        self.workload = workload.rigid() if options.rigid else workload
        if predictor is not None:
            self.workload = replace(self.workload, predicted_work_s=None)
        self.nodes = Nodes(cluster, options.host_idle_w)
        self.grid = Grid(trace, options.history_s, options.horizon_s)
        models = self.nodes.models
        eligible = eligible_models(self.workload, models)
        self.network = Network(options.inter_gbps * 1e9 / 8, options.intra_gbytes * 1e9, max(self.nodes.gpus))
        self.live = LiveJobs(self.workload, eligible, predicted_s(self.workload, models, self.network))
        placement = getattr(getattr(policy, "config", None), "placement", options.placement)  # some place by themselves
        self.behaviours = Behaviours(self.workload, models, options, self.network, placement)
        self._foresight = None if predictor is None else Foresight(self.workload, predictor, options.retrain_s)
        graphs = {at: kind.graph for at, kind in enumerate(self.workload.profiles) if kind.graph is not None}
        kinds = zip(map(JobId, self.workload.ids), self.workload.profile.tolist(), strict=True) if graphs else ()
        self._graphs = {job_id: graphs[kind] for job_id, kind in kinds if kind in graphs}
        self.recorder = Recorder(self.workload, models)
        self.memory: Any = policy.initial()
        self.now_s = float(self.workload.submitted_s[0]) if len(workload) else 0.0
        self._began_s = self.now_s
        self.integral = self.grid.integral(self.now_s)
        self.rounds = self.active_rounds = 0
        self._curves = speed_curves(self.workload, models)
        self._gangs = GangTables(self.workload, cluster, options.host_per_job_w)
        self._measurements = Measurements(self.workload, models, known=options.settings_known)
        self._settable = (frozenset(SettingKind),) * len(models)
        self._learned = False
        self._goodputs = goodput_curves(self.workload, models) if self._tunes else None
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._sequence = 0
        self._version = 0
        self._waiting = Waiting(self.live, waits_by, policy_keeps=entry is not None and entry.keeps_queue)
        self._look_again_s = math.inf
        self._jobs_w = 0.0
        self._peak_w = 0.0
        self._sums = [0.0, 0.0, 0.0, 0.0]
        self._last_passive_s = -math.inf
        self._next_active_s = self.now_s
        self._idle_since: dict[int, float] = {}
        self._random = np.random.default_rng(options.seed)
        largest = [
            sum(g for g, m in zip(self.nodes.gpus, self.nodes.model, strict=True) if m == at)
            for at in range(len(models))
        ]
        fits = (eligible & (np.array(largest)[None, :] >= self.workload.min_gpus[:, None])).any(axis=1)
        self._arrivals: list[int] = np.flatnonzero(fits).tolist()
        self._unrunnable = len(workload) - len(self._arrivals)

    def run(self, parameters: dict[str, Any], progress: Progress | None = None) -> SimulationResult:
        """Run until the last job has ended, or ``until_s``."""
        submitted: list[float] = self.workload.submitted_s[self._arrivals].tolist()
        until_s = math.inf if self.options.until_s is None else self.options.until_s
        last_start_s, arrived, told = self.now_s, 0, 0
        self._next_active_s = self.now_s
        self._plan_failures()
        self._idle(range(len(self.nodes.ids)))
        while self.live.count or arrived < len(submitted):
            time_s = self._next_active_s
            if self._heap and self._heap[0][0] < time_s:
                time_s = self._heap[0][0]
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
                slot = self._arrive(self._arrivals[arrived])
                self._waiting.add(slot)
                arrived += 1
                changed = True
            if time_s >= self._next_active_s:
                self._next_active_s += self.options.round_interval_s
                self._active()
                if self._jobs_w:
                    last_start_s = time_s
                elif self.live.count and time_s - last_start_s > STALLED_S and arrived == len(submitted):
                    break
                if progress is not None and self.active_rounds >= told:
                    told = self.active_rounds + 48
                    progress(self.recorder.completed, len(self.workload))
            elif self._learned or (changed and (self._replans or self._may_start())):
                self._passive()
        if math.isfinite(until_s) and until_s > self.now_s:
            self._advance(until_s)
        return self._result(parameters)

    def _arrive(self, row: int) -> int:
        slot = self.live.arrive(row)
        if self._foresight is not None:
            share = self._foresight.at_arrival(row, self.now_s)
            self.live.floats[F.PREDICTED : F.REMAINING + 1, slot] *= share
        return slot

    def snapshot(self, trigger: Trigger) -> Snapshot:
        """Return what the policy sees now; its columns are views that the next event changes."""
        self._version += 1
        stops_nobody = trigger is Trigger.PASSIVE or not self._preempts
        snapshot = Snapshot(
            self._version,
            self.now_s,
            trigger,
            self.nodes.models,
            self.live.table(),
            self.nodes.table(),
            self.grid.outlook(self.now_s),
            {},
            self._curves,
            self._measurements.curves,
            self._settable,
            self._gangs.shown(self._measurements.curves) if self._replans else (),
            self.nodes.idle_w_of,
            self._next_active_s,
            self.options.placement,
            self._graphs,
            self.network,
            measured_w=self._jobs_w + self.nodes.idle_w if self.options.metered else math.nan,
            measures=True,
            measuring=frozenset(map(self.recorder.ids.__getitem__, self._measurements.rows())),
            reasons=False,
            contenders=self._waiting.contenders(self.nodes.free_total) if stops_nobody else None,
            newly_waiting=self._waiting.newly(),
        )
        return snapshot if self._goodputs is None else self._with_goodputs(snapshot, *self._goodputs)

    def _with_goodputs(self, snapshot: Snapshot, curves: Floats, first: Ints) -> Snapshot:
        jobs = snapshot.jobs
        begin, stages = first[jobs.speed_curve], np.diff(first)[jobs.speed_curve]
        stage = np.minimum((jobs.progress * stages).astype(np.int64), stages - 1)
        return replace(snapshot, jobs=replace(jobs, goodput_curve=begin + stage), goodput_curves=curves)

    def _active(self) -> None:
        live = self.live
        live.refresh(self.now_s, self.integral, self.options.min_profile_s)
        self._waiting.refreshed()
        self.recorder.sample(self.now_s, self.grid.at(self.now_s), self._sums, live)
        if live.count and (self._preempts or self._may_start()):
            self.active_rounds += 1
            self._round(Trigger.ACTIVE)

    def _may_start(self) -> bool:
        return self._waiting.may_start(self.nodes.free_total)

    def _passive(self) -> None:
        due_s = self._last_passive_s + self.options.passive_interval_s
        if due_s > self.now_s:
            if math.isfinite(due_s):
                self._push(due_s, WAKE, 0, 0)
            return
        self._last_passive_s = self.now_s
        self._round(Trigger.PASSIVE)

    def _round(self, trigger: Trigger) -> None:
        self.rounds += 1
        self._learned = False
        result = run_cycle(self.policy, self.snapshot(trigger), self.memory)
        self.memory = result.memory
        self._look_again_s = math.inf if result.plan.look_again_s is None else result.plan.look_again_s
        self._carry_out(result.plan)
        if self._limit_of is not None:
            power_w = self._jobs_w + self.nodes.idle_w
            if not self._above.held(power_w, self._limit_of(self.snapshot(trigger))):
                self._above.stated(power_w, self._error_of(self.snapshot(trigger)))

    def _carry_out(self, plan: Plan) -> None:
        for action in plan.actions:
            if type(action) is Start:
                self._start(action)
            elif type(action) is Preempt:
                self._preempt(self.live.slot[action.job_id])
            elif isinstance(action, Setting):
                self._set(action)
        for each in plan.nodes:
            node = self.nodes.where[each.node_id]
            if each.on:
                self.nodes.wake(node, self.now_s, self.options.boot_s)
            else:
                self.nodes.switch_off(node)

    def _set(self, action: Setting) -> None:
        slot, kind = self.live.slot[action.job_id], action.kind
        row = self.live.ints.item(I.ROW, slot)
        self._measurements.end(row, kind)
        if not isinstance(action, ProfileSettings):
            self._put(slot, kind, action.value)
            return
        profile = self.live.ints.item(I.CURVE, slot)
        line = self._measurements.begin(row, profile, self._model_of(slot), kind, action.window_s)
        if line is not None:
            self._push(max(self.now_s, self.live.floats.item(F.RUN_FROM, slot)), STEP, row, line)

    def _put(self, slot: int, kind: SettingKind, value: float | None) -> None:
        """Put a gang's devices to a value."""
        self.live.floats[SETTING_ROWS[kind], slot] = math.nan if value is None else value
        self._retime(slot)

    def _retime(self, slot: int, *, stage_begins: bool = False) -> None:
        """Settle what a gang did so far, and time it anew at its present setting and stage."""
        live, column = self.live, self.live.floats[:, slot]
        since_s, left_off_s = float(column[F.SINCE]), float(column[F.RUN_FROM])
        if self.now_s > left_off_s:
            column[F.KEPT] = self._kept(slot)
        self._settle(slot)
        column[F.SINCE] = since_s
        stage, stages = self._stage_of(slot, self._model_of(slot), begins=stage_begins)
        run = self._run_of(slot, stage)
        self._jobs_w += run.draw_w - float(column[F.DRAW])
        run_from = max(left_off_s, self.now_s)
        column[F.RUN_FROM : F.EFFICIENCY + 1] = (
            run_from, run.speed, run.draw_w, run.gpu_w, run.efficiency,
        )  # fmt: skip
        if live.ints[I.MEASURED, slot]:
            live.measured(slot)
        live.ints[I.GENERATION, slot] += 1
        self._foresee(slot, stage, stages)

    def _step(self, slot: int, line: int) -> None:
        """Take the next step of a measurement; at the end of a curve it is known, and policies are asked."""
        row = self.live.ints.item(I.ROW, slot)
        while (step := self._measurements.next(row, line)) is not None:
            self._put(slot, step.kind, step.value)
            if step.value is not None:
                self._push(self.now_s + step.window_s, STEP, row, line)
                return
            profile = self.live.ints.item(I.CURVE, slot)
            self._measurements.learn(profile, self._model_of(slot), step.kind)
            self._learned = True

    def _kept(self, slot: int) -> float:
        """Return the work a gang's last checkpoint holds; it writes one whenever it has run so long."""
        column = self.live.floats[:, slot]
        every = self.options.checkpoint_every_s
        at_s = math.floor(max(self.now_s - float(column[F.BEGAN]), 0.0) / every) * every
        since_change_s = at_s - float(column[F.RUN_FROM] - column[F.BEGAN])
        if since_change_s < 0:
            return float(column[F.KEPT])
        return float(column[F.SET_DONE]) + since_change_s * float(column[F.SPEED])

    def _start(self, start: Start) -> None:
        live, now_s = self.live, self.now_s
        slot = live.slot[start.job_id]
        placement = start.placement
        gpus = placement.gpus
        self._waiting.remove(slot)
        model, awake_at_s = self.nodes.take(placement, now_s, self.options.boot_s)
        ints = live.ints
        row = ints.item(I.ROW, slot)
        stage, stages = self._stage_of(slot, model)
        run = self.behaviours.run(ints.item(I.CURVE, slot), model, placement, stage=stage)
        run_from = awake_at_s + run.restart_s
        known = live.profiled.get(row, {}).get(gpus)
        column = live.floats[:, slot]
        column[F.SINCE] = column[F.ACCOUNTED] = now_s
        column[F.GRID] = self.integral
        column[F.RUN_FROM : F.KEPT + 1] = (
            run_from, run.speed, run.draw_w, run.gpu_w, run.efficiency, run_from, column[F.SET_DONE],
        )  # fmt: skip
        column[F.NOW] = math.nan if known is None else known
        ints[I.PHASE : I.MEASURED + 1, slot] = STARTING, gpus, known is not None
        live.placements[slot] = placement
        self._jobs_w += run.draw_w
        self._foresee(slot, stage, stages)
        self.recorder.started(row, now_s, gpus)
        if self.options.power_limit_w is not None:
            self._put(slot, SettingKind.POWER_LIMIT, self.options.power_limit_w)

    def _stage_of(self, slot: int, model: int, *, begins: bool = False) -> tuple[int, int]:
        """Return the stage a job is in on a GPU model, and how many there are; (FIXED_BATCH, 0) where nothing is tuned.

        ``begins``: that a stage begins at this moment, which rounding leaves a little before or after.
        """
        if not self._tunes:
            return FIXED_BATCH, 0
        stages = self.behaviours.stages(self.live.ints.item(I.CURVE, slot), model)
        share = float(self.live.floats[F.SET_DONE, slot] / self.live.floats[F.WORK, slot])
        return min(round(share * stages) if begins else int(share * stages), stages - 1), stages

    def _foresee(self, slot: int, stage: int, stages: int) -> None:
        """Note when the job, at its present speed, will end, or reach its next stage."""
        floats, ints = self.live.floats, self.live.ints
        last = stage + 1 >= stages
        upto = floats.item(F.WORK, slot) if last else floats.item(F.WORK, slot) * (stage + 1) / stages
        left = upto - floats.item(F.SET_DONE, slot)
        time_s = floats.item(F.RUN_FROM, slot) + left / floats.item(F.SPEED, slot)
        kind = COMPLETE if last else STAGE
        self._push(time_s, kind, ints.item(I.ROW, slot), ints.item(I.GENERATION, slot))

    def _preempt(self, slot: int) -> None:
        live = self.live
        checkpoint_s = self.workload.profiles[live.ints.item(I.CURVE, slot)].checkpoint_s
        held_s = min(checkpoint_s, self.options.grace_s)
        self._stop(slot, held_s, keeps_work=checkpoint_s <= self.options.grace_s)
        self.recorder.preemptions[live.ints.item(I.ROW, slot)] += 1

    def _run_of(self, slot: int, stage: int) -> Run:
        live = self.live
        placement = live.placements[slot]
        assert placement is not None
        rows = {kind: float(live.floats[row, slot]) for kind, row in SETTING_ROWS.items()}
        settings = tuple((kind, value) for kind, value in rows.items() if value == value)
        return self.behaviours.run(live.ints.item(I.CURVE, slot), self._model_of(slot), placement, settings, stage)

    def _model_of(self, slot: int) -> int:
        placement = self.live.placements[slot]
        assert placement is not None
        return self.nodes.model[self.nodes.where[placement.shares[0].node_id]]

    def _stop(self, slot: int, after_s: float, *, keeps_work: bool) -> None:
        """End a gang's work now, and its hold on its devices in a while."""
        live = self.live
        self._measurements.end(live.ints.item(I.ROW, slot))
        if live.ints.item(I.PHASE, slot) != PREEMPTING:
            if live.ints.item(I.MEASURED, slot) == 0:
                ran_s = self.now_s - live.floats.item(F.RUN_FROM, slot)
                if ran_s >= self.options.min_profile_s:
                    live.measured(slot)
            kept = math.inf if keeps_work else self._kept(slot)
            self._settle(slot)
            if kept < live.floats.item(F.SET_DONE, slot):
                live.floats[F.SET_DONE, slot] = kept
        live.floats[F.SPEED, slot] = 0.0
        self._waiting.stops(slot)
        live.ints[I.PHASE, slot] = PREEMPTING
        live.ints[I.GENERATION, slot] += 1
        row, generation = live.ints.item(I.ROW, slot), live.ints.item(I.GENERATION, slot)
        self._push(self.now_s + after_s, RELEASE, row, generation)

    def _settle(self, slot: int) -> None:
        spent = self.live.settle(slot, self.now_s, self.integral)
        self.recorder.spent(self.live.ints.item(I.ROW, slot), *spent)

    def _release(self, slot: int) -> None:
        live = self.live
        self._settle(slot)
        self._give_back(slot)
        live.floats[F.SPEED : F.GPU_DRAW + 1, slot] = 0.0
        live.floats[F.POWER_LIMIT : F.CLOCK + 1, slot] = math.nan
        live.ints[I.PHASE : I.MEASURED + 1, slot] = QUEUED, 0, 0
        live.placements[slot] = None
        self._waiting.comes_back(slot)

    def _complete(self, slot: int) -> None:
        self._settle(slot)
        self._measurements.end(self.live.ints.item(I.ROW, slot))
        row = self.live.ints.item(I.ROW, slot)
        self.recorder.ended(row, self.now_s)
        if self._foresight is not None:
            self._foresight.ended(row)
        self._give_back(slot)
        self.live.leave(slot)

    def _give_back(self, slot: int) -> None:
        live = self.live
        placement = live.placements[slot]
        assert placement is not None
        self._jobs_w -= live.floats.item(F.DRAW, slot)
        idle = self.nodes.give_back(placement)
        self._idle(idle)

    def _idle(self, nodes: Iterable[int]) -> None:
        """Plan to switch these nodes off, which nobody uses from now on."""
        if self.options.power_down_after_s is not None:
            for node in nodes:
                self._idle_since[node] = self.now_s
                self._push(self.now_s + self.options.power_down_after_s, POWER_DOWN, node, 0)

    def _take_events(self) -> bool:
        """Take in every event up to now; return whether any may let a job start."""
        heap, live = self._heap, self.live
        changed = False
        while heap and heap[0][0] <= self.now_s:
            _, kind, _, subject, generation = heapq.heappop(heap)
            if kind in (RELEASE, COMPLETE, STAGE):
                slot = live.slot.get(self.recorder.ids[subject])
                if slot is None or live.ints.item(I.GENERATION, slot) != generation:
                    continue
                if kind == STAGE:
                    self._retime(slot, stage_begins=True)
                    continue
                (self._release if kind == RELEASE else self._complete)(slot)
            elif kind == STEP:
                slot = live.slot.get(self.recorder.ids[subject])
                if slot is not None:
                    self._step(slot, generation)
                continue
            elif kind == FAIL:
                self._fail(subject)
            elif kind == RECOVER:
                self.nodes.recover(subject)
                self._plan_failure(subject)
            elif kind == POWER_DOWN:
                since_s = self._idle_since.get(subject, math.inf)
                if self.now_s - since_s >= (self.options.power_down_after_s or 0.0) - 1e-6:
                    self.nodes.switch_off(subject)
                continue
            changed = True
        return changed

    def _plan_failures(self) -> None:
        if self.options.node_mtbf_s is not None:
            for node in range(len(self.nodes.ids)):
                self._plan_failure(node)

    def _plan_failure(self, node: int) -> None:
        mtbf_s = self.options.node_mtbf_s
        assert mtbf_s is not None
        self._push(self.now_s + float(self._random.exponential(mtbf_s)), FAIL, node, 0)

    def _fail(self, node: int) -> None:
        """Lose a node: its gangs stop, fall back to their last checkpoint and wait again once leases are over."""
        live = self.live
        node_id = self.nodes.ids[node]
        self.nodes.fail(node)
        for slot in range(live.count):
            placement = live.placements[slot]
            if placement is not None and any(share.node_id == node_id for share in placement.shares):
                self.recorder.failures[live.ints.item(I.ROW, slot)] += 1
                self._stop(slot, self.options.lease_s, keeps_work=False)
        repair_s = self.options.lease_s + float(self._random.exponential(self.options.node_repair_s))
        self._push(self.now_s + repair_s, RECOVER, node, 0)

    def _advance(self, time_s: float) -> None:
        """Move the clock; power is constant in between, so energy and carbon are exact."""
        seconds = time_s - self.now_s
        if seconds <= 0:
            return
        integral = self.grid.integral(time_s)
        idle_w = self.nodes.idle_w
        power_w, grid = self._jobs_w + idle_w, (integral - self.integral) / J_PER_KWH
        sums = self._sums
        sums[0] += power_w * seconds
        sums[1] += power_w * grid
        sums[2] += idle_w * seconds
        sums[3] += idle_w * grid
        self._peak_w = max(self._peak_w, power_w)
        self._above.draw(power_w, seconds)
        self.now_s, self.integral = time_s, integral

    def _push(self, time_s: float, kind: int, subject: int, generation: int) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (time_s, kind, self._sequence, subject, generation))

    def _result(self, parameters: dict[str, Any]) -> SimulationResult:
        for slot in range(self.live.count):
            if self.live.placements[slot] is not None:
                self._settle(slot)
        totals = Totals(
            *self._sums,
            peak_w=self._peak_w,
            rounds=self.rounds,
            active_rounds=self.active_rounds,
            unrunnable=self._unrunnable,
            beyond_trace_s=max(self.now_s - self.grid.trace.end_s, 0.0),
            gpus=sum(self.nodes.gpus),
            above=self._above.figures(self.now_s - self._began_s),
        )
        trace = self.grid.trace
        named = (self.policy.name, parameters, trace.zone, trace.signal.value)
        predicted = self.workload.predicted_work_s
        if self._foresight is not None:
            predicted = self._foresight.work_s
        columns = self.recorder.columns(self.workload.work_s if predicted is None else predicted)
        return result_of(named, columns, self.recorder.series(), totals)
