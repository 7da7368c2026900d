"""Footprints, past jobs and the checks of the ledger."""

from typing import Annotated

from pydantic import Field

from services.contracts.jobs import JobFootprint
from services.contracts.queries import GroupBy, LedgerQuery, OtherGroup, Plain, RequestGroup
from services.contracts.schema import Instant, Message, Name, Page, many, maybe, said
from services.contracts.slim import ALL_FIELDS, FieldsOf
from services.core.domain.jobs import JobState
from services.core.domain.signal import Signal


class HalfWidth(Message):
    """Half the width of a 90 % interval: 9 times out of 10 the true value lies within it (docs/method.md)."""

    energy_j: float
    carbon_gco2: float


class CarbonAccounts(Message):
    """Emissions by accounts other than `carbon_gco2`, which is location-based. Null: an input is unknown."""

    facility_energy_j: float = said("Energy of the devices and hosts, times PUE.", default=0)
    estimated_gco2: float = said("The part of `carbon_gco2` for which energy or intensity was estimated.", default=0)
    market_gco2: float | None = maybe("By the factors of the contracts that `TELEMETRY_MARKET_GCO2_PER_KWH` states.")
    embodied_gco2: float | None = maybe("Share of the GPUs' embodied emissions for the time that they were reserved.")
    baseline_gco2: float | None = maybe(
        "What the same energy would have emitted at the mean intensity of its zone in the period. Less "
        "energy through power limits, other gangs or sleeping nodes is not counted as a saving."
    )
    money: float | None = maybe(
        "What the facility energy cost by the prices of its hours, in the `currency` of the report; demand "
        "charges are not in it. Unknown if the period contains daily sums of old lines."
    )
    unknown: list[str] = many("Inputs that are missing.")
    half_width: HalfWidth | None = maybe("How far `energy_j` and `carbon_gco2` of the footprint can be off.")


class FootprintLine(Message):
    """Energy and emissions of one group."""

    group: str
    then_group: str | None = maybe("The second group, where there are two dimensions.")
    name: str | None = maybe("A job's name, if the groups are jobs.")
    footprint: JobFootprint
    jobs: int
    accounts: CarbonAccounts = CarbonAccounts()


class ZoneIntensity(Message):
    """Carbon intensities of one grid zone. Null: unknown."""

    zone: str
    mean_gco2_per_kwh: float | None = said(
        "Mean over the period, weighted by the time in which nodes of the zone reported. Unknown if the "
        "period contains lines that were combined into daily sums."
    )
    market_gco2_per_kwh: float | None = said("Stated factor of the contracts.")


class FunctionalUnit(Message):
    """Software carbon intensity (SCI): emissions per unit of work.

    Only jobs that succeeded, and whose energy lies wholly in the period, count.
    """

    unit: str = said("`job`, `step`, `epoch`, `sample` or `1000 tokens`.")
    amount: float
    jobs: int
    operational_gco2: float
    embodied_gco2: float | None
    sci_gco2_per_unit: float | None = said(
        "Operational and embodied emissions per unit. Null if the embodied ones are unknown."
    )


class LedgerHour(Message):
    """What was used in an hour: by all GPUs, and by idle ones, which only operators see."""

    start_at: Instant
    covered_s: float = said(
        "For how much of the hour a node reported, the one that reported longest. 0 where the hour's lines "
        "were combined into daily sums, which all stand at midnight UTC."
    )
    energy_j: float
    carbon_gco2: float
    idle_energy_j: float | None
    idle_carbon_gco2: float | None
    money: float | None = maybe("What all of it cost, as in the footprint report.")


class HourlyReport(Message):
    """The ledger hour by hour; hours in which nothing was used are left out."""

    items: list[LedgerHour]


class DemandCharge(Message):
    """What is charged for the highest mean draw of an hour in a calendar month (UTC), as far as it is in the period."""

    zone: str
    month: str
    peak_at: Instant
    peak_kw: float = Field(description="Facility energy of that hour over an hour.")
    money: float


class FootprintTable(Message):
    """The lines of a report, summed by another group."""

    group_by: GroupBy
    lines: list[FootprintLine]


class FootprintQuery(LedgerQuery):
    """Which part of the ledger to sum, and by which group."""

    limit: Annotated[int, Plain] = Field(default=100, ge=1, le=10_000)
    group_by: GroupBy = "project"
    project: Name | None = maybe("Only jobs of this project.")
    then_by: GroupBy | None = maybe("A second group inside each, such as projects by month.")
    also: list[OtherGroup] = many("Sum the same lines by these groups, too; repeatable.", max_length=9)
    start: Instant | None = maybe("Only lines that begin at or after this time.")
    end: Instant | None = maybe("Only lines that begin before this time; a period that has not ended yet ends now.")
    fields: Annotated[list[str], FieldsOf(FootprintLine)] = many(ALL_FIELDS.format(rows="lines"))


class FootprintReport(Message):
    """The sums of the ledger over a period, all as of one moment."""

    start_at: Instant | None
    end_at: Instant = said("The end of the period; the moment of the report if that came first.")
    group_by: GroupBy
    then_by: GroupBy | None = None
    lines: list[FootprintLine]
    also: list[FootprintTable] = many("All lines by other groups.")
    idle: JobFootprint
    total: JobFootprint
    metered_gpu_energy_j: float = said(
        "Total by the devices' own counters; `total.gpu_energy_j` must agree with it to 0.1 %."
    )
    idle_accounts: CarbonAccounts = CarbonAccounts()
    total_accounts: CarbonAccounts = CarbonAccounts()
    signals: list[Signal] = many(
        "The carbon signals that priced the period. Scope 2 of the GHG Protocol wants an average one."
    )
    zones: list[ZoneIntensity] = Field(default_factory=list[ZoneIntensity])
    units: list[FunctionalUnit] = Field(default_factory=list[FunctionalUnit])
    currency: str | None = maybe("That of all money; null: no prices are known.")
    demand: list[DemandCharge] = many("No job's; operators see it.")
    next_cursor: str | None = None


class LedgerLine(Message):
    """One line of the ledger: the energy that one owner used on one node in one interval. Null if unknown.

    The fields are the columns of exports, in their order. Every amount of a report is the exact sum of the column of
    that name: numbers are written as decimals that read back as the same binary number, and summed as decimals.
    """

    start_at: Instant
    end_at: Instant
    node_id: str
    boot_id: str | None = said("The run of the node's agent; null on a daily sum of old lines.")
    sequence: int | None = said("The number of the interval in that run; null on a daily sum.")
    allocation_id: str = said("The gang that used it; empty: none did.")
    job_id: str | None
    tenant: str | None
    project: str | None
    user: str | None
    model: str | None = said("The model of the node's boards, if they are of one.")
    devices: str | None = said("Indexes of the GPUs on the node, separated by spaces.")
    gpus: int | None
    gpu_s: float
    energy_j: float = said("Of GPUs and hosts, without PUE.")
    gpu_energy_j: float
    cpu_energy_j: float | None
    static_energy_j: float | None
    gpu_source: str | None = said("How the GPU energy is known: by `counter`, `sampled`, and so on.")
    cpu_source: str | None = said("How the CPU energy is known.")
    basis: str | None = said("Why the line is not booked as it was reported; null: it is.")
    reported_energy_j: float | None = said("What was reported, where that is not booked.")
    estimated_energy_j: float = said("The part of `energy_j` that was not measured.")
    zone: str
    signal: Signal
    provider: str | None = said("Who gave the carbon intensity.")
    fetched_at: Instant | None = said("When the newest value in it was fetched.")
    intensity_kind: str | None = said(
        "The least certain kind of value in it: `measured`, `estimated` by the provider, `held`, forecast "
        "by the `provider`, `learned`, `persistence`, or the `last_used` of the ledger."
    )
    intensity_gco2_per_kwh: float = said("The factor: the mean over the line, weighted by time.")
    pue: float
    facility_energy_j: float = said("`energy_j` times `pue`.")
    carbon_gco2: float
    estimated_gco2: float = said("The part of it for which energy or intensity was estimated.")
    release: str | None = said("The release whose method made the line.")
    intensity_estimated: bool | None = said("Whether the factor was estimated; null on a daily sum.")
    estimated: bool = said("Whether the energy of its GPUs or the factor was estimated.")
    batch: int | None = said("What it was hashed with; 0: before there were batches; null on a daily sum.")
    sum_number: int | None = said("The signed sum that it is of, 0 for none; null on any other line.")


class IntensityUse(Message):
    """Energy that a job used while one intensity applied."""

    start_at: Instant
    end_at: Instant
    energy_j: float
    intensity_gco2_per_kwh: float
    carbon_gco2: float
    estimated: bool = said("Whether energy or intensity was estimated.")


class JobFootprintReport(Message):
    """A job's footprint with the intensities used to compute it."""

    job_id: str
    footprint: JobFootprint
    half_width: HalfWidth | None = maybe("How far the footprint can be off.")
    zone: str | None
    signal: Signal | None
    pue: float | None
    intervals: list[IntensityUse]
    next_cursor: str | None = None


class PastJob(Message):
    """A past job, in the columns of the simulator's own format (`wattshift`)."""

    job_id: str
    tenant: str
    project: str
    state: JobState
    submitted_at: Instant
    started_at: Instant | None = said("When the job first held GPUs.")
    ended_at: Instant | None
    gpus: int | None = said("GPUs that the job held; those of the last gang if it was resized.")
    run_s: float | None = said("Seconds during which the job held GPUs; null until it has ended.")
    gpu_s: float | None = said("GPU seconds over all its gangs; null until it has ended.")
    energy_j: float | None = said("Energy of its GPUs and its share of the hosts, as far as measured.")
    array: str | None = maybe("The array that it was a task of.")
    max_running: int | None = maybe("How many tasks of the array could hold GPUs at once.")
    after: str | None = maybe("Ids of the jobs and arrays that it waited for, separated by spaces.")
    slice: str | None = maybe("The MIG slice that it asked for instead of GPUs, such as `2g`.")


class PastJobs(Page[PastJob]):
    """One page of past jobs, in order of submission."""


class RequestLine(Message):
    """The requests of one group."""

    group: str
    requests: int
    input_tokens: int
    output_tokens: int
    estimated_requests: int = said(
        "Requests whose server did not state their tokens: an estimate of these is in the sums.", default=0
    )
    energy_j: float = said("Their part of the ledger's lines of the servers, by time.")
    carbon_gco2: float = said("Their part of the emissions of those lines.")
    outside_energy_j: float = said("Estimate for servers that the ledger has no lines of, such as registered ones.")
    outside_carbon_gco2: float


class ServersFootprint(Message):
    """What the ledger has for all servers of pools."""

    energy_j: float
    carbon_gco2: float
    unattributed_energy_j: float = said(
        "The part that is no request's: servers that loaded, were idle, or were used without the router."
    )
    unattributed_carbon_gco2: float


class RequestReport(Message):
    """Requests of a period. They share out the energy of the servers' jobs and add nothing to it."""

    start_at: Instant | None
    end_at: Instant = said("The end of the period; the moment of the report if that came first.")
    group_by: RequestGroup
    lines: list[RequestLine]
    servers: ServersFootprint | None = maybe("Null for users.")


class Invariant(Message):
    """A rule that the live system must satisfy."""

    name: str
    holds: bool
    detail: str


class InvariantReport(Message):
    """The result of checking that the live system is consistent."""

    holds: bool
    invariants: list[Invariant]
