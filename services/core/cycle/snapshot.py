"""What a policy sees: the cluster at one instant, as columns.

Jobs are columns of arrays rather than objects, because a round over ten thousand jobs, or a simulated year of rounds,
spends its time ranking them: an expression over a column is fifty times cheaper than a loop over objects.
``JobTable.ids[i]`` names the job at index ``i`` of every column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.carbon import CarbonOutlook
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.domain.gangs import GangTable
from services.core.domain.ids import JobId, NodeId
from services.core.domain.orders import PowerOrder
from services.core.domain.placement import Placement
from services.core.domain.plain_members import plain_members
from services.core.domain.transfers import Transfer
from services.core.domain.windows import Ending, Window
from services.core.parallel.graph import JobGraph
from services.core.parallel.iteration import Network

_UNKNOWN: Floats = np.empty(0)
_UNCOUNTED: Ints = np.empty(0, dtype=np.int64)
_NOWHERE: Bools = np.empty(0, dtype=np.bool_)

Curves = Mapping[tuple[int, ControlKind], ControlCurve]
"""What is known of one kind of job: a curve by GPU model (its index) and kind of control."""

Gangs = Mapping[int, GangTable]  #: What is known of one kind of job's gangs, by GPU model (its index)


@plain_members
class Phase(IntEnum):
    """A live job's state, coded for a column; jobs on hold and ended jobs are not in a snapshot."""

    QUEUED = 0
    STARTING = 1
    RUNNING = 2
    PREEMPTING = 3


QUEUED, STARTING, RUNNING, PREEMPTING = map(int, Phase)
"""The codes as plain integers: comparing a small column with an enum's member costs several times as much."""


@plain_members
class Trigger(StrEnum):
    """Why the round is held."""

    ACTIVE = "active"  #: The clock: priorities are recomputed and jobs may be preempted
    PASSIVE = "passive"
    """An arrival, an end or a release: free GPUs are filled from the last ranking, no job is preempted."""


@dataclass(frozen=True)
class JobTable:
    """The live jobs. Every array is (n_jobs,) unless said otherwise; a quantity not yet observed is NaN.

    Attributes:
        min_gpus, max_gpus, step_gpus: The sizes the gang may have.
        batch_min, batch_max: The range of total batches, samples, from which its user lets policies choose; -1 where
            the batch is fixed by the user; all -1 unless given.
    """

    ids: Sequence[JobId]  #: Job ids, unique
    tenants: Sequence[str]  #: The owner of each job
    submitted_s: Floats  #: When the job was accepted, UTC seconds
    waiting_since_s: Floats  #: When the job last began to wait; for a job that holds GPUs, when it got them
    phase: Ints  #: ``Phase`` codes
    min_gpus: Ints
    max_gpus: Ints
    step_gpus: Ints
    gpus: Ints  #: Number of devices held now, 0 for a queued job
    eligible: Bools
    """(n_jobs, n_gpu_models) whether the job may run on devices of that model. All False for a job that is stopping for
    good (cancelled, put on hold): it then claims nothing of what it releases."""
    preemptible: Bools  #: Whether the job may be stopped once it runs
    priority: Ints  #: The user's priority, higher first; 0 is usual
    deadline_s: Floats  #: UTC seconds, +inf if there is none
    attained_gpu_s: Floats  #: GPU seconds the job has held so far
    energy_j: Floats  #: Energy spent on the job so far
    carbon_gco2: Floats  #: Emissions so far
    gpu_power_w: Floats  #: Mean draw of one of the job's GPUs while it ran, without a limit if that is known
    efficiency_base: Floats  #: Progress per joule at the minimum gang (GREEN eq. 4, at t0); the unit cancels out.
    efficiency_now: Floats  #: Progress per joule at the present gang size since the last scaling event (GREEN eq. 2).
    progress: Floats  #: Share of the job's work done, 0..1
    placements: Sequence[Placement | None]  #: The devices the job holds, None for a queued job
    remaining_s: Floats = field(default_factory=lambda: _UNKNOWN)
    """Predicted time the job still needs with its smallest gang, seconds; all NaN unless given."""
    speed_curve: Ints = field(default_factory=lambda: _UNCOUNTED)
    """Row of ``Snapshot.speed_curves`` that predicts the job's speed by gang size, -1 if there is none; all -1 unless
    given."""
    data_zone: Ints = field(default_factory=lambda: _UNCOUNTED)
    """Where the job's checkpoint is, or will be, an index into ``Snapshot.outlooks``; -1 if it has none; all -1 unless
    given."""
    power_limit_w: Floats = field(default_factory=lambda: _UNKNOWN)
    """The limit set on each of the job's GPUs; NaN at the default, and unless given."""
    clock_mhz: Floats = field(default_factory=lambda: _UNKNOWN)
    """The clock each of its GPUs is locked to; NaN at the default, and unless given."""
    control_curve: Ints = field(default_factory=lambda: _UNCOUNTED)
    """Index into ``Snapshot.control_curves``, -1 where nothing is known; all -1 unless given."""
    goodput_curve: Ints = field(default_factory=lambda: _UNCOUNTED)
    """Row of ``Snapshot.goodput_curves`` that predicts the speed of a job that tunes its batch size, at its present
    progress; -1 if there is none; all -1 unless given."""
    batch_min: Ints = field(default_factory=lambda: _UNCOUNTED)
    batch_max: Ints = field(default_factory=lambda: _UNCOUNTED)
    shareable: Bools = field(default_factory=lambda: _NOWHERE)
    """Whether the job may share its GPU with another such job; all False unless given."""
    memory_gib: Floats = field(default_factory=lambda: _UNKNOWN)
    """The memory that the job needs on each GPU; NaN if unknown, and unless given."""
    asked_gpus: Ints = field(default_factory=lambda: _UNCOUNTED)
    """The size its user asked for; the smallest unless given."""
    flex: Floats = field(default_factory=lambda: _UNKNOWN)
    """How much slower grid orders may make the job, as a share of its speed; NaN where its user and tenant do not say,
    and unless given."""
    unordered_w: Floats = field(default_factory=lambda: _UNKNOWN)
    """What one of its GPUs drew before a grid order set the control values that it has now, watts, 0 where that is
    unknown; NaN where none did, and unless given."""

    def __post_init__(self) -> None:
        n_jobs = len(self.ids)
        columns: dict[str, Any] = self.__dict__
        if self.asked_gpus is _UNCOUNTED:
            columns["asked_gpus"] = self.min_gpus
        for name, column in columns.items():
            if column is _UNKNOWN:
                columns[name] = column = np.full(n_jobs, np.nan)
            elif column is _UNCOUNTED:
                columns[name] = column = np.full(n_jobs, -1, dtype=np.int64)
            elif column is _NOWHERE:
                columns[name] = column = np.zeros(n_jobs, dtype=np.bool_)
            if len(column) != n_jobs:
                raise DomainError(f"column {name} has {len(column)} rows, not {n_jobs}")

    @cached_property
    def index(self) -> Mapping[JobId, int]:
        return dict(zip(self.ids, range(len(self.ids)), strict=True))

    @classmethod
    def of_columns(cls, columns: Mapping[str, Any]) -> JobTable:
        """Return a table made from another's columns, unchecked; for a caller that makes one every round."""
        table = object.__new__(cls)
        table.__dict__.update(columns)
        return table

    def __len__(self) -> int:
        return self.phase.size

    def rows(self, keep: Bools) -> JobTable:
        """Return the table of the jobs that a mask selects: (n_jobs,)."""
        return JobTable(**_rows(self, keep))

    def gpus_by_tenant(self, which: Bools | None = None) -> dict[str, int]:
        """Return the GPUs that tenants hold with these jobs, (n_jobs,), or with all."""
        held: dict[str, int] = {}
        for job in np.flatnonzero(self.gpus > 0 if which is None else which & (self.gpus > 0)).tolist():
            held[self.tenants[job]] = held.get(self.tenants[job], 0) + self.gpus.item(job)
        return held

    def control_value(self, kind: ControlKind) -> Floats:
        """Return the present control value of each job, NaN at the default: (n_jobs,) watts or MHz."""
        return self.power_limit_w if kind is ControlKind.POWER_LIMIT else self.clock_mhz


@dataclass(frozen=True)
class NodeTable:
    """The nodes whose leases hold. Every column is (n_nodes,)."""

    ids: tuple[NodeId, ...]  #: Node ids, unique
    gpu_model: Ints  #: Index of the node's model in ``Snapshot.gpu_models``
    gpus: Ints  #: Number of devices on the node
    schedulable: Bools  #: False while the node is drained: running jobs continue, nothing new starts there
    free_devices: tuple[tuple[int, ...], ...]  #: Per node, the indices of free devices, ascending
    free_gpus: Ints = field(default_factory=lambda: _UNCOUNTED)  #: The number of free devices; counted unless given
    asleep: Bools = field(default_factory=lambda: _NOWHERE)
    """Powered down; a gang that starts there waits for the node to boot. All False unless given."""
    may_sleep: Bools = field(default_factory=lambda: _NOWHERE)
    """Whether plans may power the node down and up. All False unless given."""
    zone: Ints = field(default_factory=lambda: _UNCOUNTED)
    """Index of the node's grid in ``Snapshot.outlooks``; 0 unless given."""
    domains: Ints = field(default_factory=lambda: _UNCOUNTED)
    """(n_nodes, n_levels) the domain of each node at each of ``Snapshot.levels``, any numbers; none unless given."""

    @cached_property
    def all_schedulable(self) -> bool:
        return bool(self.schedulable.all())

    @cached_property
    def index(self) -> Mapping[NodeId, int]:
        return dict(zip(self.ids, range(len(self.ids)), strict=True))

    @cached_property
    def schedulable_gpus(self) -> int:
        return int(self.gpus[self.schedulable].sum())

    def __post_init__(self) -> None:
        columns, n_nodes = self.__dict__, len(self.ids)
        if self.free_gpus is _UNCOUNTED:
            columns["free_gpus"] = np.fromiter(map(len, self.free_devices), np.int64, n_nodes)
        if self.zone is _UNCOUNTED:
            columns["zone"] = np.zeros(n_nodes, dtype=np.int64)
        if self.domains is _UNCOUNTED:
            columns["domains"] = np.empty((n_nodes, 0), dtype=np.int64)
        for name in ("asleep", "may_sleep"):
            if columns[name] is _NOWHERE:
                columns[name] = np.zeros(n_nodes, dtype=np.bool_)

    @cached_property
    def free_total(self) -> int:
        """Number of free GPUs on all nodes, including those that take no work."""
        return int(self.free_gpus.sum())

    @cached_property
    def widest(self) -> int:
        """Number of devices on the largest node, at least 1."""
        return int(self.gpus.max(initial=1))

    @cached_property
    def _unchanging(self) -> dict[str, Any]:
        """The columns that ``with_free`` keeps."""
        kept = {"index": self.index, "all_schedulable": self.all_schedulable, "schedulable_gpus": self.schedulable_gpus}
        kept["widest"] = self.widest
        return {each.name: getattr(self, each.name) for each in fields(self)} | kept

    def rows(self, keep: Bools) -> NodeTable:
        """Return the table of the nodes that a mask selects: (n_nodes,)."""
        return NodeTable(**_rows(self, keep))

    def with_free(
        self, free_devices: tuple[tuple[int, ...], ...], free_gpus: Ints, free_total: int, asleep: Bools
    ) -> NodeTable:
        """Return the same nodes with these devices free and these nodes asleep; the rest is carried over, unchecked."""
        table = object.__new__(NodeTable)
        free = {"free_devices": free_devices, "free_gpus": free_gpus, "free_total": free_total, "asleep": asleep}
        table.__dict__.update(self._unchanging, **free)
        return table

    def __len__(self) -> int:
        return len(self.ids)


def _rows(table: JobTable | NodeTable, keep: Bools) -> dict[str, Any]:
    columns: dict[str, Any] = {each.name: getattr(table, each.name) for each in fields(table)}
    for name, column in columns.items():
        columns[name] = column[keep] if isinstance(column, np.ndarray) else tuple(compress(column, keep))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return columns


@dataclass(frozen=True)
class ServiceInstance:
    """A waiting service instance: a job of fixed size that is placed before any policy decides."""

    job_id: JobId  #: Its id; the job table has the rest
    gpus: int  #: The number of its devices, all on one node
    nodes: Bools  #: (n_nodes,) where it may run, on nodes that take work and are wide enough


@dataclass(frozen=True)
class SliceUnit:
    """A MIG slice that jobs on slices may run on, or a whole GPU that is kept for such jobs and counts as one."""

    node: int  #: Index of its node
    device: int  #: Its device number on that node
    gpu: int  #: The GPU that it is a slice of, or is
    sevenths: int  #: Its size
    free: bool  #: Whether no gang holds it
    uuid: str = ""  #: Identifies the slice: one that takes its place later has the same number but another UUID


@dataclass(frozen=True)
class SliceJob:
    """A job that waits for a slice: one device, not placed by any policy."""

    job_id: JobId  #: Its id; the job table has the rest
    sevenths: int  #: The size of the slice
    units: Bools  #: (n_slice_units,) where it may run, free or not: slices of its size, on nodes that take work


class Saves(NamedTuple):
    """When a job last said that it has saved its work, UTC seconds, and how long it is from one time to the next."""

    last_s: float
    every_s: float  #: NaN: unknown


@dataclass(frozen=True)
class TenantShares:
    """What decides between tenants; see ``services.core.cycle.tenants``."""

    used_gpu_s: Mapping[str, float]  #: Each tenant's usage that still counts, GPU seconds; 0 where none is given
    lasting_s: float  #: Mean life of usage, seconds
    turn_s: float  #: How long a running job keeps its GPUs from a tenant that has used as much as its own, seconds


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything a policy may know."""

    version: int  #: Identifies this snapshot; a plan names the one it was made from
    now_s: float  #: The only clock a policy sees, UTC seconds
    trigger: Trigger  #: Why the round is held
    gpu_models: tuple[str, ...]
    """Names of the GPU models, indexed by ``NodeTable.gpu_model`` and the columns of ``JobTable.eligible``."""
    jobs: JobTable
    nodes: NodeTable
    outlooks: tuple[CarbonOutlook, ...]
    """What is known about the grid of each zone, all for one signal, indexed by ``NodeTable.zone``; at least one.
    ``services.core.cycle.grids`` says which of them a job draws from."""
    tenant_gpu_quota: dict[str, int]  #: The most GPUs a tenant may hold at once, for tenants that have such a limit
    speed_curves: Floats = field(default_factory=lambda: np.empty((0, 0)))
    """(n_curves, n_sizes) predicted speed at 1, 2, ... GPUs relative to the speed at one, for policies that need
    predictions; indexed by ``JobTable.speed_curve``."""
    control_curves: tuple[Curves, ...] = ()
    """What is known of speed and power by control value, one entry per kind of job; indexed by
    ``JobTable.control_curve``."""
    settable: tuple[frozenset[ControlKind], ...] = ()
    """The kinds of control each GPU model (by index) takes; one that any node refuses is left out."""
    gangs: tuple[Gangs, ...] = ()
    """Predicted speed and power by gang size and control value, one entry per kind of job, indexed as
    ``control_curves``; empty if nothing predicts them."""
    idle_w: Floats = field(default_factory=lambda: _UNKNOWN)
    """(n_gpu_models,) draw of a free device with its share of the host, watts; empty: unknown."""
    host_w: Floats = field(default_factory=lambda: _UNKNOWN)
    """(n_gpu_models,) draw of hosts per device, watts; 0 where there is no meter, empty if there is none at all."""
    next_active_s: float = float("nan")  #: When the next active round is due, UTC seconds; NaN: unknown
    placement: str = "consolidated"
    """How gangs are placed unless the policy says otherwise: a name in ``placers.PLACERS``."""
    graphs: Mapping[JobId, JobGraph] = field(default_factory=dict[JobId, JobGraph])
    """What is known of jobs' stages, replicas and bytes, for placers that use it."""
    network: Network = field(default_factory=Network)
    """Bandwidths between and within nodes; ``server_gpus`` is the widest node's."""
    transfer: Transfer = field(default_factory=Transfer)  #: What it takes to move a checkpoint to another zone
    length_spreads: Mapping[JobId, float] = field(default_factory=dict[JobId, float])
    """Standard deviation of jobs' predicted lengths, as a share of the prediction; jobs for which it is not known are
    left out."""
    measured_w: float = float("nan")
    """What the cluster draws by its meters, including hosts, watts, with all changes in effect; NaN: unknown, or
    something has just changed."""
    measures: bool = False  #: Whether gangs can be measured at each control value (``ProfileControls``)
    measuring: frozenset[JobId] | None = None  #: The jobs whose gangs are being measured in this way; None: unknown
    goodput_curves: Floats = field(default_factory=lambda: np.empty((0, 2, 0)))
    """(n_curves, 2, n_sizes) predicted speed at 1, 2, ... GPUs with the batch size tuned to them, on one node and over
    several, in one unit per curve; indexed by ``JobTable.goodput_curve``."""
    goodput_gains: Floats = field(default_factory=lambda: np.empty((0, 2, 0)))
    """Same shape: that speed relative to the one with the user's own batch; empty: unknown."""
    goodput_batches: Ints = field(default_factory=lambda: np.empty((0, 2, 0), dtype=np.int64))
    """Same shape: the total batch, samples, at which that speed is reached."""
    services: tuple[ServiceInstance, ...] = ()
    """The service instances that wait, oldest first. ``run_cycle`` places them; a policy sees none. Those that start or
    run are in no table, nor are their devices; quotas and guarantees are reduced by them."""
    services_gpus: int = 0
    """Devices that service instances hold or have reserved on nodes in the table, and GPUs that are cut or kept for
    others; neither are among the devices of the table."""
    services_w: float = 0.0  #: What those draw, including their share of the host, watts; not in ``measured_w``
    slice_units: tuple[SliceUnit, ...] = ()  #: The slices that jobs may run on; never devices of the node table
    slice_jobs: tuple[SliceJob, ...] = ()
    """The jobs that wait for one, in the order in which they get it. ``run_cycle`` places them; a policy sees none.
    Those that hold one are in no table; quotas and guarantees are reduced by them."""
    shared: tuple[tuple[JobId, JobId], ...] = ()
    """The pairs of gangs that share a GPU, each of one device, in any order. ``run_cycle`` shows policies one of each
    pair in the table, and the other among the ``guests``."""
    guests: JobTable | None = None
    """The jobs that a policy sees besides the table: each shares the GPU of a job in the table; quotas and guarantees
    are reduced by them. None: there are none."""
    gpu_memory_gib: Floats = field(default_factory=lambda: _UNKNOWN)
    """(n_gpu_models,) memory of a device; empty: unknown."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Each tenant's share of the GPUs relative to others', above 0; 1 where none is given."""
    tenant_gpus_in_cells: Mapping[str, int] = field(default_factory=dict[str, int])
    """The GPUs that tenants' jobs hold in other installations: used, when GPUs are shared."""
    shares: TenantShares | None = None
    """What tenants have used, where a round divides GPUs between them (``services.core.cycle.tenants``)."""
    tenant_guarantees: Mapping[str, int] = field(default_factory=dict[str, int])
    """The GPUs that tenants are guaranteed (``services.core.cycle.tenants``); none where not given."""
    undivided: frozenset[int] = frozenset()
    """The GPU models, by index, on whose nodes an engine with a queue of its own divides the GPUs."""
    bound: Mapping[JobId, tuple[NodeId, ...]] = field(default_factory=dict[JobId, tuple[NodeId, ...]])
    """The nodes on which a job has to start, all of them and in this order, because nothing else has its checkpoint;
    jobs that may start anywhere are left out. See ``services.core.cycle.bound``."""
    levels: tuple[str, ...] = ()
    """The levels of the network between a node, the first of them, and the whole cluster, the narrowest first; empty if
    nothing is known of any, and no job names one. See ``services.core.cycle.levels``."""
    within: Mapping[JobId, int] = field(default_factory=dict[JobId, int])
    """The level (its index) in a single domain of which a gang must lie, -1 where there is no such level; jobs that
    name none are left out."""
    near: Mapping[JobId, int] = field(default_factory=dict[JobId, int])
    """The same for gangs that only should, of levels that there are."""
    reasons: bool = True
    """Whether anyone reads why jobs wait. If not, as in the millions of rounds of a simulation, a plan has the same
    starts and stops, and no holds."""
    orders: tuple[PowerOrder, ...] = ()
    """The grid's orders that are in force or announced. Policies need not look at them: the layer of
    ``services.core.policies.orders`` meets them under every policy."""
    windows: tuple[Window, ...] = ()
    """The reservations and maintenances that are not over yet; kept by the layer of ``services.core.policies.windows``
    under every policy."""
    endings: Mapping[JobId, Ending] = field(default_factory=dict[JobId, Ending])
    """How gangs of jobs end, where there are windows; jobs that have no time limit and the usual grace period are left
    out."""
    min_run_s: float = 0.0
    """How long a gang holds its GPUs before a policy may stop it, seconds; kept by the layer of
    ``services.core.policies.sparing`` under every policy."""
    saves: Mapping[JobId, Saves] = field(default_factory=dict[JobId, Saves])
    """When jobs last saved their work, now or in a run before, where they tell."""
    save_wait_s: float = 0.0  #: How long a gang that a policy stops may be waited for to save its work, seconds
    limit_range_w: Floats = field(default_factory=lambda: np.empty((0, 2)))
    """(n_gpu_models, 2) the lowest power limit that devices take and their default one, watts, NaN where devices do not
    say; empty: unknown."""

    def again(self, **changed: Any) -> Snapshot:
        """Return the snapshot with these fields changed, unchecked; for a caller that makes one every round."""
        following = object.__new__(Snapshot)
        columns = following.__dict__
        columns.update(self.__dict__)
        columns.update(changed)
        return following

    def held_by(self, job: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return the nodes in the table (indices) on which a job holds devices, with those devices."""
        placement, index = self.jobs.placements[job], self.nodes.index
        shares = () if placement is None else placement.shares
        return [(index[each.node_id], each.devices) for each in shares if each.node_id in index]

    def less(self, held: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Return the quotas and guarantees of tenants that hold so many GPUs besides what the snapshot shows."""
        return {
            name: {tenant: max(gpus - held.get(tenant, 0), 0) for tenant, gpus in getattr(self, name).items()}
            for name in ("tenant_gpu_quota", "tenant_guarantees")
        }

    def control_curve(self, job: int, gpu_model: int, kind: ControlKind) -> ControlCurve | None:
        """Return what is known of a job's speed and power by one kind of control on a GPU model; None if nothing is."""
        row = int(self.jobs.control_curve[job])
        return self.control_curves[row].get((gpu_model, kind)) if row >= 0 else None

    def takes(self, gpu_model: int, kind: ControlKind) -> bool:
        return gpu_model < len(self.settable) and kind in self.settable[gpu_model]

    @property
    def confines(self) -> bool:
        """Whether some jobs may start on certain nodes alone, or within one domain of them."""
        return bool(self.bound) or bool(self.within)

    def confined(self, job_id: JobId) -> bool:
        return job_id in self.bound or job_id in self.within

    @property
    def total_gpus(self) -> int:
        """Number of GPUs on nodes that accept work: the capacity that a policy shares out."""
        return self.nodes.schedulable_gpus
