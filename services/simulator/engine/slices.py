"""Jobs on MIG slices: they wait here, are shown to the rounds in which they may start, and leave for their slices.

``services.core.cycle.slices`` assigns their slices, as it does live. Of the jobs with the same request, as many are
shown as there are free slices for them: the others could not start, and no policy sees any of them. Jobs on slices are
never preempted, and a node with a cut GPU is not switched off, since slices do not survive a reboot.

A cut GPU draws its board's idle power plus, for each job on it, what that job draws above idle. A job that runs on a
slice at some fraction of the GPU's speed draws the same fraction of what it would draw on the GPU, since work takes the
same energy, but at most the slice's share of the board's range. ``split_slice_energy`` splits it among the slices, as
agents do.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from services.core.accounting.slices import SliceUse, split_slice_energy
from services.core.cycle.plan import Start
from services.core.cycle.slices import SliceTable, slice_turn
from services.core.cycle.snapshot import SliceJob, SliceUnit
from services.core.domain.arrays import Bools
from services.core.domain.controls import ControlKind
from services.core.domain.gpus import SLICE_SEVENTHS, GpuModel, slice_memory_gib
from services.core.domain.ids import JobId
from services.core.domain.mig import WHOLE, slice_index, slice_name
from services.core.domain.placement import Placement
from services.core.domain.units import J_PER_KWH
from services.simulator.engine.cluster import Nodes
from services.simulator.engine.events import COMPLETE, RELEASE, Events
from services.simulator.engine.gangs import Gangs
from services.simulator.engine.live import IntRow, LiveJobs
from services.simulator.engine.options import EngineOptions
from services.simulator.engine.recorder import Recorder
from services.simulator.workload import ClusterSpec, JobProfile, Workload

ROUNDING = 1e-9  #: Changes of power smaller than this share are none
Asked = tuple[int, float, bytes]  #: What a job asks for: sevenths, memory in GiB, and the GPU models it may use
Turn = tuple[tuple[bool, int, float, str], int]  #: A job that waits: its ``slice_turn``, and its row of the workload


@dataclass(slots=True)
class CutGpu:
    """A GPU that is cut into slices."""

    node: int  #: Its node
    board: GpuModel  #: Its model
    units: tuple[int, ...]  #: Its slices, as indices into all slices
    sevenths: int  #: Total size of its slices
    power_w: float = 0.0  #: What it draws now; 0 while its node is down
    idle_w: float = 0.0  #: The part not charged to any job, including the host's, watts


@dataclass(slots=True)
class Holder:
    """A job on a slice."""

    row: int  #: Its row in the workload
    unit: int  #: Its slice
    run_from_s: float  #: When its work begins or began, UTC seconds
    done: float  #: The work that was done then
    speed: float  #: Work seconds per second
    busy_w: float  #: What it draws above the board's idle draw, watts
    host_w: float  #: Its share of the host, watts
    draw_w: float  #: Its total draw since ``accounted_s``, including its share of the board's idle draw
    accounted_s: float  #: UTC seconds
    grid: float  #: ``Grid.integral(accounted_s)``


@dataclass(slots=True)
class SizeFigures:
    """The usage of the slices of one size."""

    slices: int = 0
    jobs: int = 0
    held_s: float = 0.0
    energy_j: float = 0.0


class Slices:
    """The slices of a cluster, and the jobs that ask for them; jobs are identified by their rows in the workload.

    Attributes:
        held_w: What slices held by jobs draw now, with their hosts, watts.
        idle_w: The same for the other slices.
    """

    def __init__(
        self,
        workload: Workload,
        eligible: Bools,
        live: LiveJobs,
        recorder: Recorder,
        cluster: ClusterSpec,
        nodes: Nodes,
        events: Events,
        options: EngineOptions,
        clock: Gangs,
    ) -> None:
        """Take the objects of the run; ``eligible``: (n_jobs, n_gpu_models) which models each job may run on."""
        self._workload, self._eligible, self._nodes, self._live = workload, eligible, nodes, live
        self._recorder, self._events, self._options, self._clock = recorder, events, options, clock
        asked = workload.slice_sevenths
        self.sevenths = np.zeros(len(workload), dtype=np.int64) if asked is None else asked
        """(n_jobs,) the size of the slice that each asks for, 0 for a job that asks for none."""
        self.held_w = self.idle_w = 0.0
        self.gpus: list[CutGpu] = []  #: The GPUs that are cut
        self._units: list[SliceUnit] = []
        self._gpu_of: list[CutGpu] = []
        self._where: dict[tuple[str, int], int] = {}
        self._sizes: dict[int, SizeFigures] = {}
        self._table = self._cut(cluster)
        self._free = np.ones(len(self._units), dtype=np.bool_)
        self._up = np.ones(len(self._units), dtype=np.bool_)
        self._suiting: dict[Asked, Bools] = {}
        self._queues: dict[Asked, list[Turn]] = {}
        self._shown: list[tuple[Turn, Asked]] = []
        self._on: dict[int, Holder] = {}
        self._holders: dict[int, Holder] = {}
        self._done: dict[int, float] = {}
        self._generation: dict[int, int] = {}
        for gpu in self.gpus:
            self._redraw(gpu)

    def _cut(self, cluster: ClusterSpec) -> SliceTable:
        memory_gib: list[float] = []
        groups = [group for group in cluster.groups for _ in range(group.count)]
        for node, group in enumerate(groups):
            sizes = dict(zip(SLICE_SEVENTHS, slice_memory_gib(group.model), strict=True)) | dict(group.slice_memory_gib)
            for gpu, places in enumerate(group.cuts):
                first = len(self._units)
                for place in places:
                    device = slice_index(gpu, place.start)
                    self._where[self._nodes.ids[node], device] = len(self._units)
                    self._units.append(SliceUnit(node, device, gpu, place.sevenths, free=True))
                    self._sizes.setdefault(place.sevenths, SizeFigures()).slices += 1
                    memory_gib.append(sizes[place.sevenths])
                if places:
                    units = tuple(range(first, len(self._units)))
                    self.gpus.append(CutGpu(node, group.model, units, sum(place.sevenths for place in places)))
                    self._gpu_of += [self.gpus[-1]] * len(places)
        on = np.array([unit.node for unit in self._units], dtype=np.int64)
        return SliceTable(
            sevenths=np.array([unit.sevenths for unit in self._units], dtype=np.int64),
            memory_gib=np.array(memory_gib, dtype=np.float64),
            gpu_model=np.array(self._nodes.model, dtype=np.int64)[on],
            takes_work=np.array([group.schedulable for group in groups], dtype=np.bool_)[on],
        )

    def asks(self, row: int) -> bool:
        return bool(self.sevenths[row])

    def exists_for(self, row: int) -> bool:
        """Return whether some slice, free or not, suits a job."""
        return bool(self._suits(self._asked(row)).any())

    @property
    def count(self) -> int:
        return len(self._holders) + self.queued

    @property
    def queued(self) -> int:
        return sum(map(len, self._queues.values()))

    def holding(self) -> list[int]:
        return list(self._holders)

    def may_start(self) -> bool:
        return any(queue and self._room(asked) for asked, queue in self._queues.items())

    def arrives(self, row: int, done: float = 0.0) -> None:
        """Add a job that waits from now on; ``done``: the part of its work that is already done."""
        workload = self._workload
        turn = slice_turn(
            is_service=False,
            priority=0 if workload.priority is None else int(workload.priority[row]),
            submitted_s=float(workload.submitted_s[row]),
            job_id=workload.ids[row],
        )
        self._done[row] = done
        heapq.heappush(self._queues.setdefault(self._asked(row), []), (turn, row))

    def show(self) -> bool:
        """Add the jobs that may start to the live jobs, for one round; return whether there are any."""
        for asked, queue in self._queues.items():
            for _ in range(self._shows(asked) if queue else 0):
                turn = heapq.heappop(queue)
                self._shown.append((turn, asked))
                self._live.arrive(turn[1])
        self._shown.sort(key=lambda each: each[0])
        return bool(self._shown)

    def hide(self) -> None:
        """Remove the jobs that did not start from the live jobs."""
        for turn, asked in self._shown:
            slot = self._live.slot.get(self._recorder.ids[turn[1]])
            if slot is not None:
                self._live.leave(slot)
                heapq.heappush(self._queues[asked], turn)
        self._shown.clear()

    def units(self) -> tuple[SliceUnit, ...]:
        """Return the slices on nodes that are up, as a snapshot shows them."""
        if not self._units:
            return ()
        row = np.cumsum(self._nodes.up) - 1
        shown = zip(self._units, self._free.tolist(), self._up.tolist(), strict=True)
        return tuple(
            SliceUnit(int(row[unit.node]), unit.device, unit.gpu, unit.sevenths, free)
            for unit, free, is_up in shown
            if is_up
        )

    def jobs(self) -> tuple[SliceJob, ...]:
        """Return the jobs that are shown, in the order in which they get slices."""
        ids = self._recorder.ids
        return tuple(SliceJob(ids[row], asked[0], self._suits(asked)[self._up]) for (_, row), asked in self._shown)

    def is_shown(self, job_id: JobId) -> bool:
        return bool(self._shown) and self.asks(self._live.ints.item(IntRow.ROW, self._live.slot[job_id]))

    def start(self, start: Start) -> None:
        slot = self._live.slot[start.job_id]
        row = self._live.ints.item(IntRow.ROW, slot)
        self._live.leave(slot)
        profile = self._workload.profiles[int(self._workload.profile[row])]
        self._hold(row, start.placement, self._done.pop(row), profile.restart_s)

    def goes_on(self, row: int, placement: Placement, done: float) -> None:
        """Continue a job that held its slice before the run began, with this much work done."""
        self._hold(row, placement, done, 0.0)

    def ends(self, row: int, kind: int, generation: int) -> bool:
        """Process an event of a job on a slice, unless it is outdated; return whether its slice is now free."""
        holder = self._holders.get(row)
        if holder is None or self._generation[row] != generation:
            return False
        self._settle(holder)
        self.held_w -= holder.draw_w
        del self._holders[row], self._on[holder.unit]
        self._free[holder.unit] = True
        self._redraw(self._gpu_of[holder.unit])
        if kind == COMPLETE:
            self._recorder.ended(row, self._clock.now_s)
            self._sizes[self._units[holder.unit].sevenths].jobs += 1
        else:
            self.arrives(row, holder.done)
        return True

    def fail(self, node: int) -> None:
        """Fail a node that is already marked as down.

        Its jobs fall back to their last checkpoints, and wait again once their leases have expired. Until then they
        keep drawing the same power, as gangs do.
        """
        for holder in [each for each in self._holders.values() if self._units[each.unit].node == node]:
            ran_s, every_s = max(self._clock.now_s - holder.run_from_s, 0.0), self._options.checkpoint_every_s
            holder.done += math.floor(ran_s / every_s) * every_s * holder.speed
            self._recorder.failures[holder.row] += 1
            self._expect(holder.row, self._clock.now_s + self._options.lease_s, RELEASE)
        self.follow(node)

    def follow(self, node: int) -> None:
        """Update the slices of a node that went down or came back, cut as before."""
        for gpu in self.gpus:
            if gpu.node == node:
                self._up[list(gpu.units)] = self._nodes.up[node]
                self._redraw(gpu)

    def settle(self) -> None:
        """Record what all jobs have spent so far."""
        for holder in self._holders.values():
            self._settle(holder)

    def figures(self) -> dict[str, dict[str, float]]:
        return {
            slice_name(size): {
                "slices": each.slices,
                "jobs": each.jobs,
                "held_hours": each.held_s / 3_600.0,
                "energy_kwh": each.energy_j / J_PER_KWH,
            }
            for size, each in sorted(self._sizes.items())
        }

    def _asked(self, row: int) -> Asked:
        memory_gib = self._workload.slice_memory_gib
        least_gib = 0.0 if memory_gib is None else float(memory_gib[row])
        return int(self.sevenths[row]), least_gib, self._eligible[row].tobytes()

    def _suits(self, asked: Asked) -> Bools:
        if asked not in self._suiting:
            sevenths, memory_gib, eligible = asked
            self._suiting[asked] = self._table.suits(sevenths, memory_gib, np.frombuffer(eligible, dtype=np.bool_))
        return self._suiting[asked]

    def _room(self, asked: Asked) -> int:
        return int((self._suits(asked) & self._free & self._up).sum())

    def _shows(self, asked: Asked) -> int:
        """Return how many of the jobs with the same request are shown: each that starts takes one slice."""
        return min(self._room(asked), len(self._queues[asked]))

    def _hold(self, row: int, placement: Placement, done: float, restart_s: float) -> None:
        share = placement.shares[0]
        unit, now_s = self._where[share.node_id, share.devices[0]], self._clock.now_s
        gpu, sevenths = self._gpu_of[unit], self._units[unit].sevenths
        profile = self._workload.profiles[int(self._workload.profile[row])]
        speed, busy_w = self._rates(profile, sevenths, gpu.board)
        one, of_gpu_w = np.array([1]), profile.host_power_w * sevenths / gpu.sevenths
        host_w = float(self._options.host_w(of_gpu_w, one, one)[0])
        holder = Holder(row, unit, now_s + restart_s, done, speed, busy_w, host_w, 0.0, now_s, self._clock.integrals[0])
        self._holders[row] = self._on[unit] = holder
        self._free[unit] = False
        self._recorder.started(row, now_s, 1)
        self._redraw(gpu)
        self._expect(row, holder.run_from_s + (float(self._workload.work_s[row]) - done) / speed, COMPLETE)

    def _expect(self, row: int, time_s: float, kind: int) -> None:
        self._generation[row] = self._generation.get(row, 0) + 1
        self._events.push(time_s, kind, row, self._generation[row])

    def _rates(self, profile: JobProfile, sevenths: int, board: GpuModel) -> tuple[float, float]:
        """Return the speed of a job on a slice, and what it draws above the board's idle draw, watts."""
        truth = profile.truth(board.name)
        assert truth is not None  # it may run on this model
        one, limit_w, speed = np.array([1]), self._options.power_limit_w, profile.slice_speed(sevenths)
        slower, cooler = truth.factors_at({} if limit_w is None else {ControlKind.POWER_LIMIT: limit_w})
        above_w = max(float(truth.power_w_at(one)[0]) * cooler - board.idle_w, 0.0)
        most_w = max(board.peak_w - board.idle_w, above_w) * sevenths / WHOLE
        return float(truth.speed_at(one)[0]) * slower * speed, min(above_w * speed, most_w)

    def _redraw(self, gpu: CutGpu) -> None:
        """Split what a GPU draws from now on among its slices."""
        holders = [self._on[unit] for unit in gpu.units if unit in self._on]
        idle_w = 0.0
        gpu.power_w = 0.0
        if holders or self._nodes.up[gpu.node]:
            gpu.power_w = gpu.board.idle_w + sum(holder.busy_w for holder in holders)
            parts_w = split_slice_energy(gpu.power_w, gpu.board.idle_w, self._uses(gpu))
            for holder in holders:
                self._draw(holder, parts_w.pop(holder.unit) + holder.host_w)
            free = sum(self._units[unit].sevenths for unit in parts_w)
            idle_w = sum(parts_w.values()) + self._options.host_idle_w * free / gpu.sevenths
        self.idle_w += idle_w - gpu.idle_w
        gpu.idle_w = idle_w

    def _uses(self, gpu: CutGpu) -> dict[int, SliceUse]:
        """Return the use of a GPU's slices; a job's activity is its draw as a share of its slice's range."""
        range_w = max(gpu.board.peak_w - gpu.board.idle_w, ROUNDING)
        uses: dict[int, SliceUse] = {}
        for unit in gpu.units:
            sevenths, holder = self._units[unit].sevenths, self._on.get(unit)
            activity = 0.0 if holder is None else min(holder.busy_w * WHOLE / (sevenths * range_w), 1.0)
            uses[unit] = SliceUse(sevenths, holder is not None, activity)
        return uses

    def _draw(self, holder: Holder, power_w: float) -> None:
        if abs(power_w - holder.draw_w) > ROUNDING * power_w:
            self._settle(holder)
            self.held_w += power_w - holder.draw_w
            holder.draw_w = power_w

    def _settle(self, holder: Holder) -> None:
        now_s, integral = self._clock.now_s, self._clock.integrals[0]
        seconds, grid = now_s - holder.accounted_s, integral - holder.grid
        energy_j = holder.draw_w * seconds
        self._recorder.spent(holder.row, seconds, energy_j, holder.draw_w * grid / J_PER_KWH)
        holder.accounted_s, holder.grid = now_s, integral
        size = self._sizes[self._units[holder.unit].sevenths]
        size.held_s += seconds
        size.energy_j += energy_j
