"""The control plane's models. Made by ``clients/python/generate.py``: change nothing here."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Required, TypedDict


@dataclass(frozen=True, kw_only=True)
class ActivePolicy:
    """The active policy.

    Attributes:
        problem: Why the stored policy cannot be used. Rounds continue with the last usable one, or with the
            default.
    """

    name: str
    parameters: dict[str, Any]
    since: datetime
    changed_by: str
    round_interval_s: float
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class After:
    """Other jobs that must have ended before a job may start, and how.

    Each is named by its id, by its name, by its number as a string (`#12`, or `12` if no job has that name), by the
    beginning of its id or, in a batch, by its position from 0. An array stands for all of its tasks.

    Attributes:
        ok: These must have succeeded; of an array, every task.
        any: These must have ended, in whatever way.
        not_ok: These must have failed or been cancelled; of an array, at least one task.
    """

    ok: str | int | list[str | int] | None = None
    any: str | int | list[str | int] | None = None
    not_ok: str | int | list[str | int] | None = None


@dataclass(frozen=True, kw_only=True)
class AskedGpus:
    """The GPUs that the job asks for, and those in the cluster that would do.

    Attributes:
        slice: Size of the MIG slice that it asks for; the figures below then count such slices.
        suitable: GPUs on nodes that suit the job, drained nodes not counted.
        free: Those of them that are free now.
        drained: Further GPUs on suitable nodes that take no new work.
    """

    min: int
    max: int
    model: str | None = None
    memory_gib: float | None = None
    zone: str | None = None
    slice: str | None = None
    suitable: int
    free: int
    drained: int


@dataclass(frozen=True, kw_only=True)
class BatchRange:
    """The total batch sizes that a policy may choose from; the training code reads the chosen one.

    Attributes:
        min: Samples per step of the whole gang.
    """

    min: int
    max: int


@dataclass(frozen=True, kw_only=True)
class CarbonAccounts:
    """Emissions by accounts other than `carbon_gco2`, which is location-based. Null: an input is unknown.

    Attributes:
        facility_energy_j: Energy of the devices and hosts, times PUE.
        estimated_gco2: The part of `carbon_gco2` for which energy or intensity was estimated.
        market_gco2: By the factors of the contracts that `TELEMETRY_MARKET_GCO2_PER_KWH` states.
        embodied_gco2: Share of the GPUs' embodied emissions for the time that they were reserved.
        baseline_gco2: What the same energy would have emitted at the mean intensity of its zone in the period.
            Less energy through power limits, other gangs or sleeping nodes is not counted as a saving.
        money: What the facility energy cost by the prices of its hours, in the `currency` of the report; demand
            charges are not in it. Unknown if the period contains daily sums of old lines.
        unknown: Inputs that are missing.
        half_width: How far `energy_j` and `carbon_gco2` of the footprint can be off.
    """

    facility_energy_j: float = 0
    estimated_gco2: float = 0
    market_gco2: float | None = None
    embodied_gco2: float | None = None
    baseline_gco2: float | None = None
    money: float | None = None
    unknown: list[str] = field(default_factory=list[str])
    half_width: HalfWidth | None = None


@dataclass(frozen=True, kw_only=True)
class CurrentIntensity:
    """The current intensity.

    Attributes:
        age_s: Time since the value's interval began.
        is_stale: Whether the value is older than it should be; it is still the latest one known.
        time_scale: Grid seconds per real second; above 1 while a recording is replayed faster than real time.
        grid_now: The time by the grid's clock: the recorded time while a recording is replayed.
    """

    zone: str
    signal: str
    provider: str
    point: IntensityPoint
    fetched_at: datetime
    age_s: float
    is_stale: bool
    time_scale: float = 1
    grid_now: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class DemandCharge:
    """What is charged for the highest mean draw of an hour in a calendar month (UTC), as far as it is in the period.

    Attributes:
        peak_kw: Facility energy of that hour over an hour.
    """

    zone: str
    month: str
    peak_at: datetime
    peak_kw: float
    money: float


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """One GPU, or one MIG slice of a GPU, and its capabilities.

    Attributes:
        index: Number of the device on its node: GPUs from 0 in the driver's order; the slice of GPU `parent` that
            begins at memory slot `start` is 1024 + 8 * parent + start.
        uuid: `GPU-...`, or `MIG-...` of a slice.
        parent: The GPU that a slice is part of.
        profile: The driver's name of a slice, as `2g.20gb`.
        sevenths: Its compute, in sevenths of a GPU.
        start: First memory slot of a slice on its GPU.
        mig_enabled: Whether the GPU is cut. Then jobs run on its slices, and not on the GPU itself.
        lowest_limit_w: Null where the device does not report it.
        highest_limit_w: Null where the device does not report it.
    """

    index: int
    uuid: str
    parent: int | None = None
    profile: str | None = None
    sevenths: int = 7
    start: int | None = None
    mig_enabled: bool = False
    model: str
    memory_gib: float
    power_limit_w: float
    lowest_limit_w: float | None = None
    highest_limit_w: float | None = None
    can_set_clock: bool = False
    can_set_power_limit: bool = False
    can_partition: bool = False
    clocks_mhz: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, kw_only=True)
class DeviceReading:
    """The current readings of a device.

    Attributes:
        power_w: Of a slice: its estimated share of its GPU's power, which contains it.
        power_limit_w: The power limit set for a gang; null for the default.
        locked_clock_mhz: The clock that the device is locked to; null if it is not locked.
        latency_clock_mhz: The clock that the latency of a pool's requests asks for; in a dry run it is not set.
            Null where clocks do not follow latency.
        enforced_limit_w: The power limit that the device itself reports.
        energy_j: The device's energy counter, which counts from an arbitrary start; null if it has none, and of
            slices.
        read_at: When it was read, by the clock of the node.
        counter_ratio: Energy by the device's counter over that by its sampled power, in the first seconds of its
            agent. The counter is used if the two differ by less than a factor of 2, and else the power. Null
            while it is not known.
        temperature_c: Degrees Celsius at the last look at its health; null of slices.
        meter_faults: How many of the device's readings since its agent began were rejected, because it cannot
            have used that much; its energy was modelled instead.
    """

    index: int
    power_w: float
    utilization: float
    clock_mhz: int | None = None
    memory_used_gib: float | None = None
    power_limit_w: float | None = None
    locked_clock_mhz: int | None = None
    latency_clock_mhz: int | None = None
    enforced_limit_w: float | None = None
    energy_j: float | None = None
    read_at: datetime | None = None
    counter_ratio: float | None = None
    temperature_c: float | None = None
    meter_faults: int = 0


@dataclass(frozen=True, kw_only=True)
class EmissionEstimate:
    """What one run would emit if it began at a given time. Figures are null where they cannot be known.

    Attributes:
        intensity_gco2_per_kwh: Mean forecast intensity while the job runs.
        carbon_gco2: Of the whole run; null if its length is unknown.
    """

    starts_at: datetime
    zone: str
    signal: str
    intensity_gco2_per_kwh: float
    carbon_gco2_per_hour: float | None = None
    carbon_gco2: float | None = None


@dataclass(frozen=True, kw_only=True)
class EndedExplanation:
    """What became of a job. Times are sums over all its gangs.

    Attributes:
        waited_s: Time without GPUs, from submission to its end.
        held_gpus_s: Time in which it held GPUs.
    """

    exit_code: int | None = None
    waited_s: float
    held_gpus_s: float
    starts: int
    preemptions: int
    restarts: int


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A job, explained. One of `waiting`, `running` and `ended` is set, according to the job's state.

    None is while a cell has the job: there, `GET /v1/jobs/{job_id}/explain` has more.

    Attributes:
        number: What people type as its id; see `Job`.
        array_index: Its index if it is a task of an array.
        reason: Stable code of why the job waits or how it ended.
        detail: The reason in words.
        summary: The answer in one or two sentences.
        policy: The policy in force.
        footprint: Used and emitted so far.
        baseline_gco2: What the same energy would have emitted at the mean intensity of its zones from submission
            to its end; null while it has not ended, or if that mean is unknown.
        story: What happened, oldest first.
        story_left_out: How many events in the middle of a long story are left out.
        under_policies: Of a job that the scheduler has in its queue or on GPUs.
        levers: What each lever of the policy does for the job; empty under a policy that cannot tell.
        assumptions: What the figures rest on, in sentences.
    """

    job_id: str
    number: int | None = None
    array_index: int | None = None
    name: str
    state: str
    reason: str | None = None
    detail: str | None = None
    summary: str
    as_of: datetime
    policy: str
    submitted_at: datetime
    waiting: WaitingExplanation | None = None
    running: RunningExplanation | None = None
    ended: EndedExplanation | None = None
    footprint: JobFootprint | None = None
    baseline_gco2: float | None = None
    story: list[StoryLine]
    story_left_out: int = 0
    under_policies: PolicyComparison | None = None
    levers: list[LeverEffect] = field(default_factory=list["LeverEffect"])
    assumptions: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, kw_only=True)
class FootprintLine:
    """Energy and emissions of one group.

    Attributes:
        then_group: The second group, where there are two dimensions.
        name: A job's name, if the groups are jobs.
    """

    group: str
    then_group: str | None = None
    name: str | None = None
    footprint: JobFootprint
    jobs: int
    accounts: CarbonAccounts | None = None


@dataclass(frozen=True, kw_only=True)
class FootprintReport:
    """The sums of the ledger over a period, all as of one moment.

    Attributes:
        end_at: The end of the period; the moment of the report if that came first.
        also: All lines by other groups.
        metered_gpu_energy_j: Total by the devices' own counters; `total.gpu_energy_j` must agree with it to 0.1
            %.
        signals: The carbon signals that priced the period. Scope 2 of the GHG Protocol wants an average one.
        currency: That of all money; null: no prices are known.
        demand: No job's; operators see it.
    """

    start_at: datetime | None
    end_at: datetime
    group_by: str
    then_by: str | None = None
    lines: list[FootprintLine]
    also: list[FootprintTable] = field(default_factory=list["FootprintTable"])
    idle: JobFootprint
    total: JobFootprint
    metered_gpu_energy_j: float
    idle_accounts: CarbonAccounts | None = None
    total_accounts: CarbonAccounts | None = None
    signals: list[str] = field(default_factory=list[str])
    zones: list[ZoneIntensity] = field(default_factory=list["ZoneIntensity"])
    units: list[FunctionalUnit] = field(default_factory=list["FunctionalUnit"])
    currency: str | None = None
    demand: list[DemandCharge] = field(default_factory=list["DemandCharge"])
    next_cursor: str | None = None


@dataclass(frozen=True, kw_only=True)
class FootprintTable:
    """The lines of a report, summed by another group."""

    group_by: str
    lines: list[FootprintLine]


@dataclass(frozen=True, kw_only=True)
class ForecastPoint:
    """A forecast intensity.

    Attributes:
        fetched_at: When the value was fetched, or learned; null for one derived from other values.
        p10: 10th percentile, from the errors in the backtest; null without a backtest.
        p90: 90th percentile, from the errors in the backtest; null without a backtest.
    """

    start_at: datetime
    end_at: datetime
    gco2_per_kwh: float
    is_estimated: bool = False
    fetched_at: datetime | None = None
    p10: float | None = None
    p90: float | None = None


@dataclass(frozen=True, kw_only=True)
class FunctionalUnit:
    """Software carbon intensity (SCI): emissions per unit of work.

    Only jobs that succeeded, and whose energy lies wholly in the period, count.

    Attributes:
        unit: `job`, `step`, `epoch`, `sample` or `1000 tokens`.
        sci_gco2_per_unit: Operational and embodied emissions per unit. Null if the embodied ones are unknown.
    """

    unit: str
    amount: float
    jobs: int
    operational_gco2: float
    embodied_gco2: float | None
    sci_gco2_per_unit: float | None


@dataclass(frozen=True, kw_only=True)
class GitSource:
    """A commit of a repository that nodes can reach.

    Attributes:
        url: `https://HOST/PATH`, `ssh://USER@HOST/PATH` or `USER@HOST:PATH`.
        revision: A whole commit id, so that all nodes and restarts have the same files.
        secret: A secret with a token, `USER:TOKEN`, or a private key for SSH. The job does not get it.
    """

    url: str
    revision: str
    secret: str | None = None


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """A GPU that gets no new work though its node does.

    Attributes:
        gpu: Its index.
        drained: Whether an operator has taken it out of service.
        cause: What is wrong with it; null for nothing.
        ends_gangs: Whether gangs that held it were ended, and queued again.
        lasts: Whether this still holds; then it cannot return to service.
    """

    gpu: int
    uuid: str
    drained: bool
    cause: str | None = None
    detail: str = ""
    since: datetime | None = None
    ends_gangs: bool = False
    lasts: bool = False


@dataclass(frozen=True, kw_only=True)
class GpuPartition:
    """How a GPU is to be cut, and how far its node has got with that.

    Attributes:
        sizes: In sevenths of the GPU, in the order of their places; empty: uncut.
        owner: The fleet that the GPU is reserved for; null if an operator cut it.
    """

    gpu: int
    revision: int
    sizes: list[int]
    owner: str | None = None
    state: str
    detail: str = ""
    wanted_at: datetime
    applied_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class GpuRequest:
    """The sizes the gang may have: `min`, `min + step`, ... `max`.

    Attributes:
        max: By default `min`: a job of fixed size.
        asked: The size that you would ask for if the gang had only one: what `joint` measures by whether other
            sizes are worth it. By default `min`.
        model: GPU model that the job needs, as nodes report it.
        memory_gib: Minimum memory of each device.
        zone: Grid zone to stay in, as with data that are there; by default any.
        within: Level of the network, such as `rack`, in one domain of which the whole gang must lie; it waits
            until one has room. `node` is always one; `GET /v1/topology` lists them.
        near: The same, where that delays it no more than any other place: it should, but need not.
        slice: Size of the MIG slice that the job needs instead of a GPU, in sevenths of one. It gets one.
    """

    min: int = 1
    max: int | None = None
    step: int = 1
    asked: int | None = None
    model: str | None = None
    memory_gib: float | None = None
    zone: str | None = None
    within: str | None = None
    near: str | None = None
    slice: str | None = None


@dataclass(frozen=True, kw_only=True)
class GpuTrend:
    """What a GPU's temperature was, step by step.

    Attributes:
        temperature_c: Degrees Celsius; null where nothing was reported.
    """

    gpu: int
    temperature_c: list[int | None]


@dataclass(frozen=True, kw_only=True)
class GridForecast:
    """The forecast that the emissions rest on.

    Attributes:
        stale: Whether its newest value is older than it should be.
        made_at: When the forecast was made; null if that is unknown.
        known_until: End of the forecast.
    """

    zone: str
    signal: str
    stale: bool
    made_at: datetime | None = None
    known_until: datetime


@dataclass(frozen=True, kw_only=True)
class GridOrderAhead:
    """An order of the grid in simulated time.

    Attributes:
        cut: Share of what is drawn before it.
        to_w: The most that may be drawn, watts.
        notice_s: How long before its start the cluster may prepare.
    """

    start_at: datetime
    duration_s: float
    cut: float | None = None
    to_w: float | None = None
    notice_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HalfWidth:
    """Half the width of a 90 % interval: 9 times out of 10 the true value lies within it (docs/method.md)."""

    energy_j: float
    carbon_gco2: float


@dataclass(frozen=True, kw_only=True)
class IntensityForecast:
    """Forecast intensities from now on.

    Attributes:
        method: Source of the first points: `provider`, or our own `ridge`, `blend` (both learned), `pretrained`
            (learned on other grids) or `persistence`.
        learned_from: From this time on, where the provider's forecast has ended, points are our learned forecast.
        persistence_from: From this time on, where every other forecast has ended, points are our persistence
            forecast.
    """

    zone: str
    signal: str
    provider: str
    method: str
    generated_at: datetime
    is_stale: bool
    time_scale: float = 1
    learned_from: datetime | None = None
    persistence_from: datetime | None = None
    points: list[ForecastPoint]


@dataclass(frozen=True, kw_only=True)
class IntensityPoint:
    """An intensity that applies from `start_at` until `end_at`.

    Attributes:
        fetched_at: When the value was fetched, or learned; null for one derived from other values.
    """

    start_at: datetime
    end_at: datetime
    gco2_per_kwh: float
    is_estimated: bool = False
    fetched_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class IntensityUse:
    """Energy that a job used while one intensity applied.

    Attributes:
        estimated: Whether energy or intensity was estimated.
    """

    start_at: datetime
    end_at: datetime
    energy_j: float
    intensity_gco2_per_kwh: float
    carbon_gco2: float
    estimated: bool


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job and its current state.

    Attributes:
        number: What people type as its id: 1, 2, ... in its tenant; a task has that of its array. Null if a
            release without numbers accepted it.
        user: Name of the user whose key submitted it; null if the key belonged to no user.
        reason: Stable code of why the job waits or how it ended.
        detail: The reason in words.
        expected_start_at: When the policy expects to start a waiting job, by what is known now and provided that
            GPUs are free by then; null if unknown.
        generation: How many times the job has been given GPUs.
        gpus: GPUs that the job holds now.
        power_limit_w: Power limit set on each of its GPUs; null for the default.
        clock_mhz: Clock that its GPUs are locked to; null for the default.
        batch_size: Total batch, samples per step, that its gang was started with; null while it holds no GPUs,
            and without `batch` in its spec.
        stop_at: By when its processes will be killed, as in the job's own `WATTSHIFT_STOP_AT`: once it was asked
            to stop, the end of its grace period; under a time limit, the end of that and of the grace period
            after it; null while neither is known, and on other engines.
        node_losses: How often it lost a GPU, or a node while most others stayed up, each within a day of the one
            before; after three times it is held, and a release begins the count anew.
        cell: The cell that has it, or had it when it ended; null: none, this installation has it.
        checkpoint_nodes: The only nodes that have the checkpoint of a job that waits: it starts on these, or
            waits for them; none if it may start anywhere.
        warnings: Budgets of its project that are exceeded and only warn.
        array_id: The array that it is a task of.
        array_index: Its index in the array.
    """

    id: str
    number: int | None = None
    tenant_id: str
    user: str | None = None
    name: str
    project: str
    state: str
    reason: str | None = None
    detail: str | None = None
    spec: JobSpec
    submitted_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    expected_start_at: datetime | None = None
    generation: int
    gpus: int
    placement: list[Share] = field(default_factory=list["Share"])
    power_limit_w: float | None = None
    clock_mhz: int | None = None
    batch_size: int | None = None
    stop_at: datetime | None = None
    preemptions: int
    restarts: int
    node_losses: int = 0
    exit_code: int | None = None
    cell: str | None = None
    checkpoint_nodes: list[str] = field(default_factory=list[str])
    progress: JobProgress | None = None
    footprint: JobFootprint | None = None
    warnings: list[str] = field(default_factory=list[str])
    array_id: str | None = None
    array_index: int | None = None


@dataclass(frozen=True, kw_only=True)
class JobAhead:
    """A waiting job that comes before this one.

    Attributes:
        gpus: Size of its smallest gang.
    """

    job_id: str
    name: str
    gpus: int


@dataclass(frozen=True, kw_only=True)
class JobArray:
    """An array: jobs of one spec, its tasks, that are submitted, and can be cancelled and held, as one.

    Attributes:
        number: As for a job; its tasks are `NUMBER.INDEX`.
        user: Name of the user whose key submitted it; null if the key belonged to no user.
        name: Its tasks are named `NAME.INDEX`.
        state: Of its tasks together: `running`, `starting`, `preempting`, `queued` or `held` if any is, in this
            order; else `succeeded` if all did, `failed` if any did, or `cancelled`.
        spec: As it was submitted. Dependencies are named by ids.
        count: How many tasks it has.
        first: The lowest index.
        last: The highest index.
        max_running: The most tasks that hold GPUs at once; null: no limit.
        waiting: Why queued and held tasks wait: how many, by reason.
        next_task: The queued or, if there is none, the held task of the lowest index.
        gpus: GPUs that its tasks hold now.
        started_at: When its first task started.
        ended_at: When its last task ended; null before that.
        footprint: Of all its tasks.
    """

    id: str
    number: int | None = None
    tenant_id: str
    user: str | None = None
    name: str
    project: str
    state: str
    spec: JobSpec
    count: int
    first: int
    last: int
    max_running: int | None = None
    tasks: TaskCounts
    waiting: dict[str, int] = field(default_factory=dict[str, int])
    next_task: str | None = None
    gpus: int
    submitted_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    footprint: JobFootprint | None = None


@dataclass(frozen=True, kw_only=True)
class JobArrayList:
    """One page of arrays, newest first."""

    items: list[JobArray]
    next_cursor: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """Something that happened to a job.

    Attributes:
        id: Send it back as `Last-Event-ID` to continue after this event.
        type: `job.submitted`, `job.starting`, `job.running`, `job.preempting`, `job.queued`, ...
    """

    id: str
    job_id: str
    at: datetime
    type: str
    data: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class JobFootprint:
    """What a job has used and emitted so far.

    Emissions are location-based: energy times the intensity at the time of use, times PUE.

    Attributes:
        estimated_energy_j: The part of `energy_j` that was modelled, not measured.
    """

    energy_j: float = 0
    gpu_energy_j: float = 0
    carbon_gco2: float = 0
    gpu_s: float = 0
    estimated_energy_j: float = 0


@dataclass(frozen=True, kw_only=True)
class JobFootprintReport:
    """A job's footprint with the intensities used to compute it.

    Attributes:
        half_width: How far the footprint can be off.
    """

    job_id: str
    footprint: JobFootprint
    half_width: HalfWidth | None = None
    zone: str | None
    signal: str | None
    pue: float | None
    intervals: list[IntensityUse]
    next_cursor: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobList:
    """One page of jobs, newest first."""

    items: list[Job]
    next_cursor: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobPrediction:
    """A job's length as predicted when the scheduler first saw it, and the actual one. Amounts are in GPU seconds.

    Attributes:
        model_id: Version of the model that made the prediction; null if there was none yet.
        group_id: Jobs in one group are treated as the same job submitted repeatedly.
        group_seen: Whether jobs of the group had ended before. For a new group, 0 is predicted.
        examples: How many jobs of the group the model was trained on.
        gpu_s: Predicted GPU seconds.
        duration_s: Predicted duration on the smallest gang, assuming linear speed-up.
        spread_gpu_s: Standard deviation of the earlier runs it was learned from.
        low_gpu_s: 10th percentile of the group's jobs.
        high_gpu_s: 90th percentile of the group's jobs.
        actual_gpu_s: Actual GPU seconds; null until the job has succeeded.
        error_gpu_s: Predicted minus actual.
    """

    job_id: str
    predicted_at: datetime
    model_id: str | None
    group_id: str
    group_seen: bool
    examples: int
    gpu_s: float
    duration_s: float
    spread_gpu_s: float
    low_gpu_s: float | None
    median_gpu_s: float | None
    high_gpu_s: float | None
    actual_gpu_s: float | None
    error_gpu_s: float | None


@dataclass(frozen=True, kw_only=True)
class JobProgress:
    """A job's progress.

    Attributes:
        saved_at: When the job last said that it has saved its work; null if it does not say.
        save_every_s: How long it was until then from the save before, or its start.
        save_s: How long saving took, by its own word.
    """

    done: float
    total: float | None = None
    unit: str | None = None
    updated_at: datetime
    saved_at: datetime | None = None
    save_every_s: float | None = None
    save_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job as it is submitted.

    Attributes:
        command: Program and arguments.
        image: Container image. The command, if there is one, runs in it.
        source: The job's files, where nodes share no folder with the submitter.
        working_dir: An absolute path; with a `source`, a path in it, by default its top folder.
        checkpoint_dir: Kept between restarts. By default, each job has a folder of its own.
        processes: Whether the command is started once for each GPU of the gang (`per_gpu`) or once on each of its
            nodes (`per_node`). By default once per node if the command is a known launcher, such as `torchrun`,
            `accelerate`, `deepspeed` or `mpirun`, or if the job has no command; else once per GPU. An accepted
            job whose gang may be wider than one GPU shows what was chosen; with one GPU there is one process
            either way.
        family: Kind of model that the job trains. It serves as a prior for scaling until measurements exist.
        global_batch: Samples per step of the whole gang, the same at every size. A reported `local_batch`
            overrides it. With `batch`, the one that the code's learning rate is for; by default `batch.min`.
        batch: Permits policies that tune batches to choose the gang's total batch, samples per step, within this
            range. The training code reads it from `$WATTSHIFT_BATCH_SIZE` whenever it starts. `work` then counts
            samples, tokens or epochs.
        flexibility_s: How long the job may be delayed; null leaves that to the policy.
        priority: Jobs with a higher priority go first, in policies that use it.
        flex: How much slower orders of the grid may make the job, percent; 0 spares it as long as anything else
            can meet an order. Null: as its tenant's `flex` says, else 25.
        may_share_gpu: Whether the job may share its GPU with another job that may, under policies that pack jobs
            (`gandiva`, of wattshift-lab). It has one GPU then, may be preempted, and needs at most
            `gpus.memory_gib` of its memory; both fit together. Jobs that share a GPU slow each other down, and
            one can take memory from the other.
        grace_s: Time between SIGTERM and SIGKILL.
        time_limit_s: How long one run of the job may take: then SIGTERM, `grace_s`, SIGKILL. The job has failed
            with the reason `time_limit`, and is not restarted. A run that is preempted and continues later starts
            anew.
        max_restarts: How often a failed job is restarted; preemptions do not count.
        restart_after_node_loss: Whether the job is queued again when a node that it runs on is lost; otherwise it
            has failed with the reason `node_lost`.
        hold: Accept the job, but start it only after a release.
        secrets: Secrets of the tenant that the job gets, as variables or as files.
        array: Makes the submission an array: one job, a task, for each index, as `0-99`, `1,3,5-9:2` or, with at
            most 8 at once, `0-99%8`. A task has the array's spec, and its index in `$WATTSHIFT_ARRAY_INDEX`.
        after: Jobs that must have ended before it starts, and how.
        notify: Have these messages about the job sent also to webhooks of its tenant and project that take only
            the other of `job.started` and `job.ended`. `failed` is an end in which the job has failed.
        service: Set only for instances of pools, which are service instances.
        cells: Cells that may run the job in place of the installation that it is submitted to, by name, or `any`.
            It runs where it emits least and ends in time. Its command and image must be at home there.
        may_move: Whether the job may be stopped, with its grace period, and go on in another cell that has become
            cleaner: its `checkpoint_dir` is one folder, the same files, here and in all of its `cells`. It
            reports its progress.
    """

    name: str
    command: list[str] = field(default_factory=list[str])
    image: str | None = None
    environment: dict[str, str] = field(default_factory=dict[str, str])
    source: Source | None = None
    working_dir: str | None = None
    checkpoint_dir: str | None = None
    gpus: GpuRequest | None = None
    work: Work | None = None
    progress: Progress | None = None
    processes: str | None = None
    family: str | None = None
    global_batch: int | None = None
    batch: BatchRange | None = None
    layout: ParallelLayout | None = None
    deadline: datetime | None = None
    flexibility_s: float | None = None
    priority: int = 0
    preemptible: bool = True
    flex: str | None = None
    may_share_gpu: bool = False
    grace_s: float = 120
    time_limit_s: float | None = None
    max_restarts: int = 0
    restart_after_node_loss: bool = True
    project: str = "default"
    labels: dict[str, str] = field(default_factory=dict[str, str])
    hold: bool = False
    secrets: list[SecretUse] | None = None
    array: str | None = None
    after: After | None = None
    notify: list[str] | None = None
    service: ServiceTerms | None = None
    cells: list[str] | None = None
    may_move: bool = False


@dataclass(frozen=True, kw_only=True)
class LengthEstimate:
    """How long the job will still run once it starts, on the gang in question. Figures are null where unknown.

    Attributes:
        low_s: 10th percentile of earlier runs like it.
        high_s: 90th percentile of earlier runs like it.
        source: The job's own progress, earlier runs like it, or the longest run that it allows.
    """

    seconds: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class LeverEffect:
    """What one lever of the policy changes for a job, compared with the same job without that lever; the others stay.

    For a job that waits or runs: over what it has left, by the policy's own figures and the forecast. For one that has
    ended: by the ledger, as far as it can tell. The effects of several levers do not add up to the effect of all.

    Attributes:
        carbon_saved_gco2: Less emitted than without it, without PUE (of an ended job with it); null: unknown.
        minutes_added: By how much later the job ends; negative: earlier; null: unknown.
        detail: What it is compared with, or why a figure is unknown.
    """

    lever: str
    carbon_saved_gco2: float | None = None
    minutes_added: float | None = None
    detail: str


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """What the next active round would do to a running job, according to a round on the present state.

    Attributes:
        at: When that round is due.
        gpus: Size of its gang if it comes back resized.
    """

    action: str
    at: datetime | None = None
    reason: str | None = None
    detail: str
    gpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node as shown to operators.

    Attributes:
        closed: Why the node itself takes no new work, such as a full disk; null while it does.
        measures_only: Whether its agent only measures: no job of ours is placed on it.
        engine_node: The engine's node whose energy it measures; null for none.
        checkpoints: Where jobs that name no folder keep checkpoints: `shared` by all nodes, copied to a `store`,
            or `local` to the node, to which jobs are then bound; null where the agent is of an earlier release.
        partitions: How its GPUs are to be cut, for those that ever were.
        gpu_health: Its GPUs that get no new work; none while all of them do.
        gpus: Slices are not counted, only the GPUs they are part of.
        gpus_in_use: GPUs that a gang holds, whole or in slices.
        marked_intervals: How many of the node's intervals are not booked as metered or reported, because its
            hardware cannot have used that much. The `basis` of their lines in the ledger says which.
        credential: How the node proves who it is.
        credential_since: Since when it has its credential, or has had it revoked.
        protections: What keeps jobs apart there; none where the agent is of an earlier release.
        trend: Of a list with `trend`: temperatures of its GPUs in the past day. Missing where none is known.
    """

    id: str
    state: str
    draining: bool
    closed: str | None = None
    address: str
    agent_url: str
    zone: str
    driver: str
    measures_only: bool = False
    engine_node: str | None = None
    containers: bool
    checkpoints: str | None = None
    devices: list[DeviceInfo]
    readings: list[DeviceReading]
    partitions: list[GpuPartition] = field(default_factory=list["GpuPartition"])
    gpu_health: list[GpuHealth] = field(default_factory=list["GpuHealth"])
    gpus: int
    gpus_in_use: int
    power_w: float
    marked_intervals: int = 0
    heartbeat_at: datetime | None
    lease_until: datetime | None
    power: NodePower | None = None
    credential: str = "shared"
    credential_since: datetime | None = None
    protections: list[Protection] = field(default_factory=list["Protection"])
    trend: NodeTrend | None = None


@dataclass(frozen=True, kw_only=True)
class NodeList:
    """The cluster's nodes, or one page of them, by name."""

    items: list[Node]
    next_cursor: str | None = None


@dataclass(frozen=True, kw_only=True)
class NodePower:
    """A node's power state and its history.

    Attributes:
        since: When the state last changed; null if it never has.
        pinned_awake: Whether an operator keeps the node from being powered down.
        reason: Stable code of why the state last changed.
        attempts: How often the power hook was called for the current change.
        wakes: How often the node was woken. The durations below count up to the last change of state.
        estimated_energy_j: Configured watts times these durations, as in the ledger.
    """

    state: str = "on"
    since: datetime | None = None
    pinned_awake: bool = False
    reason: str | None = None
    detail: str | None = None
    attempts: int = 0
    wakes: int = 0
    off_s: float = 0.0
    waking_s: float = 0.0
    estimated_energy_j: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NodeTrend:
    """Temperatures of a node's GPUs over at most a day, up to now."""

    start_at: datetime
    step_s: int
    gpus: list[GpuTrend]


@dataclass(frozen=True, kw_only=True)
class OneChange:
    """The smallest change that would start a waiting job now or, where none does, earlier.

    An accepted job is not changed: the same job, submitted again with this change, would start in the next round if
    this one were withdrawn. That was replayed with the present queue, and holds as long as the queue is the same. Where
    none does, it is a minute or more earlier by a simulation of the queue, under the policy in force.

    Attributes:
        what: What to ask for instead; `zone`: none.
        gpus: That many GPUs.
        model: GPUs of this model.
        flex: This class towards orders of the grid.
        within: Within one domain of this level of the network; null with `within`: anywhere.
        deadline: This deadline; null with `deadline`: none.
        starts_at: When it would start, by a simulation of the queue; null: now.
        detail: The change in words, as at the end of `summary`.
    """

    what: str
    gpus: int | None = None
    model: str | None = None
    flex: str | None = None
    within: str | None = None
    deadline: datetime | None = None
    starts_at: datetime | None = None
    detail: str


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """How the gang is divided into stages and replicas, for placement."""

    stages: list[Stage]
    all_reduce: str = "ring"


@dataclass(frozen=True, kw_only=True)
class PolicyComparison:
    """The present queue under every policy, simulated in the background from one snapshot for all who ask.

    Attributes:
        as_of: Time of the snapshot.
        detail: Why it is pending or failed.
    """

    status: str
    as_of: datetime | None = None
    items: list[PolicyOutcome] = field(default_factory=list["PolicyOutcome"])
    detail: str | None = None
    assumptions: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, kw_only=True)
class PolicyOutcome:
    """What would become of the job under a policy, if no further job were submitted.

    Attributes:
        starts_at: When it next gets GPUs; null: not within the horizon.
        waits_s: From the time of the snapshot to that start.
        carbon_gco2: Emissions from the snapshot to the end, without PUE.
        failure: Why there is no answer for this policy.
    """

    policy: str
    in_force: bool = False
    starts_at: datetime | None = None
    ends_at: datetime | None = None
    waits_s: float | None = None
    carbon_gco2: float | None = None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How the job reports its progress.

    `file`: the job writes JSON lines `{"done": number}` to `$WATTSHIFT_PROGRESS_FILE`; the last line counts.
    `log`: `pattern` is searched in standard output; its groups `done` and, optionally, `total` match numbers.
    `http`: the job posts `{"done": number}` to `$WATTSHIFT_PROGRESS_URL`.
    """

    source: str = "file"
    pattern: str | None = None


@dataclass(frozen=True, kw_only=True)
class Protection:
    """One of the things that keep jobs apart on a node, and away from the agent.

    Attributes:
        how: What does it; where it does not hold, why not.
    """

    name: str
    holds: bool
    how: str


@dataclass(frozen=True, kw_only=True)
class QueuePlace:
    """A waiting job's place in the order in which the policy starts jobs, according to a round on the present state.

    Jobs that the caller may not see are counted, but never named.

    Attributes:
        position: 1 for the first. Null: the policy does not rank the job now, or has no such order.
        waiting_jobs: Jobs that wait now, of all users, this one included.
        ahead: Waiting jobs that come before it; null as `position`.
        ahead_gpus: GPUs that the smallest gangs of those take together.
        hidden_ahead: How many of those the caller may not see.
        first: The first of those that the caller may see.
    """

    position: int | None = None
    waiting_jobs: int
    ahead: int | None = None
    ahead_gpus: int | None = None
    hidden_ahead: int = 0
    first: list[JobAhead] = field(default_factory=list["JobAhead"])


@dataclass(frozen=True, kw_only=True)
class RunningExplanation:
    """Where and how a job runs, and what comes next.

    Attributes:
        why: Why it has this size, power limit and clock, in sentences.
        expected_end_at: Null if the job's length is unknown.
        stop_at: By when it will be killed; null while no end is set. As `stop_at` of the job.
        next: Null while the job is being stopped.
    """

    since: datetime
    gpus: int
    placement: list[Share]
    why: list[str]
    power_limit_w: float | None = None
    clock_mhz: int | None = None
    expected_end_at: datetime | None = None
    stop_at: datetime | None = None
    length: LengthEstimate | None = None
    next: NextStep | None = None


@dataclass(frozen=True, kw_only=True)
class Secret:
    """What is known about a secret: everything but its value.

    Attributes:
        version: Counts how often its value was set.
    """

    name: str
    project: str | None
    version: int
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, kw_only=True)
class SecretList:
    """The secrets of a tenant."""

    items: list[Secret]


@dataclass(frozen=True, kw_only=True)
class SecretUse:
    """A secret that a job gets, as a variable or as a file.

    A secret of the job's project takes precedence over one of the whole tenant.

    Attributes:
        env: The variable that holds the value.
        file: The file in `$WATTSHIFT_SECRETS_DIR` that holds the value.
    """

    name: str
    env: str | None = None
    file: str | None = None


@dataclass(frozen=True, kw_only=True)
class ServiceTerms:
    """Where a service instance may run. It is placed before all training jobs and listens on `$WATTSHIFT_PORT`.

    Attributes:
        zone: Only on nodes in this grid zone.
        node_labels: Only on nodes that have all of these labels.
        fleet: Only on the GPUs, or slices of them, that are reserved for this fleet.
    """

    zone: str | None = None
    node_labels: dict[str, str] = field(default_factory=dict[str, str])
    fleet: str | None = None


@dataclass(frozen=True, kw_only=True)
class Share:
    """A gang's devices on one node."""

    node_id: str
    devices: list[int]


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulation with its inputs and its result.

    Attributes:
        started_at: When a worker last started it.
        attempts: How often a worker started it; more than once after a crash.
        run_s: Wall-clock time of the simulation.
        result: What `wattshift simulate training --json` prints: an object, or a list of objects for several
            policies. Of jobs `live`, an object with `job_ids`, and per policy the start, end and emissions of
            each job.
    """

    id: str
    tenant_id: str
    status: str
    policies: list[str]
    submitted_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    attempts: int = 0
    progress: SimulationProgress
    run_s: float | None = None
    failure: WorkFailure | None = None
    request: TrainingProblem
    result: dict[str, Any] | list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class SimulationProgress:
    """Progress of a simulation.

    Attributes:
        done: Jobs that have ended in simulated time, summed over policies.
        total: Number of jobs times number of policies.
    """

    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class SimulationSummary:
    """A simulation without its inputs and its result.

    Attributes:
        started_at: When a worker last started it.
        attempts: How often a worker started it; more than once after a crash.
        run_s: Wall-clock time of the simulation.
    """

    id: str
    tenant_id: str
    status: str
    policies: list[str]
    submitted_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    attempts: int = 0
    progress: SimulationProgress
    run_s: float | None = None
    failure: WorkFailure | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """The job's files. The job runs in what is unpacked on each node, or in a folder in it.

    Attributes:
        upload: The SHA-256 of an archive that the tenant has uploaded.
    """

    upload: str | None = None
    git: GitSource | None = None


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage of a job's parallel layout. Bytes are per iteration, for the whole mini-batch.

    Attributes:
        replicas: Data-parallel replicas; each is placed as a unit.
        tensor_parallel: GPUs of each replica, all on one server.
        expert_parallel: Consecutive replicas that exchange tokens; divides `replicas`.
        parameter_bytes: Bytes of gradients that the replicas all-reduce.
        forward_s: Forward computation of one replica on its share of the batch.
        output_bytes: Bytes sent to the next stage per iteration.
        tensor_bytes: Bytes all-reduced within tensor groups, forward and backward together.
        expert_bytes: Bytes sent to experts and back in one pass.
    """

    replicas: int
    tensor_parallel: int = 1
    expert_parallel: int = 1
    parameter_bytes: float = 0
    forward_s: float | None = None
    backward_s: float | None = None
    output_bytes: float = 0
    tensor_bytes: float = 0
    expert_bytes: float = 0


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file from a request, stored under the hash of its content.

    Attributes:
        size: Size in bytes, uncompressed.
    """

    name: str
    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class StoryLine:
    """Something that happened to the job, in one sentence.

    Attributes:
        reason: Stable code of the reason, where the event has one.
    """

    at: datetime
    text: str
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class SubmittedBatch:
    """The answer to a batch, with the jobs in the order of the request."""

    jobs: list[SubmittedJob]


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """The answer to a submission. The job, or the array with all its tasks, is on disk by then.

    Attributes:
        number: What people type as its id; see `Job`.
        count: Tasks of the array; null for a single job.
    """

    id: str
    number: int | None = None
    name: str
    state: str
    submitted_at: datetime
    count: int | None = None


@dataclass(frozen=True, kw_only=True)
class TaskCounts:
    """How many tasks of an array are in each state."""

    held: int = 0
    queued: int = 0
    starting: int = 0
    running: int = 0
    preempting: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainingProblem:
    """A simulation with all its inputs resolved.

    Attributes:
        policy: One policy, or several as a list or separated by commas.
        cluster: `NODESxGPUS:MODEL[SLICES]`, several separated by commas; `ZONE=` before one says its grid.
        format: Format of the job file; by default recognised by its header.
        recipe: How jobs behave; by default the recipe of the trace.
        start: UTC date at which simulated time begins.
        days: Simulate only jobs submitted within this many days.
        seed: The same input and the same seed give the same results.
        params: Policy parameters by name, or by `POLICY.name` if there are several policies.
        signal: Which intensity: `direct`, `lifecycle` or `marginal`.
        round_minutes: Time between active rounds.
        passive_interval_s: Minimum time between passive rounds.
        power_down_minutes: Power down nodes that have been idle for this long; by default never.
        node_mtbf_days: Mean time between failures of a node; by default nodes do not fail.
        host_idle_w: Power of the host per idle GPU, in watts.
        horizon_hours: How far ahead policies know the carbon intensity.
        placement: `consolidated`, `buddy`, `first-fit`, `heavy-edge` or `refined`; for policies that do not place
            jobs themselves.
        topology: Levels of the network, as the file of `PUT /v1/topology`; the nodes are n0, n1 and so on, in the
            order of `cluster`.
        within: Level in one domain of which every gang must lie, such as `rack`.
        predictor: How job lengths are predicted: `perfect`; `none`, for policies that learn them from the jobs'
            own progress; or `forest`, `mean`, `median`, `mean-of-all` or `median-of-all`, learned from jobs that
            have ended.
        batch_tuning: Which jobs' batch size may follow the gang, under policies that use it; half of them are
            drawn by the seed.
        tenant_guarantees: GPUs that tenants of the trace are guaranteed.
        tenant_weights: The weight of each tenant of the trace in sharing the GPUs with others, under policies
            that share between tenants (`fair+` before a policy's name); 1 where none is given.
        orders: Orders of the grid to the whole cluster, which the policies have to meet.
        levers: Instead of the policy's results, say what each of its levers saves: the jobs are replayed under
            `fifo`, then under the policy with one lever more each time. One policy, and not with jobs `live`.
    """

    policy: str | list[str]
    cluster: str = "32x2:RTX3090"
    format: str | None = None
    recipe: str | None = None
    start: str | None = None
    days: float | None = None
    seed: int = 1
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    signal: str = "direct"
    round_minutes: float = 30
    passive_interval_s: float = 0
    power_down_minutes: float | None = None
    node_mtbf_days: float | None = None
    host_idle_w: float = 30
    horizon_hours: float = 48
    placement: str = "consolidated"
    topology: str = ""
    within: str | None = None
    predictor: str = "perfect"
    batch_tuning: str = "all"
    tenant_guarantees: dict[str, int] = field(default_factory=dict[str, int])
    tenant_weights: dict[str, float] = field(default_factory=dict[str, float])
    orders: list[GridOrderAhead] = field(default_factory=list["GridOrderAhead"])
    levers: bool = False
    jobs: str | StoredFile
    carbon: str | StoredFile
    forecast: str | StoredFile


@dataclass(frozen=True, kw_only=True)
class WaitingExplanation:
    """Why a job waits, when it may start, and what it would emit.

    Attributes:
        starts_now: Whether a round on the present state would start it.
        place: Null where the job is not before the policy: held, or waiting for something else.
        expected_start_at: Null if unknown.
        expected_start_from: The policy's own plan, or the simulation of the present queue.
        power_w: Draw of the smallest gang, without PUE.
        now: If it began now.
        greenest: If it began at the greenest time that the forecast knows and the job's deadline and flexibility
            allow.
        one_change: Only if asked for (`one_change=true`); null if it starts now, or if none is known.
    """

    since: datetime
    starts_now: bool
    place: QueuePlace | None = None
    gpus: AskedGpus
    expected_start_at: datetime | None = None
    expected_start_from: str | None = None
    length: LengthEstimate | None = None
    power_w: float | None = None
    now: EmissionEstimate | None = None
    greenest: EmissionEstimate | None = None
    forecast: GridForecast | None = None
    one_change: OneChange | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """How much work the job has in total; progress and energy efficiency are measured against it."""

    total: float
    unit: str = "steps"


@dataclass(frozen=True, kw_only=True)
class WorkFailure:
    """Why there is no answer: a code for programs and a text for people."""

    code: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Zone:
    """A grid zone, and the data available for it."""

    zone: str
    name: str
    provider: str
    signals: list[str]
    has_provider_forecast: bool
    attribution: str
    sources: list[ZoneSource] = field(default_factory=list["ZoneSource"])


@dataclass(frozen=True, kw_only=True)
class ZoneIntensity:
    """Carbon intensities of one grid zone. Null: unknown.

    Attributes:
        mean_gco2_per_kwh: Mean over the period, weighted by the time in which nodes of the zone reported. Unknown
            if the period contains lines that were combined into daily sums.
        market_gco2_per_kwh: Stated factor of the contracts.
    """

    zone: str
    mean_gco2_per_kwh: float | None
    market_gco2_per_kwh: float | None


@dataclass(frozen=True, kw_only=True)
class ZoneList:
    """The known zones."""

    items: list[Zone]


@dataclass(frozen=True, kw_only=True)
class ZoneSource:
    """The source of the values of one signal in a zone, and its state.

    Attributes:
        step_s: Usual length of an interval, in real seconds.
        max_age_s: Real seconds since the start of its interval after which a value is stale.
        time_scale: Grid seconds per real second.
        last_success_at: When the provider last answered successfully.
        last_error: The latest error, if the provider has not answered successfully since.
        skipped_values: Values rejected since the process started because they were null, not finite or without a
            time.
    """

    signal: str
    provider: str
    attribution: str
    has_provider_forecast: bool
    step_s: float
    max_age_s: float
    time_scale: float
    last_success_at: datetime | None
    last_error: str | None
    skipped_values: int


class AfterFields(TypedDict, total=False):
    """Other jobs that must have ended before a job may start, and how.

    Each is named by its id, by its name, by its number as a string (`#12`, or `12` if no job has that name), by the
    beginning of its id or, in a batch, by its position from 0. An array stands for all of its tasks.

    Attributes:
        ok: These must have succeeded; of an array, every task.
        any: These must have ended, in whatever way.
        not_ok: These must have failed or been cancelled; of an array, at least one task.
    """

    ok: str | int | list[str | int] | None
    any: str | int | list[str | int] | None
    not_ok: str | int | list[str | int] | None


class BatchRangeFields(TypedDict, total=False):
    """The total batch sizes that a policy may choose from; the training code reads the chosen one.

    Attributes:
        min: Samples per step of the whole gang.
    """

    min: Required[int]
    max: Required[int]


class GitSourceFields(TypedDict, total=False):
    """A commit of a repository that nodes can reach.

    Attributes:
        url: `https://HOST/PATH`, `ssh://USER@HOST/PATH` or `USER@HOST:PATH`.
        revision: A whole commit id, so that all nodes and restarts have the same files.
        secret: A secret with a token, `USER:TOKEN`, or a private key for SSH. The job does not get it.
    """

    url: Required[str]
    revision: Required[str]
    secret: str | None


class GpuRequestFields(TypedDict, total=False):
    """The sizes the gang may have: `min`, `min + step`, ... `max`.

    Attributes:
        max: By default `min`: a job of fixed size.
        asked: The size that you would ask for if the gang had only one: what `joint` measures by whether other
            sizes are worth it. By default `min`.
        model: GPU model that the job needs, as nodes report it.
        memory_gib: Minimum memory of each device.
        zone: Grid zone to stay in, as with data that are there; by default any.
        within: Level of the network, such as `rack`, in one domain of which the whole gang must lie; it waits
            until one has room. `node` is always one; `GET /v1/topology` lists them.
        near: The same, where that delays it no more than any other place: it should, but need not.
        slice: Size of the MIG slice that the job needs instead of a GPU, in sevenths of one. It gets one.
    """

    min: int
    max: int | None
    step: int
    asked: int | None
    model: str | None
    memory_gib: float | None
    zone: str | None
    within: str | None
    near: str | None
    slice: Literal["1g", "2g", "3g", "4g", "7g"] | None


class GridOrderAheadFields(TypedDict, total=False):
    """An order of the grid in simulated time.

    Attributes:
        cut: Share of what is drawn before it.
        to_w: The most that may be drawn, watts.
        notice_s: How long before its start the cluster may prepare.
    """

    start_at: Required[datetime | str]
    duration_s: Required[float]
    cut: float | None
    to_w: float | None
    notice_s: float


class InlineFileFields(TypedDict, total=False):
    """A file in the request, either as `text` or compressed as `gzip_base64`."""

    name: str
    text: str | None
    gzip_base64: str | None


class JobSpecTerms(TypedDict, total=False):
    """A job as it is submitted.

    Attributes:
        image: Container image. The command, if there is one, runs in it.
        source: The job's files, where nodes share no folder with the submitter.
        working_dir: An absolute path; with a `source`, a path in it, by default its top folder.
        checkpoint_dir: Kept between restarts. By default, each job has a folder of its own.
        processes: Whether the command is started once for each GPU of the gang (`per_gpu`) or once on each of its
            nodes (`per_node`). By default once per node if the command is a known launcher, such as `torchrun`,
            `accelerate`, `deepspeed` or `mpirun`, or if the job has no command; else once per GPU. An accepted
            job whose gang may be wider than one GPU shows what was chosen; with one GPU there is one process
            either way.
        family: Kind of model that the job trains. It serves as a prior for scaling until measurements exist.
        global_batch: Samples per step of the whole gang, the same at every size. A reported `local_batch`
            overrides it. With `batch`, the one that the code's learning rate is for; by default `batch.min`.
        batch: Permits policies that tune batches to choose the gang's total batch, samples per step, within this
            range. The training code reads it from `$WATTSHIFT_BATCH_SIZE` whenever it starts. `work` then counts
            samples, tokens or epochs.
        flexibility_s: How long the job may be delayed; null leaves that to the policy.
        priority: Jobs with a higher priority go first, in policies that use it.
        flex: How much slower orders of the grid may make the job, percent; 0 spares it as long as anything else
            can meet an order. Null: as its tenant's `flex` says, else 25.
        may_share_gpu: Whether the job may share its GPU with another job that may, under policies that pack jobs
            (`gandiva`, of wattshift-lab). It has one GPU then, may be preempted, and needs at most
            `gpus.memory_gib` of its memory; both fit together. Jobs that share a GPU slow each other down, and
            one can take memory from the other.
        grace_s: Time between SIGTERM and SIGKILL.
        time_limit_s: How long one run of the job may take: then SIGTERM, `grace_s`, SIGKILL. The job has failed
            with the reason `time_limit`, and is not restarted. A run that is preempted and continues later starts
            anew.
        max_restarts: How often a failed job is restarted; preemptions do not count.
        restart_after_node_loss: Whether the job is queued again when a node that it runs on is lost; otherwise it
            has failed with the reason `node_lost`.
        hold: Accept the job, but start it only after a release.
        secrets: Secrets of the tenant that the job gets, as variables or as files.
        array: Makes the submission an array: one job, a task, for each index, as `0-99`, `1,3,5-9:2` or, with at
            most 8 at once, `0-99%8`. A task has the array's spec, and its index in `$WATTSHIFT_ARRAY_INDEX`.
        after: Jobs that must have ended before it starts, and how.
        notify: Have these messages about the job sent also to webhooks of its tenant and project that take only
            the other of `job.started` and `job.ended`. `failed` is an end in which the job has failed.
        service: Set only for instances of pools, which are service instances.
        cells: Cells that may run the job in place of the installation that it is submitted to, by name, or `any`.
            It runs where it emits least and ends in time. Its command and image must be at home there.
        may_move: Whether the job may be stopped, with its grace period, and go on in another cell that has become
            cleaner: its `checkpoint_dir` is one folder, the same files, here and in all of its `cells`. It
            reports its progress.
    """

    image: str | None
    environment: dict[str, str]
    source: SourceFields | None
    working_dir: str | None
    checkpoint_dir: str | None
    work: WorkFields | None
    progress: ProgressFields
    processes: Literal["per_gpu", "per_node"] | None
    family: Literal["vision", "language", "speech", "recommendation"] | None
    global_batch: int | None
    batch: BatchRangeFields | None
    layout: ParallelLayoutFields | None
    deadline: datetime | str | None
    flexibility_s: float | None
    priority: int
    preemptible: bool
    flex: Literal[0, 10, 25, 50] | None
    may_share_gpu: bool
    grace_s: float
    time_limit_s: float | None
    max_restarts: int
    restart_after_node_loss: bool
    project: str
    labels: dict[str, str]
    hold: bool
    secrets: list[SecretUseFields] | None
    array: str | None
    after: AfterFields | None
    notify: list[Literal["started", "ended", "failed"]] | None
    service: ServiceTermsFields | None
    cells: list[str] | None
    may_move: bool


class JobSpecFields(JobSpecTerms, total=False):
    """All of its fields."""

    name: Required[str]
    command: list[str]
    gpus: GpuRequestFields


class ParallelLayoutFields(TypedDict, total=False):
    """How the gang is divided into stages and replicas, for placement."""

    stages: Required[list[StageFields]]
    all_reduce: Literal["ring", "tree"]


class ProgressFields(TypedDict, total=False):
    """How the job reports its progress.

    `file`: the job writes JSON lines `{"done": number}` to `$WATTSHIFT_PROGRESS_FILE`; the last line counts.
    `log`: `pattern` is searched in standard output; its groups `done` and, optionally, `total` match numbers.
    `http`: the job posts `{"done": number}` to `$WATTSHIFT_PROGRESS_URL`.
    """

    source: Literal["file", "log", "http", "none"]
    pattern: str | None


class SecretUseFields(TypedDict, total=False):
    """A secret that a job gets, as a variable or as a file.

    A secret of the job's project takes precedence over one of the whole tenant.

    Attributes:
        env: The variable that holds the value.
        file: The file in `$WATTSHIFT_SECRETS_DIR` that holds the value.
    """

    name: Required[str]
    env: str | None
    file: str | None


class ServiceTermsFields(TypedDict, total=False):
    """Where a service instance may run. It is placed before all training jobs and listens on `$WATTSHIFT_PORT`.

    Attributes:
        zone: Only on nodes in this grid zone.
        node_labels: Only on nodes that have all of these labels.
        fleet: Only on the GPUs, or slices of them, that are reserved for this fleet.
    """

    zone: str | None
    node_labels: dict[str, str]
    fleet: str | None


class SourceFields(TypedDict, total=False):
    """The job's files. The job runs in what is unpacked on each node, or in a folder in it.

    Attributes:
        upload: The SHA-256 of an archive that the tenant has uploaded.
    """

    upload: str | None
    git: GitSourceFields | None


class StageFields(TypedDict, total=False):
    """One pipeline stage of a job's parallel layout. Bytes are per iteration, for the whole mini-batch.

    Attributes:
        replicas: Data-parallel replicas; each is placed as a unit.
        tensor_parallel: GPUs of each replica, all on one server.
        expert_parallel: Consecutive replicas that exchange tokens; divides `replicas`.
        parameter_bytes: Bytes of gradients that the replicas all-reduce.
        forward_s: Forward computation of one replica on its share of the batch.
        output_bytes: Bytes sent to the next stage per iteration.
        tensor_bytes: Bytes all-reduced within tensor groups, forward and backward together.
        expert_bytes: Bytes sent to experts and back in one pass.
    """

    replicas: Required[int]
    tensor_parallel: int
    expert_parallel: int
    parameter_bytes: float
    forward_s: float | None
    backward_s: float | None
    output_bytes: float
    tensor_bytes: float
    expert_bytes: float


class TrainingRequestFields(TypedDict, total=False):
    """Asks what policies would have done with past jobs.

    Attributes:
        policy: One policy, or several as a list or separated by commas.
        cluster: `NODESxGPUS:MODEL[SLICES]`, several separated by commas; `ZONE=` before one says its grid.
        format: Format of the job file; by default recognised by its header.
        recipe: How jobs behave; by default the recipe of the trace.
        start: UTC date at which simulated time begins.
        days: Simulate only jobs submitted within this many days.
        seed: The same input and the same seed give the same results.
        params: Policy parameters by name, or by `POLICY.name` if there are several policies.
        signal: Which intensity: `direct`, `lifecycle` or `marginal`.
        round_minutes: Time between active rounds.
        passive_interval_s: Minimum time between passive rounds.
        power_down_minutes: Power down nodes that have been idle for this long; by default never.
        node_mtbf_days: Mean time between failures of a node; by default nodes do not fail.
        host_idle_w: Power of the host per idle GPU, in watts.
        horizon_hours: How far ahead policies know the carbon intensity.
        placement: `consolidated`, `buddy`, `first-fit`, `heavy-edge` or `refined`; for policies that do not place
            jobs themselves.
        topology: Levels of the network, as the file of `PUT /v1/topology`; the nodes are n0, n1 and so on, in the
            order of `cluster`.
        within: Level in one domain of which every gang must lie, such as `rack`.
        predictor: How job lengths are predicted: `perfect`; `none`, for policies that learn them from the jobs'
            own progress; or `forest`, `mean`, `median`, `mean-of-all` or `median-of-all`, learned from jobs that
            have ended.
        batch_tuning: Which jobs' batch size may follow the gang, under policies that use it; half of them are
            drawn by the seed.
        tenant_guarantees: GPUs that tenants of the trace are guaranteed.
        tenant_weights: The weight of each tenant of the trace in sharing the GPUs with others, under policies
            that share between tenants (`fair+` before a policy's name); 1 where none is given.
        orders: Orders of the grid to the whole cluster, which the policies have to meet.
        levers: Instead of the policy's results, say what each of its levers saves: the jobs are replayed under
            `fifo`, then under the policy with one lever more each time. One policy, and not with jobs `live`.
        jobs: A bundled trace (`green-year`, `green-day`), a file, or `history` for the jobs that ran on this
            cluster, or `live` (for operators) for those that wait and run on it now.
        carbon: A bundled zone (`SE`, `GB`, `PL`, `US-CAL-CISO`, `CA-ON`) or a file; with `history`, any zone of
            `/v1/carbon/zones`, with its measured intensities; with `live` also `live`.
        forecast: The forecasts that policies get. `issued` stands for the recorded forecasts of bundled zones; a
            file holds other recorded ones.
    """

    policy: Required[str | list[str]]
    cluster: str
    format: str | None
    recipe: str | None
    start: str | None
    days: float | None
    seed: int
    params: dict[str, Any]
    signal: str
    round_minutes: float
    passive_interval_s: float
    power_down_minutes: float | None
    node_mtbf_days: float | None
    host_idle_w: float
    horizon_hours: float
    placement: str
    topology: str
    within: str | None
    predictor: str
    batch_tuning: Literal["all", "half", "none"]
    tenant_guarantees: dict[str, int]
    tenant_weights: dict[str, float]
    orders: list[GridOrderAheadFields]
    levers: bool
    jobs: Required[str | InlineFileFields]
    carbon: Required[str | InlineFileFields]
    forecast: Literal["perfect", "persistence", "issued"] | InlineFileFields


class WorkFields(TypedDict, total=False):
    """How much work the job has in total; progress and energy efficiency are measured against it."""

    total: Required[float]
    unit: Literal["steps", "epochs", "samples", "tokens"]
