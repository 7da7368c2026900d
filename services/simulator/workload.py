"""The inputs of a simulation: jobs as columns, how they behave, the cluster, and the grid.

Readers and recipes make these; the engine runs them. True and predicted behaviour are kept apart: the engine runs on
the true one and shows policies only the predicted one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.carbon import CarbonCurve, Signal
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.domain.gpus import SLICE_SEVENTHS, GpuModel, gpu_model, mig_memory_gib
from services.core.domain.mig import WHOLE, SlicePlace, placed, sevenths_of
from services.core.domain.prices import PriceCurve
from services.core.parallel.graph import JobGraph
from services.core.profiles.recurrence import Runs

ANY_MODEL = "*"  #: The key of a profile's behaviour on GPU models it does not name


@dataclass(frozen=True)
class Behaviour:
    """How a kind of job runs on one GPU model, by gang size: linear between sizes, the nearest size outside them."""

    gpus: Ints  #: (n_sizes,) gang sizes, ascending
    speed: Floats  #: (n_sizes,) seconds of ``Workload.work_s`` done per second, on one node. 1 is the reference gang.
    gpu_power_w: Floats  #: (n_sizes,) mean draw of each of the gang's GPUs, watts
    spread_speed: Floats | None = None  #: (n_sizes,) speed of a gang that spans nodes; None if spanning costs nothing
    spread_power_w: Floats | None = None  #: (n_sizes,) mean draw of each GPU of such a gang; None: as on one node
    controls: Mapping[ControlKind, ControlCurve] = field(default_factory=dict[ControlKind, ControlCurve])
    """Speed and power of one GPU by power limit and by clock, at the smallest size; wider gangs follow in proportion. A
    control without an entry was not measured and has no effect."""
    power_error: float = 0.0  #: For a prediction: the mean error it states for its powers, as a share of them
    batches: Ints | None = None
    """(2, n_sizes) total batch on one node and over several, samples, if the batch is tuned."""

    def __post_init__(self) -> None:
        optional = (self.spread_speed, self.spread_power_w)
        columns = [self.speed, self.gpu_power_w, *(column for column in optional if column is not None)]
        if self.gpus.ndim != 1 or not self.gpus.size or any(column.shape != self.gpus.shape for column in columns):
            raise DomainError("a behaviour needs one speed and one power per gang size")
        if self.gpus[0] < 1 or bool((np.diff(self.gpus) <= 0).any()):
            raise DomainError("gang sizes ascend from at least 1")
        if not all(np.isfinite(column).all() and (column > 0).all() for column in columns):
            raise DomainError("speeds and powers are finite and above 0")

    def speed_at(self, gpus: Ints, *, spread: bool = False) -> Floats:
        """Return the speed at each size, work seconds per second; same shape."""
        speed = self.spread_speed if spread and self.spread_speed is not None else self.speed
        return np.interp(gpus, self.gpus, speed)

    def power_w_at(self, gpus: Ints, *, spread: bool = False) -> Floats:
        """Return the draw of each of the gang's GPUs at each size, watts; same shape."""
        power = self.spread_power_w if spread and self.spread_power_w is not None else self.gpu_power_w
        return np.interp(gpus, self.gpus, power)

    def batches_at(self, gpus: Ints) -> Ints:
        """Return the total batch at each size on one node and over several, 0 if it is not tuned: (2, n)."""
        if self.batches is None:
            return np.zeros((2, gpus.size), dtype=np.int64)
        return np.array([np.interp(gpus, self.gpus, row).round() for row in self.batches], dtype=np.int64)

    def factors_at(self, values: Mapping[ControlKind, float]) -> tuple[float, float]:
        """Return the factors of speed and power under the controls in force.

        A board with both a power limit and a locked clock obeys both: the one that slows it more decides.
        """
        factors: list[tuple[float, float]] = []
        for kind, value in values.items():
            if (curve := self.controls.get(kind)) is not None:
                speed, power_w = curve.at(value)
                factors.append((speed, power_w / curve.at(None)[1]))
        return min(factors, default=(1.0, 1.0))


@dataclass(frozen=True)
class JobProfile:
    """A kind of job."""

    name: str  #: For reports, such as ``bert, batch 12``
    true: Mapping[str, Behaviour]  #: Actual behaviour by GPU model, ``ANY_MODEL`` for the others
    predicted: Mapping[str, Behaviour] = field(default_factory=dict[str, Behaviour])
    """The same as predicted; shown to policies that need speeds ahead. Equal to ``true`` unless given."""
    host_power_w: float = 0.0
    """CPU and static draw of the host per GPU the job holds, watts, in addition to ``gpu_power_w``."""
    checkpoint_s: float = 10.0
    """Time to write a checkpoint when stopped; the gang holds its GPUs and draws power without working."""
    restart_s: float = 30.0  #: Time from getting GPUs to the first step of work; also paid at the first start
    graph: JobGraph | None = None
    """Stages, replicas and bytes. A gang that spans nodes is then slower than on one by the ratio of their iteration
    times on the graph, whatever ``Behaviour.spread_speed`` says."""
    iteration_s: float = 1.0  #: Seconds of ``Workload.work_s`` per iteration, for predictors, which count iterations
    adaptive: Callable[[str], tuple[Behaviour, ...]] | None = None
    """For a GPU model, how the job runs if the policy lets it tune its batch size to its gang, by stages of equal
    shares of its work; None if it cannot tune it, and runs as usual."""
    batch_range: tuple[int, int] = (-1, -1)  #: The smallest and the largest total batch that it then uses, samples
    slice_speeds: Mapping[int, float] = field(default_factory=dict[int, float])
    """Measured speed on a MIG slice relative to one whole GPU, by its sevenths; above 0."""

    def __post_init__(self) -> None:
        if not self.true:
            raise DomainError(f"profile {self.name} has no GPU model")
        if not all(0 < speed < math.inf for speed in self.slice_speeds.values()):
            raise DomainError(f"profile {self.name} has a speed on slices that is not above 0")
        if not (self.host_power_w >= 0 and self.checkpoint_s >= 0 and self.restart_s >= 0):
            raise DomainError(f"profile {self.name} has a negative power or duration")

    def truth(self, gpu_model: str) -> Behaviour | None:
        """Return the true behaviour on a GPU model, None if the job cannot run on it."""
        return self.true.get(gpu_model) or self.true.get(ANY_MODEL)

    def slice_speed(self, sevenths: int) -> float:
        """Return the speed on a slice relative to one GPU: as measured, otherwise the slice's share of the compute."""
        return self.slice_speeds.get(sevenths, sevenths / WHOLE)

    def tuned(self, gpu_model: str) -> tuple[Behaviour, ...]:
        """Return the true behaviour with the batch tuned, by stage; a single stage if the job does not tune."""
        truth = self.truth(gpu_model)
        if truth is None:
            return ()
        return (truth,) if self.adaptive is None else self.adaptive(gpu_model)

    def prediction(self, gpu_model: str) -> Behaviour | None:
        """Return the predicted behaviour on a GPU model, or the true one if there is no prediction."""
        return self.predicted.get(gpu_model) or self.predicted.get(ANY_MODEL) or self.truth(gpu_model)


@dataclass(frozen=True)
class Recurrence:
    """Which jobs of a workload are runs of the same recurring job; ``group`` and ``user``: (n_jobs,) ids."""

    group: Ints
    user: Ints
    history: Runs  #: Jobs that ended before the first submission; amounts are iterations (``JobProfile.iteration_s``)


@dataclass(frozen=True)
class Gates:
    """Which jobs must wait for others.

    All jobs of a simulation succeed, so every kind of dependency waits simply for the other job's end.
    """

    array: tuple[str, ...]  #: (n_jobs,) the array of each, empty for a single job
    max_running: Mapping[str, int]
    """By array: the most of its jobs that may hold GPUs at once; without an entry, no limit."""
    after: tuple[tuple[str, ...], ...]  #: (n_jobs,) what each waits for: ids of jobs and arrays


@dataclass(frozen=True)
class Workload:
    """Jobs in order of submission. Every column is (n_jobs,).

    Attributes:
        min_gpus, max_gpus, step_gpus: The sizes an elastic policy may give it.
        priority, preemptible, deadline_s: As in a submission; None for 0, True and +inf.
    """

    ids: tuple[str, ...]  #: Unique
    tenants: tuple[str, ...]  #: Owners
    submitted_s: Floats  #: UTC seconds, ascending
    work_s: Floats
    """Seconds the job takes at its profile's reference gang (speed 1), without start and checkpoints; > 0."""
    requested_gpus: Ints  #: What the user asked for, which policies that do not scale jobs use
    min_gpus: Ints
    max_gpus: Ints
    step_gpus: Ints
    profile: Ints  #: Index into ``profiles``
    profiles: tuple[JobProfile, ...]  #: The kinds of jobs
    predicted_work_s: Floats | None = None
    """``work_s`` as predicted, NaN without a prediction. None: exactly ``work_s``."""
    priority: Ints | None = None
    preemptible: Bools | None = None
    shareable: Bools | None = None  #: Which jobs may share a GPU; None: all
    deadline_s: Floats | None = None
    flex: Floats | None = None  #: How much slower orders of the grid may make each, as a share, NaN: unsaid; None: all
    gpu_model: tuple[str, ...] | None = None  #: The model each job must have, empty for any; None: any for all
    zone: tuple[str, ...] | None = None  #: The zone in which each job's data are, empty for any; None: any for all
    within: Mapping[str, int] = field(default_factory=dict[str, int])
    """The level of the network in one domain of which a job must lie, by its id; -1: one that there is not."""
    near: Mapping[str, int] = field(default_factory=dict[str, int])  #: The same of jobs that should
    recurrence: Recurrence | None = None  #: What predictors learn from; None: no job is known to recur
    gates: Gates | None = None  #: Arrays and dependencies; None: every job may start once it is submitted
    slice_sevenths: Ints | None = None
    """The size of the MIG slice that each job asks for instead of GPUs, 0 for one that asks for GPUs; a slice counts as
    one GPU in all sizes. None: all ask for GPUs."""
    slice_memory_gib: Floats | None = None  #: The memory that the slice must have; None: any size will do
    name: str = ""  #: For reports
    notes: tuple[str, ...] = ()  #: What was dropped or mapped on the way here, and why; for people

    def __post_init__(self) -> None:
        apart = ("profiles", "notes")
        columns = [
            each for name, each in vars(self).items() if isinstance(each, (np.ndarray, tuple)) and name not in apart
        ]
        if self.recurrence is not None:
            columns += [self.recurrence.group, self.recurrence.user]
        if self.gates is not None:
            columns += [self.gates.array, self.gates.after]
        if any(len(column) != len(self.ids) for column in columns):
            raise DomainError("every column of a workload has one row per job")
        if len(set(self.ids)) != len(self.ids):
            raise DomainError("the ids of a workload's jobs are unique")
        if not np.isfinite(self.submitted_s).all() or bool((np.diff(self.submitted_s) < 0).any()):
            raise DomainError("a workload's jobs stand in order of submission")
        if not (np.isfinite(self.work_s).all() and (self.work_s > 0).all()):
            raise DomainError("every job of a workload has work above 0 s")
        low, high, step = self.min_gpus, self.max_gpus, self.step_gpus
        if bool(((low < 1) | (step < 1) | (high < low) | ((high - low) % np.maximum(step, 1) != 0)).any()):
            raise DomainError("a gang's sizes go from min to max in whole steps")
        asked = self.requested_gpus
        if bool(((asked < low) | (asked > high) | ((asked - low) % step != 0)).any()):
            raise DomainError("the size a user asked for is one of the gang's sizes")
        if self.slice_sevenths is not None:
            on_slices = self.slice_sevenths != 0
            if not np.isin(self.slice_sevenths[on_slices], SLICE_SEVENTHS).all():
                raise DomainError(f"slices have {', '.join(map(str, SLICE_SEVENTHS))} sevenths of a GPU")
            if bool((high[on_slices] != 1).any()):
                raise DomainError("a job on a slice has exactly one")
        if len(self.ids) and not (0 <= int(self.profile.min()) <= int(self.profile.max()) < len(self.profiles)):
            raise DomainError("every job names one of the workload's profiles")

    def __len__(self) -> int:
        return len(self.ids)

    def rigid(self) -> Workload:
        """Return the same jobs fixed at the sizes their users asked for."""
        asked = self.requested_gpus
        return replace(self, min_gpus=asked, max_gpus=asked, step_gpus=np.ones_like(asked))


@dataclass(frozen=True)
class NodeGroup:
    """A group of identical nodes."""

    count: int  #: How many
    gpus: int  #: GPUs of each node, including those that are cut
    model: GpuModel  #: The model of their GPUs
    schedulable: bool = True  #: Nodes that are not schedulable keep what runs on them, and get nothing new
    cuts: tuple[tuple[SlicePlace, ...], ...] = ()
    """How each GPU of a node is cut into MIG slices, by its index; a GPU without slices or without an entry is
    whole."""
    slice_memory_gib: Mapping[int, float] = field(default_factory=dict[int, float])
    """Memory of the slices, by size, if it differs from the model's."""
    zone: str = ""  #: The grid zone; empty: that of the run's first grid

    @property
    def whole(self) -> tuple[int, ...]:
        """The indices of the GPUs of a node that are not cut."""
        return tuple(gpu for gpu in range(self.gpus) if not (gpu < len(self.cuts) and self.cuts[gpu]))

    @property
    def slices(self) -> int:
        return sum(map(len, self.cuts))


@dataclass(frozen=True)
class ClusterSpec:
    """The nodes of a cluster, in homogeneous groups."""

    groups: tuple[NodeGroup, ...]

    @property
    def gpus(self) -> int:
        return sum(group.count * group.gpus for group in self.groups)

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones of its groups, each once; an empty one for groups that name none."""
        return tuple(dict.fromkeys(group.zone for group in self.groups))

    @property
    def widest_node_gpus(self) -> int:
        return max(group.gpus for group in self.groups)

    @property
    def devices(self) -> int:
        """All GPUs that are not cut, and all slices."""
        return sum(group.count * (len(group.whole) + group.slices) for group in self.groups)

    @classmethod
    def parse(cls, text: str) -> ClusterSpec:
        """Return the cluster described by ``32x2:RTX3090[,4x8:A100-SXM4-80GB]``: nodes x GPUs of each, and the model.

        ``GB=2x8:A100,SE=2x8:A100`` lies in two zones.

        A model can be given by any of its names (``A100`` is ``A100-SXM4-40GB``); see ``services.core.domain.gpus``.
        Brackets after it say how its GPUs are cut into MIG slices: ``2x4:A100[3g,2g,2g]`` cuts all in the same way,
        ``2x4:A100[3g,2g,2g/1g,1g/whole/whole]`` each GPU of a node in its own.

        Raises:
            DomainError: The text is not of that form, a model is unknown, slices do not fit on it together, or there is
                no GPU at all.
        """
        groups: list[NodeGroup] = []
        for part in re.split(r",(?![^\[]*\])", text):
            match = re.fullmatch(r"\s*(?:([\w.-]+)=)?(\d{1,6})x(\d{1,3}):([\w.-]+)(?:\[([^\[\]]*)\])?\s*", part)
            if match is None:
                raise DomainError(f"{part!r} is not a node group of the form NODESxGPUS:MODEL, such as 32x2:RTX3090")
            count, gpus, name, cut = int(match[2]), int(match[3]), match[4], match[5]
            if not count or not gpus:
                raise DomainError(f"{part!r} has no GPU")
            model = gpu_model(name)
            cuts = () if cut is None else _cuts(cut, gpus, model)
            groups.append(NodeGroup(count, gpus, model, cuts=cuts, zone=match[1] or ""))
        spec = cls(tuple(groups))
        if len(spec.zones) > 1 and any(group.cuts for group in groups):
            raise DomainError("nodes whose GPUs are cut into slices are simulated in one zone only")
        return spec


def _cuts(text: str, gpus: int, model: GpuModel) -> tuple[tuple[SlicePlace, ...], ...]:
    """Return a node's cut by ``3g,2g,2g`` or ``3g,2g,2g/whole``; ``DomainError`` if the model cannot be cut so."""
    if mig_memory_gib(model) is None:
        raise DomainError(f"{model.name} cannot be cut into MIG slices, so it takes no [{text}]")
    parts = [part.strip() for part in text.split("/")]
    if len(parts) not in (1, gpus):
        raise DomainError(f"[{text}] says how {len(parts)} GPUs are cut, and the nodes have {gpus}")
    sizes = [[] if part == "whole" else [sevenths_of(name.strip()) for name in part.split(",")] for part in parts]
    return tuple(map(placed, sizes if len(parts) > 1 else sizes * gpus))


class ForecastKind(StrEnum):
    """What a policy sees of the hours ahead."""

    PERFECT = "perfect"  #: What will really be
    PERSISTENCE = "persistence"  #: The same hour of the last day that is known
    FILE = "file"  #: Forecasts as they were issued at the time


@dataclass(frozen=True)
class IssuedForecasts:
    """Forecasts as issued. Before the first issue a policy sees persistence."""

    issued_s: Floats  #: (k,) when each was published, UTC seconds, ascending
    starts_s: Floats  #: (k,) when the first value of each takes effect
    step_s: float  #: How long each value holds
    intensity_gco2_per_kwh: Floats  #: (k, steps)

    @property
    def ends_s(self) -> Floats:
        """(k,) until when the last value of each holds."""
        return self.starts_s + self.step_s * self.intensity_gco2_per_kwh.shape[1]


@dataclass(frozen=True)
class SitePrices:
    """What the site pays for electricity over the simulated time, and after it as on its last day."""

    curve: PriceCurve
    currency: str
    day_ahead: bool = False  #: Whether prices are known no sooner than the market has met, the day before
    demand_per_kw_month: float = 0.0  #: For the highest mean of an hour in each calendar month, UTC


@dataclass(frozen=True)
class CarbonTrace:
    """The grid over the simulated time; it should begin a day before the first job, so that the past is known.

    A simulation that outlasts the trace repeats its last day over and over; the result says for how long.
    """

    zone: str  #: Such as ``SE``
    signal: Signal  #: What the intensities measure
    curve: CarbonCurve  #: The true intensity
    forecast: ForecastKind = ForecastKind.PERFECT  #: What policies know of the hours ahead
    issued: IssuedForecasts | None = None
    """The forecasts for ``ForecastKind.FILE``, including those from before the simulated time."""
    before: CarbonCurve | None = None
    """The true intensity before ``curve``, which shows how far off the first issues were; None: unknown."""
    notes: tuple[str, ...] = ()  #: Gaps filled, rows dropped, the source and its licence; for people
    prices: SitePrices | None = None  #: Of electricity there; None: unknown

    def __post_init__(self) -> None:
        if self.forecast is ForecastKind.FILE and self.issued is None:
            raise DomainError("a trace with issued forecasts needs them")
