"""How the simulated jobs run at each size, looked up once per kind of job, GPU model and size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.core.cycle.graph_placing import extremes_s, mapper_of
from services.core.cycle.snapshot import Curves, Gangs
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.controls import ControlKind
from services.core.domain.gangs import GangTable
from services.core.domain.ids import NodeId
from services.core.domain.placement import Placement
from services.core.domain.solving import Method
from services.core.parallel.iteration import Network
from services.core.policies.orders.tables import under_limit
from services.core.profiles.boards import board_of
from services.simulator.engine.options import TUNING_SHARES, EngineOptions
from services.simulator.workload import Behaviour, ClusterSpec, JobProfile, Workload

ControlValues = tuple[tuple[ControlKind, float], ...]
"""The controls set on a gang's devices, by kind; empty at the defaults."""
Shares = tuple[int, ...]  #: How many GPUs a gang has on each node, ascending; empty if that makes no difference
Key = tuple[int, int, int, int, ControlValues, Shares, int, int]

_TUNING_DRAW = 1  #: Beside the seed, so that other draws by it stay independent
FIXED_BATCH = -1  #: The stage of a job that keeps the batch size its user chose


@dataclass(frozen=True, slots=True)
class Run:
    """A running gang."""

    speed: float  #: Work seconds per second
    gpu_w: float  #: Total draw of its GPUs, watts
    draw_w: float  #: Total draw with its share of the hosts, watts
    efficiency: float  #: Work seconds per joule
    restart_s: float  #: As in the job's profile


class Behaviours:
    """True and predicted behaviour of a workload's jobs on a cluster's GPU models."""

    def __init__(
        self,
        workload: Workload,
        models: tuple[str, ...],
        options: EngineOptions,
        network: Network,
        placement: str,
        domains: Mapping[NodeId, Sequence[int]],
    ) -> None:
        """Take what the snapshot has; ``domains``: of each node, at each level of the network."""
        self._profiles, self._models, self._options = workload.profiles, models, options
        self._network, self._domains = network, domains
        self._method = Method.REFINED if placement == "refined" else Method.HEAVY_EDGE
        self._runs: dict[Key, Run] = {}
        self._stages: dict[tuple[int, int], int] = {}

    def run(
        self,
        profile: int,
        model: int,
        placement: Placement,
        control_values: ControlValues = (),
        stage: int = FIXED_BATCH,
    ) -> Run:
        """Return how a gang runs in a placement, on a GPU model, under its controls, at a stage of its work.

        Raises:
            KeyError: The job cannot run on that model.
        """
        on = placement.shares
        by_graph = len(on) > 1 and self._profiles[profile].graph is not None
        shares = tuple(sorted(len(share.devices) for share in on)) if by_graph else ()
        level = len(self._network.within_bytes_per_s)
        if by_graph and level:
            common = zip(*(self._domains[share.node_id] for share in on), strict=True)
            level = next((at for at, each in enumerate(common) if len({*each}) == 1), level)
        key = (profile, model, placement.gpus, len(on), control_values, shares, stage, level)
        found = self._runs.get(key)
        if found is None:
            found = self._runs[key] = self._look_up(key)
        return found

    def stages(self, profile: int, model: int) -> int:
        """Return how many stages a job of this kind goes through on a model when it tunes its batch."""
        found = self._stages.get((profile, model))
        if found is None:
            found = self._stages[profile, model] = len(self._profiles[profile].tuned(self._models[model]))
        return found

    def _look_up(self, key: Key) -> Run:
        profile, model, gpus, nodes, control_values, shares, stage, level = key
        spread = nodes > 1 and not shares
        kind, name = self._profiles[profile], self._models[model]
        behaviour = kind.truth(name) if stage == FIXED_BATCH else kind.tuned(name)[stage]
        if behaviour is None:
            raise KeyError(f"{kind.name} does not run on {name}")
        size = np.array([gpus])
        slower, cooler = behaviour.factors_at(dict(control_values))
        board_w = float(behaviour.power_w_at(size, spread=spread)[0])
        limit_w = dict(control_values).get(ControlKind.POWER_LIMIT)
        if limit_w is not None and self._options.orders and ControlKind.POWER_LIMIT not in behaviour.controls:
            idle_w = min(board_of(name).idle_w, 0.5 * board_w)
            speeds, powers_w = under_limit(np.array([limit_w]), board_w, idle_w)
            slower, cooler = slower * float(speeds[0]), cooler * float(powers_w[0]) / board_w
        speed = float(behaviour.speed_at(size, spread=spread)[0]) * slower * self._pace(kind, gpus, shares, level)
        gpu_w = gpus * board_w * cooler
        draw_w = gpu_w + float(self._options.host_w(kind.host_power_w, size, np.array([nodes]))[0])
        return Run(speed, gpu_w, draw_w, speed / draw_w, kind.restart_s)

    def _pace(self, kind: JobProfile, gpus: int, shares: Shares, level: int) -> float:
        """Return the iteration time on one node over that when spread as ``shares``, according to the graph."""
        if not shares:
            return 1.0
        mapper = mapper_of(kind.graph, gpus, self._network.within(level))
        counts = mapper.counts(np.array(shares, dtype=np.int64), self._method)
        spread_s = mapper.model.torn_s if counts is None else float(mapper.model.time_s(counts))
        return mapper.model.whole_s / spread_s if spread_s > 0 else 1.0


class GangTables:
    """The gang predictions that policies see, by size, and by control value where it is known.

    A gang wider than a node is assumed to span as few nodes as possible. Gangs that span more draw slightly less,
    because their boards wait longer.
    """

    def __init__(
        self, workload: Workload, cluster: ClusterSpec, models: tuple[str, ...], options: EngineOptions
    ) -> None:
        self._profiles, self._models, self._options = workload.profiles, models, options
        widths = [(group.model.name, max(len(group.whole), 1)) for group in cluster.groups]
        self._widest = [max(gpus for name, gpus in widths if name == model) for model in self._models]
        doublings = 1 << np.arange(int(workload.max_gpus.max(initial=1)).bit_length(), dtype=np.int64)
        self._sizes = np.unique(
            np.concatenate((doublings, workload.min_gpus, workload.max_gpus, workload.requested_gpus))
        )
        self._known: tuple[Curves, ...] = ()
        self._tables: tuple[Gangs, ...] = ()

    def shown(self, known: tuple[Curves, ...]) -> tuple[Gangs, ...]:
        """Return the tables, one entry per profile; ``known``: as ``Snapshot.control_curves``."""
        if known is not self._known:
            before = self._known or (None,) * len(known)
            tables = self._tables or ({},) * len(known)
            self._tables = tuple(
                table if curves is old and table else self._of(profile, curves)
                for profile, curves, old, table in zip(self._profiles, known, before, tables, strict=True)
            )
            self._known = known
        return self._tables

    def _of(self, profile: JobProfile, curves: Curves) -> Gangs:
        predicted = ((model, profile.prediction(name)) for model, name in enumerate(self._models))
        return {model: self._table(profile, each, model, curves) for model, each in predicted if each is not None}

    def _table(self, profile: JobProfile, behaviour: Behaviour, model: int, curves: Curves) -> GangTable:
        sizes, spans = self._sizes, self._sizes > self._widest[model]
        speed = np.where(spans, behaviour.speed_at(sizes, spread=True), behaviour.speed_at(sizes))
        board_w = np.where(spans, behaviour.power_w_at(sizes, spread=True), behaviour.power_w_at(sizes))
        host_w = self._options.host_w(profile.host_power_w, sizes, -(-sizes // self._widest[model]))
        kind = next((kind for kind in ControlKind if (model, kind) in curves), None)
        if kind is None:
            drawn_w = (sizes * board_w + host_w)[:, None]
            return GangTable(sizes, speed[:, None], drawn_w, None, np.ones(1), behaviour.power_error)
        curve = curves[model, kind]
        cooler = curve.power_w / curve.at(None)[1]
        return GangTable(
            sizes,
            speed[:, None] * curve.speed,
            (sizes * board_w)[:, None] * cooler + host_w[:, None],
            kind,
            curve.values,
            behaviour.power_error,
        )


def who_tunes(n_jobs: int, options: EngineOptions) -> Bools:
    """Return which jobs may tune their batch size to the gang, drawn at random from the seed: (n_jobs,)."""
    draws = np.random.default_rng([options.seed, _TUNING_DRAW]).random(n_jobs)
    return draws < TUNING_SHARES[options.batch_tuning]


def eligible_models(workload: Workload, models: tuple[str, ...]) -> Bools:
    """Return which jobs may run on which models: (n_jobs, n_models)."""
    runs = np.array([[profile.truth(model) is not None for model in models] for profile in workload.profiles])
    eligible = runs.reshape(len(workload.profiles), len(models))[workload.profile]
    if workload.gpu_model is not None:
        wanted = np.array(workload.gpu_model)
        for at, model in enumerate(models):
            eligible[:, at] &= (wanted == "") | (wanted == model)
    return eligible


def predicted_s(workload: Workload, models: tuple[str, ...], network: Network) -> Floats:
    """Return each job's predicted duration at its smallest gang, on the first model it may use: (n_jobs,).

    A gang wider than a node is assumed to span as few nodes as possible, at the cost its graph gives if it has one.
    """
    work = workload.work_s if workload.predicted_work_s is None else workload.predicted_work_s
    speeds = np.ones(len(workload))
    for at, profile in enumerate(workload.profiles):
        of_kind = np.flatnonzero(workload.profile == at)
        behaviour = next(filter(None, map(profile.prediction, models)), None)
        if behaviour is not None and of_kind.size:
            sizes = workload.min_gpus[of_kind]
            speeds[of_kind] = behaviour.speed_at(sizes)
            for gpus in np.unique(sizes).tolist() if profile.graph is not None else ():
                mapper = mapper_of(profile.graph, gpus, network)
                least_s = extremes_s(mapper)[0]
                if 0 < least_s < np.inf:
                    speeds[of_kind[sizes == gpus]] *= mapper.model.whole_s / least_s
    return work / speeds


def _sizes(workload: Workload, devices: int) -> Ints:
    """Return the sizes that gangs can have on a cluster with this many GPUs."""
    return np.arange(1, min(int(workload.max_gpus.max(initial=1)), devices) + 1)


def speed_curves(workload: Workload, models: tuple[str, ...], devices: int) -> Floats:
    """Return each kind's predicted speed at 1, 2, ... GPUs relative to one: (n_profiles, most GPUs)."""
    sizes = _sizes(workload, devices)
    curves = np.ones((len(workload.profiles), sizes.size))
    for at, profile in enumerate(workload.profiles):
        behaviour = next(filter(None, map(profile.prediction, models)), None)
        if behaviour is not None:
            speed = behaviour.speed_at(sizes)
            if behaviour.gpus[0] > 1:  # nothing is known below the smallest size: as if it scaled perfectly there
                speed = np.where(sizes < behaviour.gpus[0], speed[0] * sizes / behaviour.gpus[0], speed)
            curves[at] = speed / speed[0]
    return curves


@dataclass(frozen=True)
class TunedCurves:
    """How the kinds of a workload run with a tuned batch, on the first model each may use, by stage of the work."""

    tunes: Bools  #: (n_jobs,) the jobs whose batch follows the gang, by workload row
    goodput: Floats  #: (n_rows, 2, most GPUs) speed at 1, 2, ... GPUs on one node and on several.
    batches: Ints  #: Same shape: total batch sizes, samples; 0 for a kind that does not tune
    first: Ints  #: (n_profiles + 1,) the first row of each kind, ascending, then the number of rows
    permitted: Ints  #: (n_profiles, 2) the smallest and the largest batch of each kind, -1 for one that does not tune

    def given(self, profile: Ints) -> list[Ints]:
        """Return the initial curve, smallest and largest batch of jobs of these kinds, one per workload row."""
        begin = (self.first[profile], *self.permitted[profile].T)
        return [np.where(self.tunes, each, -1) for each in begin]


def tuned_curves(workload: Workload, models: tuple[str, ...], tunes: Bools, devices: int) -> TunedCurves:
    """Return how the kinds of a workload run with a tuned batch, as these jobs, (n_jobs,), do."""
    sizes = _sizes(workload, devices)
    rows: list[Floats] = []
    batches: list[Ints] = []
    first = [0]
    for profile in workload.profiles:
        stages = next(filter(None, map(profile.tuned, models)), ())
        rows.extend(np.stack([stage.speed_at(sizes, spread=spread) for spread in (False, True)]) for stage in stages)
        batches.extend(stage.batches_at(sizes) for stage in stages)
        first.append(len(rows))
    nothing = np.empty((0, 2, sizes.size))
    return TunedCurves(
        tunes,
        np.stack(rows) if rows else nothing,
        np.stack(batches) if batches else nothing.astype(np.int64),
        np.array(first, dtype=np.int64),
        np.array([profile.batch_range for profile in workload.profiles], dtype=np.int64).reshape(-1, 2),
    )
