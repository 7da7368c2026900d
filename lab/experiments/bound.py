"""The least carbon a run could have emitted, for the report beside what it did emit.

The bound of ``lab.bounds.modes``, which says why no run is below it. It is taken for one run: the
same jobs in the same window, from the first submission to the run's own end, in which idle power is charged to both.

- **Levers** (``Levers``) are those that the run's policy may pull (``levers_of``), or all. Widths are those that a
  job's user allows, limits and clocks those that were measured; batches follow the gang where the run's options let
  them. Under a policy that tunes batches a job that may tune always does, as in the simulator.
- **Deadlines**: every job ends by its submission, its length at its smallest gang and its slack, or when it ended in
  the run, whichever is later. So the bound holds for the run as it was, with all the jobs that it finished late.
- **Hosts**: as the run's options charge them; one charged per job and node is charged for as few nodes as hold it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lab.bounds.modes import LeastCarbon, Modes, ModesProblem, least_carbon
from services.core.domain.arrays import Floats, Ints
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.domain.units import S_PER_HOUR
from services.core.policies.parameters import build_config
from services.core.policies.registry import policy_entry, policy_name
from services.simulator.engine import EngineOptions, SimulationResult
from services.simulator.engine.behaviour import eligible_models, who_tunes
from services.simulator.engine.grid import Grid
from services.simulator.training import TrainingRun
from services.simulator.workload import Behaviour, CarbonTrace, ClusterSpec, JobProfile, Workload


@dataclass(frozen=True)
class Levers:
    """What a policy may choose.

    Attributes:
        widths: Sizes of gangs; otherwise jobs have those that their users asked for.
        batches: The batch of jobs that may tune theirs follows the gang.
        controls: Power limits and clocks.
        sleep: Whether idle nodes may be powered down.
        fixed: Whether jobs that may tune their batch may also keep it.
    """

    widths: bool
    batches: bool
    controls: bool
    sleep: bool
    fixed: bool = False

    @property
    def words(self) -> str:
        """The levers for people."""
        named = {"widths": self.widths, "batches": self.batches, "limits": self.controls, "sleep": self.sleep}
        return ", ".join(("hours", *(name for name, is_there in named.items() if is_there)))


ALL_LEVERS = Levers(widths=True, batches=True, controls=True, sleep=True, fixed=True)


@dataclass(frozen=True)
class Slack:
    """How much later a job may end than after its own length: ``most_s``, and ``share`` of that length at most."""

    most_s: float = 0.0
    share: float = math.inf

    @property
    def words(self) -> str:
        """The slack for people."""
        if not self.most_s:
            return "none"
        most = "any" if math.isinf(self.most_s) else f"{self.most_s / S_PER_HOUR:g} h"
        return most if math.isinf(self.share) else f"{most}, at most {self.share:g} of the length"

    def allowed_s(self, length_s: Floats) -> Floats:
        """Return the slack of jobs of these lengths, same shape."""
        return np.minimum(self.most_s, self.share * length_s) if self.most_s else np.zeros_like(length_s)


def levers_of(
    policy: str, parameters: Mapping[str, object], options: EngineOptions, lasts_s: float = math.inf
) -> Levers:
    """Return the levers of a policy under options of the engine.

    Args:
        policy: Its name.
        parameters: Of the policy.
        options: Of the engine.
        lasts_s: How long the run takes: no node sleeps that would be powered down later than that.

    Raises:
        DomainError: its jobs may share a GPU, which no mode stands for.
    """
    name = policy_name(policy)
    entry = policy_entry(name)
    config = build_config(entry.config, parameters)
    if getattr(entry.build(config), "packs", False):
        raise DomainError("there is no bound for jobs that share a GPU")
    after_s = getattr(config, "sleep_after_s", 0.0)
    puts_to_sleep = getattr(config, "power_down", True) and after_s is not None and after_s <= lasts_s
    sleeps_by_itself = entry.powers_nodes and puts_to_sleep
    goes_off = options.power_down_after_s is not None or options.node_mtbf_s is not None
    return Levers(
        widths=not options.rigid,
        batches=entry.tunes_batch,
        controls=entry.sets_controls and bool(getattr(config, "limits", True)),
        sleep=sleeps_by_itself or goes_off,
    )


def slack_of(policy: str, parameters: Mapping[str, object]) -> Slack:
    """Return the slack that a policy is told to take (``slack_s`` and ``slack_share``); none where it has no such."""
    config = build_config(policy_entry(policy).config, parameters)
    share = getattr(config, "slack_share", None)
    return Slack(float(getattr(config, "slack_s", 0.0) or 0.0), math.inf if share is None else float(share))


def least_of_run(
    workload: Workload,
    cluster: ClusterSpec,
    trace: CarbonTrace,
    options: EngineOptions,
    levers: Levers,
    *,
    jct_s: Floats,
    makespan_s: float,
    slack: Slack,
    price_gco2: Floats | None = None,
    starts: bool = False,
) -> LeastCarbon:
    """Return the bound of a run.

    Args:
        workload: The jobs, with all sizes that their users allow.
        cluster: What they ran on.
        trace: The grid.
        options: Of the run.
        levers: What may be chosen.
        jct_s: (n_jobs,) completion times of the run; NaN of jobs that fit nowhere.
        makespan_s: Of the run.
        slack: How much later than in the run jobs may end, if that is later still.
        price_gco2: To begin from, as ``least_carbon`` takes it.
        starts: Whether a job's first start counts.

    Raises:
        DomainError: a job that could have run has not ended, or jobs on slices.
    """
    if workload.slice_sevenths is not None or any(group.slices for group in cluster.groups):
        raise DomainError("there is no bound for jobs on slices")
    kept = workload.rigid() if not levers.widths else workload
    site = _Site(cluster, options)
    kinds, kind = _kinds(kept, site, levers, starts=starts)
    begin_s = float(workload.submitted_s[0])
    end_s = begin_s + makespan_s
    rows = np.flatnonzero(kind >= 0)
    if np.isnan(jct_s[rows]).any():
        raise DomainError("there is no bound for a run that left jobs undone")
    length_s = lengths_s(workload, cluster, options)[rows]
    own_s, submitted_s = jct_s[rows], workload.submitted_s[rows]
    deadline_s = submitted_s + np.maximum(own_s, length_s + slack.allowed_s(length_s))
    return least_carbon(
        ModesProblem(
            curve=Grid(trace, 1.0, 1.0).between(begin_s, end_s),
            gpus=site.gpus,
            idle_w=site.idle_w,
            sleeps=levers.sleep,
            kinds=kinds,
            kind=kind[rows],
            work=workload.work_s[rows] / S_PER_HOUR,
            release_s=submitted_s,
            deadline_s=np.minimum(deadline_s, end_s),
        ),
        price_gco2,
    )


class _Site:
    """A cluster by GPU model, as the engine charges it; columns are (n_models,)."""

    def __init__(self, cluster: ClusterSpec, options: EngineOptions) -> None:
        self.options = options
        self.models = tuple(dict.fromkeys(group.model.name for group in cluster.groups))
        groups = [[group for group in cluster.groups if group.model.name == name] for name in self.models]
        self.gpus = np.array([sum(group.count * group.gpus for group in own) for own in groups], dtype=np.float64)
        self.widest = [max(group.gpus for group in own) for own in groups]
        self.nodes = [sum(group.count for group in own) for own in groups]
        self.idle_w = np.array([own[0].model.idle_w + options.host_idle_w for own in groups])


def _kinds(workload: Workload, site: _Site, levers: Levers, *, starts: bool) -> tuple[tuple[Modes, ...], Ints]:
    """Return the kinds of jobs, and whose is which: (n_jobs,), -1 of jobs that fit nowhere."""
    eligible = eligible_models(workload, site.models)
    tunes = who_tunes(len(workload), site.options) & levers.batches
    sizes = (workload.min_gpus, workload.max_gpus, workload.step_gpus)
    columns = np.column_stack((workload.profile, tunes, *sizes, eligible)).astype(np.int64)
    found, index = np.unique(columns, axis=0, return_inverse=True)
    kinds: list[Modes] = []
    place = np.full(len(found), -1, dtype=np.int64)
    for at, row in enumerate(found.tolist()):
        profile, tuned, low, high, step, *may = row
        gangs = np.arange(low, high + 1, step, dtype=np.int64)
        modes = _modes(workload.profiles[profile], gangs, site, levers, tunes=bool(tuned), may=list(map(bool, may)))
        if modes is not None:
            place[at] = len(kinds)
            start_h = workload.profiles[profile].restart_s / S_PER_HOUR if starts else 0.0
            kinds.append(replace(modes, start_h=start_h))
    return tuple(kinds), place[index.reshape(-1)]


def _modes(
    profile: JobProfile, gangs: Ints, site: _Site, levers: Levers, *, tunes: bool, may: list[bool]
) -> Modes | None:
    """Return the modes of a kind of job; None where it fits nowhere."""
    parts: list[tuple[Floats, Floats, Ints, int, int]] = []
    stages = 1
    for at, name in enumerate(site.models):
        own, truth = gangs[gangs <= site.gpus[at]], profile.truth(name)
        if not may[at] or truth is None or not own.size:
            continue
        tuned = profile.tuned(name) if tunes else (truth,)
        if parts and len(tuned) != stages:
            raise DomainError(f"{profile.name} goes through other stages on other GPU models: there is no bound")
        stages = len(tuned)
        for stage, behaviour in enumerate(tuned):
            for each in {id(each): each for each in (behaviour, *((truth,) if levers.fixed else ()))}.values():
                parts.extend((*columns, at, stage) for columns in _at_sizes(profile, each, own, at, site, levers))
    if not parts:
        return None
    speed, power_w, gpus, models, stage = zip(*parts, strict=True)
    lengths = [each.size for each in speed]
    return Modes(
        np.concatenate(speed),
        np.concatenate(power_w),
        np.concatenate(gpus).astype(np.float64),
        np.repeat(np.array(models, dtype=np.int64), lengths),
        np.repeat(np.array(stage, dtype=np.int64), lengths),
        stages,
    )


def _at_sizes(
    profile: JobProfile, behaviour: Behaviour, gangs: Ints, model: int, site: _Site, levers: Levers
) -> list[tuple[Floats, Floats, Ints]]:
    """Return speeds, powers and sizes of gangs on one node and of those on several, at every control value."""
    slower, cooler = np.array(_factors(behaviour, site.options.power_limit_w, levers)).T
    found: list[tuple[Floats, Floats, Ints]] = []
    for spread in (False, True):
        own = gangs[(gangs > 1) & (site.nodes[model] > 1)] if spread else gangs[gangs <= site.widest[model]]
        if not own.size:
            continue
        by_graph = spread and profile.graph is not None  # no faster than on one node, and at that power
        speed = behaviour.speed_at(own, spread=spread and not by_graph)[:, None] * slower
        gpu_w = (own * behaviour.power_w_at(own, spread=spread and not by_graph))[:, None] * cooler
        nodes = np.maximum(-(-own // site.widest[model]), 1 + spread)
        host_w = site.options.host_w(profile.host_power_w, own, nodes)[:, None]
        gpus = np.repeat(own, slower.size)
        found.append((speed.reshape(-1), (gpu_w + host_w).reshape(-1), gpus))
    return found


def _factors(behaviour: Behaviour, limit_w: float | None, levers: Levers) -> list[tuple[float, float]]:
    """Return the factors of speed and power at every control value that was measured, and at the default."""
    default = behaviour.factors_at({} if limit_w is None else {ControlKind.POWER_LIMIT: limit_w})
    if not levers.controls:
        return [default]
    measured = [
        behaviour.factors_at({kind: value}) for kind, curve in behaviour.controls.items() for value in curve.values
    ]
    return list(dict.fromkeys((default, (1.0, 1.0), *measured)))


def lengths_s(workload: Workload, cluster: ClusterSpec, options: EngineOptions) -> Floats:
    """Return how long each job takes at its smallest gang, on the first model it may use: (n_jobs,)."""
    site, speed = _Site(cluster, options), np.ones(len(workload))
    for at, profile in enumerate(workload.profiles):
        rows = np.flatnonzero(workload.profile == at)
        behaviour = next((each for model in site.models if (each := profile.truth(model)) is not None), None)
        if behaviour is not None and rows.size:
            speed[rows] = behaviour.speed_at(workload.min_gpus[rows])
    return workload.work_s / speed


def least_of_all(run: TrainingRun, results: Sequence[SimulationResult]) -> float:
    """Return the least carbon, gCO2, of any schedule in which no job ends later than in all of these runs.

    It may use any levers.

    Raises:
        DomainError: There is no such bound for these runs.
    """
    for result in results:
        levers_of(result.policy, result.parameters, run.engine)  # is refused where all levers are not all
    found = least_of_run(
        run.workload,
        run.cluster,
        run.trace,
        run.engine,
        ALL_LEVERS,
        jct_s=np.max([result.columns.jct_s for result in results], axis=0),  # NaN of jobs that one run left undone
        makespan_s=max(result.makespan_s for result in results),
        slack=Slack(),
    )
    return found.carbon_gco2
