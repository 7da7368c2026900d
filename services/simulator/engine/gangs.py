"""Gangs: they start, get controls, go through stages, stop, and release their devices.

Under a policy that lets jobs tune their batch size (``PolicyEntry.tunes_batch``), a job that can do so goes through
stages of its work, each with its own speed and power.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from services.core.cycle.plan import Control, ProfileControls, Start
from services.core.cycle.snapshot import PREEMPTING, QUEUED, STARTING, Saves
from services.core.domain.arrays import Bools
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId
from services.core.domain.placement import Placement
from services.core.domain.reasons import Reason
from services.core.domain.units import J_PER_KWH
from services.core.profiles.sharing import shared_gpu
from services.simulator.engine.behaviour import FIXED_BATCH, Behaviours, Run
from services.simulator.engine.cluster import Nodes
from services.simulator.engine.controls import Measurements
from services.simulator.engine.events import COMPLETE, RELEASE, SAVE, STAGE, STEP, Events
from services.simulator.engine.live import FloatRow, IntRow, LiveJobs
from services.simulator.engine.options import EngineOptions, Foresight
from services.simulator.engine.recorder import Recorder
from services.simulator.workload import Workload

SETTING_ROWS = {ControlKind.POWER_LIMIT: FloatRow.POWER_LIMIT, ControlKind.CLOCK: FloatRow.CLOCK}


class Gangs:
    """The gangs of a run.

    Attributes:
        now_s: The clock, UTC seconds; it is advanced together with ``integrals``.
        power_w: What all gangs draw now.
        arrivals: The checkpoints that have moved to each zone.
        lost_gpu_s: Their work since the last checkpoint, GPU seconds.
        transferred: What that took without the gangs that waited: J, gCO2 at the mean of both zones.
    """

    def __init__(
        self,
        workload: Workload,
        nodes: Nodes,
        live: LiveJobs,
        behaviours: Behaviours,
        measurements: Measurements,
        recorder: Recorder,
        events: Events,
        options: EngineOptions,
        *,
        foresight: Foresight | None,
        tunes: Bools | None,
    ) -> None:
        """Take the objects that gangs act on; ``tunes``: (n_jobs,) whose batch follows the gang, None for none."""
        self.now_s = self.power_w = self.lost_gpu_s = 0.0
        self.stopped_gpus = 0  #: The GPUs of gangs that were stopped before their end, each stop counted
        self.integrals = [0.0] * len(nodes.zones)  #: The intensity of each zone's grid integrated up to ``now_s``
        self.zone_w = [0.0] * len(nodes.zones)  #: The same by zone
        self.intensities: Callable[[], list[float]] = list
        """The present intensity of each zone's grid, gCO2/kWh, if there are several zones."""
        self.arrivals, self.transferred = [0] * len(nodes.zones), [0.0, 0.0]
        self.leaving: dict[int, float] = {}
        """The gangs that go on until they save their work and then stop, by workload row: when, UTC seconds."""
        self.learned = False  #: Whether a measurement has ended since policies last decided
        self.beside: dict[JobId, JobId] = {}  #: For each job on a shared device, the other job on it
        self.shared_s = 0.0  #: How long devices have been shared, seconds
        self._shared_since_s: dict[Placement, float] = {}
        self._workload, self._nodes, self._live, self._recorder = workload, nodes, live, recorder
        self._behaviours, self._measurements, self._events = behaviours, measurements, events
        self._options, self._foresight, self._tunes = options, foresight, tunes
        by_interval = np.random.default_rng((options.seed, 1)).random(len(workload)) < options.interval_jobs
        self._by_interval = frozenset[int](np.flatnonzero(by_interval).tolist())

    def _draws(self, slot: int, more_w: float) -> None:
        self.power_w += more_w
        self.zone_w[self._live.ints.item(IntRow.ZONE, slot)] += more_w

    def start(self, start: Start, *, since_s: float | None = None) -> None:
        """Start a gang; with ``since_s``, one that has held its GPUs since then and continues without a delay."""
        live, now_s = self._live, self.now_s
        slot = live.slot[start.job_id]
        placement = start.placement
        gpus = placement.gpus
        if since_s is None:
            live.waits(slot, -1)
        if start.shares:
            model, awake_at_s = self._nodes.share(placement), now_s
            host = live.ids[live.placements.index(placement)]
            self.beside[start.job_id], self.beside[host] = host, start.job_id
            self._shared_since_s[placement] = now_s
        else:
            model, awake_at_s = self._nodes.take(placement, now_s, self._options.boot_s)
        ints = live.ints
        row = ints.item(IntRow.ROW, slot)
        stage, stages = self._stage_of(slot, model)
        run = self._behaviours.run(ints.item(IntRow.CURVE, slot), model, placement, stage=stage)
        if start.shares:
            run = self._shared(run, self.beside[start.job_id], model, self._options.power_limit_w)
        run_from = awake_at_s + run.restart_s if since_s is None else now_s
        zone, came_from = self._nodes.zone_of[model], ints.item(IntRow.ZONE, slot)
        ints[IntRow.ZONE, slot] = zone
        if 0 <= came_from != zone:
            run_from += self._options.transfer.seconds
            self._move(row, came_from, zone)
        known = live.profiled.get(row, {}).get(gpus)
        column = live.floats[:, slot]
        column[FloatRow.SINCE] = now_s if since_s is None else since_s
        column[FloatRow.ACCOUNTED] = now_s
        column[FloatRow.GRID] = self.integrals[zone]
        column[FloatRow.RUN_FROM : FloatRow.KEPT + 1] = (
            run_from, run.speed, run.draw_w, run.gpu_w, run.efficiency, run_from, column[FloatRow.SET_DONE],
        )  # fmt: skip
        column[FloatRow.NOW] = math.nan if known is None else known
        ints[IntRow.PHASE : IntRow.MEASURED + 1, slot] = STARTING, gpus, known is not None
        live.placements[slot] = placement
        self._draws(slot, run.draw_w)
        self._foresee(slot, model, run, stage, stages)
        self._recorder.started(row, now_s, gpus)
        if self._options.power_limit_w is not None:
            self._put(slot, ControlKind.POWER_LIMIT, self._options.power_limit_w)
        if start.shares:
            self.retime(live.slot[self.beside[start.job_id]])

    def _move(self, row: int, came_from: int, zone: int) -> None:
        """Charge a job for moving its checkpoint from one zone to another."""
        kwh, intensities = self._options.transfer.energy_kwh, self.intensities()
        cost = kwh * J_PER_KWH, kwh * (intensities[came_from] + intensities[zone]) / 2
        self.arrivals[zone] += 1
        self.transferred = [self.transferred[0] + cost[0], self.transferred[1] + cost[1]]
        self._recorder.spent(row, 0.0, *cost)

    def set(self, action: Control) -> None:
        """Set the controls of a gang's devices, or start measuring it at every control value."""
        slot, kind = self._live.slot[action.job_id], action.kind
        row = self._live.ints.item(IntRow.ROW, slot)
        self._measurements.end(row, kind)
        if not isinstance(action, ProfileControls):
            self._note_order(slot, by_order=action.reason is Reason.GRID_ORDER)
            self._put(slot, kind, action.value)
            return
        profile = self._live.ints.item(IntRow.CURVE, slot)
        line = self._measurements.begin(row, profile, self._model_of(slot), kind, action.window_s)
        if line is not None:
            self._events.push(max(self.now_s, self._live.floats.item(FloatRow.RUN_FROM, slot)), STEP, row, line)

    def _note_order(self, slot: int, *, by_order: bool) -> None:
        """Note what a gang's GPUs draw before an order sets them, until something else does."""
        floats = self._live.floats
        if not by_order:
            floats[FloatRow.UNORDERED, slot] = math.nan
        elif math.isnan(floats.item(FloatRow.UNORDERED, slot)):
            gpus = self._live.ints.item(IntRow.GPUS, slot)
            floats[FloatRow.UNORDERED, slot] = floats.item(FloatRow.GPU_DRAW, slot) / gpus

    def step(self, slot: int, line: int) -> None:
        """Take the next step of a measurement; when a curve is complete it becomes known, and policies decide again."""
        row = self._live.ints.item(IntRow.ROW, slot)
        while (step := self._measurements.next(row, line)) is not None:
            self._put(slot, step.kind, step.value)
            if step.value is not None:
                self._events.push(self.now_s + step.window_s, STEP, row, line)
                return
            profile = self._live.ints.item(IntRow.CURVE, slot)
            self._measurements.learn(profile, self._model_of(slot), step.kind)
            self.learned = True

    def preempt(self, slot: int, wait_s: float = 0.0) -> None:
        """Stop a gang, allowing its grace period; with ``wait_s``, when it next saves its work, or by then."""
        live = self._live
        row = live.ints.item(IntRow.ROW, slot)
        if wait_s:
            saves_s = self._saved_s(slot) + self._options.checkpoint_every_s
            self.leaving[row] = min(saves_s, self.now_s + wait_s)
            self._measurements.end(row)
            live.ints[IntRow.PHASE, slot] = PREEMPTING
            self._events.push(self.leaving[row], SAVE, row)
            return
        checkpoint_s = self._workload.profiles[live.ints.item(IntRow.CURVE, slot)].checkpoint_s
        heeds = row not in self._by_interval
        held_s = min(checkpoint_s, self._options.grace_s) if heeds else 0.0
        self.stop(slot, held_s, keeps_work=heeds and checkpoint_s <= self._options.grace_s)
        self._recorder.preemptions[row] += 1

    def hurry(self) -> None:
        for row in list(self.leaving):
            self.preempt(self._live.slot[self._recorder.ids[row]])

    def saves(self) -> dict[JobId, Saves]:
        """Return when jobs that tell, and hold GPUs or have done something, have last saved their work."""
        live, every_s = self._live, self._options.checkpoint_every_s
        known = live.ints[IntRow.GPUS, : live.count] + live.floats[FloatRow.SET_DONE, : live.count]
        slots = np.flatnonzero(known).tolist() if self._by_interval else ()
        which = [slot for slot in slots if live.ints.item(IntRow.ROW, slot) in self._by_interval]
        return {live.ids[slot]: Saves(self._saved_s(slot), every_s) for slot in which}

    def _saved_s(self, slot: int) -> float:
        """Return when a gang last saved its work, or else began, UTC seconds."""
        began_s, every_s = self._live.floats.item(FloatRow.BEGAN, slot), self._options.checkpoint_every_s
        return began_s + math.floor(max(self.now_s - began_s, 0.0) / every_s + 1e-9) * every_s

    def stop(self, slot: int, after_s: float, *, keeps_work: bool) -> None:
        """End a gang's work now; its devices are released after a while."""
        live = self._live
        self._measurements.end(live.ints.item(IntRow.ROW, slot))
        if live.ints.item(IntRow.PHASE, slot) != PREEMPTING or self.leaving.pop(live.ints.item(IntRow.ROW, slot), 0):
            if live.ints.item(IntRow.MEASURED, slot) == 0:
                ran_s = self.now_s - live.floats.item(FloatRow.RUN_FROM, slot)
                if ran_s >= self._options.min_profile_s:
                    live.measured(slot)
            kept = math.inf if keeps_work else self._kept(slot)
            self.settle(slot)
            done, gpus = live.floats.item(FloatRow.SET_DONE, slot), live.ints.item(IntRow.GPUS, slot)
            self.stopped_gpus += gpus
            if kept < done:
                self.lost_gpu_s += (done - kept) / live.floats.item(FloatRow.SPEED, slot) * gpus
                live.floats[FloatRow.SET_DONE, slot] = kept
        live.floats[FloatRow.SPEED, slot] = 0.0
        live.ints[IntRow.PHASE, slot] = PREEMPTING
        live.ints[IntRow.GENERATION, slot] += 1
        row, generation = live.ints.item(IntRow.ROW, slot), live.ints.item(IntRow.GENERATION, slot)
        self._events.push(self.now_s + after_s, RELEASE, row, generation)

    def release(self, slot: int) -> Sequence[int]:
        """Release a gang's devices; return the nodes that are now unused."""
        live = self._live
        self.settle(slot)
        idle = self._give_back(slot)
        live.floats[FloatRow.SPEED : FloatRow.GPU_DRAW + 1, slot] = 0.0
        live.floats[FloatRow.POWER_LIMIT : FloatRow.UNORDERED + 1, slot] = math.nan
        live.ints[IntRow.PHASE : IntRow.MEASURED + 1, slot] = QUEUED, 0, 0
        live.ints[IntRow.STALE, slot] = 1
        if not live.floats.item(FloatRow.SET_DONE, slot):
            live.ints[IntRow.ZONE, slot] = -1
        live.placements[slot] = None
        live.waits(slot)
        return idle

    def complete(self, slot: int) -> Sequence[int]:
        """End a job whose work is done; return the nodes that are now unused."""
        self.settle(slot)
        self._measurements.end(self._live.ints.item(IntRow.ROW, slot))
        row = self._live.ints.item(IntRow.ROW, slot)
        self.leaving.pop(row, None)
        self._recorder.ended(row, self.now_s)
        if self._foresight is not None:
            self._foresight.ended(row)
        idle = self._give_back(slot)
        self._live.leave(slot)
        return idle

    def settle(self, slot: int) -> None:
        """Record what a gang has done so far."""
        integral = self.integrals[self._live.ints.item(IntRow.ZONE, slot)]
        spent = self._live.settle(slot, self.now_s, integral)
        self._recorder.spent(self._live.ints.item(IntRow.ROW, slot), *spent)

    def retime(self, slot: int, *, stage_begins: bool = False) -> None:
        """Record what a gang has done so far, and schedule its end at its current control value and stage."""
        live, floats = self._live, self._live.floats
        since_s, left_off_s = floats.item(FloatRow.SINCE, slot), floats.item(FloatRow.RUN_FROM, slot)
        if self.now_s > left_off_s:
            floats[FloatRow.KEPT, slot] = self._kept(slot)
        self.settle(slot)
        floats[FloatRow.SINCE, slot] = since_s
        model = self._model_of(slot)
        stage, stages = self._stage_of(slot, model, begins=stage_begins)
        run = self._run_of(slot, model, stage)
        self._draws(slot, run.draw_w - floats.item(FloatRow.DRAW, slot))
        run_from = max(left_off_s, self.now_s)
        floats[FloatRow.RUN_FROM : FloatRow.EFFICIENCY + 1, slot] = (
            run_from, run.speed, run.draw_w, run.gpu_w, run.efficiency,
        )  # fmt: skip
        if live.ints.item(IntRow.MEASURED, slot):
            live.measured(slot)
        live.ints[IntRow.GENERATION, slot] += 1
        self._foresee(slot, model, run, stage, stages)

    def _put(self, slot: int, kind: ControlKind, value: float | None) -> None:
        self._live.floats[SETTING_ROWS[kind], slot] = math.nan if value is None else value
        self.retime(slot)
        if self.beside and (other := self.beside.get(self._live.ids[slot])) is not None:
            self.retime(self._live.slot[other])

    def _stage_of(self, slot: int, model: int, *, begins: bool = False) -> tuple[int, int]:
        """Return a job's stage on a GPU model, and the number of stages; (FIXED_BATCH, 0) where nothing is tuned.

        Args:
            begins: A stage begins now, although rounding may put the time slightly before or after.
        """
        ints, floats = self._live.ints, self._live.floats
        if self._tunes is None or not self._tunes.item(ints.item(IntRow.ROW, slot)):
            return FIXED_BATCH, 0
        stages = self._behaviours.stages(ints.item(IntRow.CURVE, slot), model)
        share = floats.item(FloatRow.SET_DONE, slot) / floats.item(FloatRow.WORK, slot)
        return min(round(share * stages) if begins else int(share * stages), stages - 1), stages

    def _foresee(self, slot: int, model: int, run: Run, stage: int, stages: int) -> None:
        """Schedule the end of the job at its current speed, or the start of its next stage."""
        floats, ints = self._live.floats, self._live.ints
        following = stage + 1
        while following < stages and self._run_of(slot, model, following) == run:
            following += 1
        last = following >= stages
        upto = floats.item(FloatRow.WORK, slot) if last else floats.item(FloatRow.WORK, slot) * following / stages
        left = upto - floats.item(FloatRow.SET_DONE, slot)
        time_s = floats.item(FloatRow.RUN_FROM, slot) + left / floats.item(FloatRow.SPEED, slot)
        kind = COMPLETE if last else STAGE
        self._events.push(time_s, kind, ints.item(IntRow.ROW, slot), ints.item(IntRow.GENERATION, slot))

    def _kept(self, slot: int) -> float:
        """Return the work saved in a gang's last checkpoint; checkpoints are written at fixed intervals of its run."""
        column = self._live.floats[:, slot].tolist()
        since_change_s = self._saved_s(slot) - column[FloatRow.RUN_FROM]
        if since_change_s < 0:
            return column[FloatRow.KEPT]
        return column[FloatRow.SET_DONE] + since_change_s * column[FloatRow.SPEED]

    def _run_of(self, slot: int, model: int, stage: int) -> Run:
        run = self._alone(slot, model, stage)
        if self.beside and (other := self.beside.get(self._live.ids[slot])) is not None:
            limit_w = self._live.floats.item(FloatRow.POWER_LIMIT, slot)
            return self._shared(run, other, model, None if math.isnan(limit_w) else limit_w)
        return run

    def _alone(self, slot: int, model: int, stage: int) -> Run:
        """Return how a gang would run if it shared no device."""
        live, floats = self._live, self._live.floats
        placement = live.placements[slot]
        assert placement is not None
        values = [(kind, floats.item(row, slot)) for kind, row in SETTING_ROWS.items()]
        control_values = tuple([each for each in values if each[1] == each[1]])  # those that are set are not NaN
        return self._behaviours.run(live.ints.item(IntRow.CURVE, slot), model, placement, control_values, stage)

    def _shared(self, run: Run, other: JobId, model: int, limit_w: float | None) -> Run:
        """Return how a job runs beside another on its device; the host's draw falls in proportion to the job's pace."""
        beside = self._live.slot[other]
        others = self._alone(beside, model, self._stage_of(beside, model)[0])
        board = self._nodes.boards[model]
        limits_w = (board.peak_w, limit_w or math.inf, float(self._live.floats[FloatRow.POWER_LIMIT, beside]))
        limit_w = min(each for each in limits_w if each == each)
        part = shared_gpu(run.gpu_w, others.gpu_w, idle_w=board.idle_w, limit_w=limit_w)
        speed, draw_w = run.speed * part.pace, part.gpu_w + (run.draw_w - run.gpu_w) * part.pace
        return Run(speed, part.gpu_w, draw_w, speed / draw_w, run.restart_s)

    def _part(self, slot: int, placement: Placement) -> None:
        """End the sharing of a device when one of its gangs leaves; the other continues at full speed."""
        live = self._live
        other = self.beside.pop(live.ids[slot], None)
        if other is None:
            return
        del self.beside[other]
        self.shared_s += self.now_s - self._shared_since_s.pop(placement)
        stays = live.slot[other]
        if live.ints.item(IntRow.PHASE, stays) != PREEMPTING:
            self.retime(stays)
            return
        self.settle(stays)  # it stops: nothing is done any more, and the device draws on until it is gone
        model, column = self._model_of(stays), live.floats[:, stays]
        run = self._alone(stays, model, self._stage_of(stays, model)[0])
        self._draws(stays, run.draw_w - float(column[FloatRow.DRAW]))
        column[FloatRow.DRAW], column[FloatRow.GPU_DRAW] = run.draw_w, run.gpu_w

    def _model_of(self, slot: int) -> int:
        placement = self._live.placements[slot]
        assert placement is not None
        return self._nodes.model[self._nodes.where[placement.shares[0].node_id]]

    def _give_back(self, slot: int) -> Sequence[int]:
        live = self._live
        placement = live.placements[slot]
        assert placement is not None
        self._draws(slot, -live.floats.item(FloatRow.DRAW, slot))
        if self.beside:
            self._part(slot, placement)
        return self._nodes.give_back(placement)
