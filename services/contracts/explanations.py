"""Why a job waits, what it does, what happened to it, or what would become of it if it were submitted now."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from services.contracts.grid import Flex
from services.contracts.jobs import JobFootprint, Share
from services.contracts.schema import Instant, Message, many, maybe, said
from services.core.domain.jobs import JobState


class EmissionEstimate(Message):
    """What one run would emit if it began at a given time. Figures are null where they cannot be known."""

    starts_at: Instant
    zone: str
    signal: str
    intensity_gco2_per_kwh: float = said("Mean forecast intensity while the job runs.")
    carbon_gco2_per_hour: float | None = None
    carbon_gco2: float | None = maybe("Of the whole run; null if its length is unknown.")


class StartEstimate(Message):
    """What the policy in force would do with a job now. Nothing is submitted, and nothing is reserved."""

    policy: str
    starts_now: bool
    gpus: int = said("Size of the gang that would start, or else the smallest one the job may have.")
    placement: list[Share] = many("Where; empty if it would wait.")
    reason: str | None = maybe("Stable code of why it would wait.")
    detail: str | None = maybe("The reason in words.")
    expected_start_at: Instant | None = maybe(
        "When it may start if it would wait and the policy can tell; null if unknown."
    )
    room_at: Instant | None = maybe(
        "If it would wait for GPUs: from when on it and all jobs there would have those that they ask for; null if "
        "unknown."
    )
    free_gpus: int = said("GPUs that are free now on nodes that suit the job.")
    suitable_gpus: int = said("GPUs in total on nodes that suit the job.")
    slice: str | None = maybe("Size of the MIG slice that it asks for; both figures then count such slices.")
    waiting_jobs: int = said("Jobs that wait now, of all users.")
    duration_s: float | None = None
    duration_from: Literal["prediction", "time_limit"] | None = maybe(
        "Earlier runs of such jobs, or the longest run that the job allows."
    )
    power_w: float | None = maybe("Draw of the gang, without PUE.")
    power_from: Literal["measured", "typical"] | None = maybe(
        "Runs of this kind of job, or the usual draw of the GPU model."
    )
    now: EmissionEstimate | None = maybe("If it began now.")
    greenest: EmissionEstimate | None = maybe(
        "If it began at the greenest time that the forecast knows and the job's deadline and flexibility allow."
    )
    assumptions: list[str] = many("What the figures rest on, in sentences.")


class StoryLine(Message):
    """Something that happened to the job, in one sentence."""

    at: Instant
    text: str
    reason: str | None = maybe("Stable code of the reason, where the event has one.")


class JobAhead(Message):
    """A waiting job that comes before this one."""

    job_id: str
    name: str
    gpus: int = said("Size of its smallest gang.")


class QueuePlace(Message):
    """A waiting job's place in the order in which the policy starts jobs, according to a round on the present state.

    Jobs that the caller may not see are counted, but never named.
    """

    position: int | None = maybe("1 for the first. Null: the policy does not rank the job now, or has no such order.")
    waiting_jobs: int = said("Jobs that wait now, of all users, this one included.")
    ahead: int | None = maybe("Waiting jobs that come before it; null as `position`.")
    ahead_gpus: int | None = maybe("GPUs that the smallest gangs of those take together.")
    hidden_ahead: int = said("How many of those the caller may not see.", default=0)
    first: list[JobAhead] = many("The first of those that the caller may see.")


class AskedGpus(Message):
    """The GPUs that the job asks for, and those in the cluster that would do."""

    min: int
    max: int
    model: str | None = None
    memory_gib: float | None = None
    zone: str | None = None
    slice: str | None = maybe("Size of the MIG slice that it asks for; the figures below then count such slices.")
    suitable: int = said("GPUs on nodes that suit the job, drained nodes not counted.")
    free: int = said("Those of them that are free now.")
    drained: int = said("Further GPUs on suitable nodes that take no new work.")


class LengthEstimate(Message):
    """How long the job will still run once it starts, on the gang in question. Figures are null where unknown."""

    seconds: float | None = None
    low_s: float | None = maybe("10th percentile of earlier runs like it.")
    high_s: float | None = maybe("90th percentile of earlier runs like it.")
    source: Literal["progress", "prediction", "time_limit"] | None = maybe(
        "The job's own progress, earlier runs like it, or the longest run that it allows."
    )


class GridForecast(Message):
    """The forecast that the emissions rest on."""

    zone: str
    signal: str
    stale: bool = said("Whether its newest value is older than it should be.")
    made_at: Instant | None = maybe("When the forecast was made; null if that is unknown.")
    known_until: Instant = said("End of the forecast.")


class ExplanationQuery(Message):
    """What to look for besides."""

    one_change: bool = said(
        "The smallest change that would start a waiting job now or else earlier, in `waiting.one_change`.",
        default=False,
    )


class OneChange(Message):
    """The smallest change that would start a waiting job now or, where none does, earlier.

    An accepted job is not changed: the same job, submitted again with this change, would start in the next round if
    this one were withdrawn. That was replayed with the present queue, and holds as long as the queue is the same. Where
    none does, it is a minute or more earlier by a simulation of the queue, under the policy in force.
    """

    what: Literal["deadline", "preemptible", "flex", "within", "model", "gpus", "zone"] = said(
        "What to ask for instead; `zone`: none."
    )
    gpus: int | None = maybe("That many GPUs.")
    model: str | None = maybe("GPUs of this model.")
    flex: Flex | None = maybe("This class towards orders of the grid.")
    within: str | None = maybe("Within one domain of this level of the network; null with `within`: anywhere.")
    deadline: Instant | None = maybe("This deadline; null with `deadline`: none.")
    starts_at: Instant | None = maybe("When it would start, by a simulation of the queue; null: now.")
    detail: str = said("The change in words, as at the end of `summary`.")


class WaitingExplanation(Message):
    """Why a job waits, when it may start, and what it would emit."""

    since: Instant
    starts_now: bool = said("Whether a round on the present state would start it.")
    place: QueuePlace | None = maybe(
        "Null where the job is not before the policy: held, or waiting for something else."
    )
    gpus: AskedGpus
    expected_start_at: Instant | None = maybe("Null if unknown.")
    expected_start_from: Literal["policy", "simulation"] | None = maybe(
        "The policy's own plan, or the simulation of the present queue."
    )
    length: LengthEstimate = LengthEstimate()
    power_w: float | None = maybe("Draw of the smallest gang, without PUE.")
    now: EmissionEstimate | None = maybe("If it began now.")
    greenest: EmissionEstimate | None = maybe(
        "If it began at the greenest time that the forecast knows and the job's deadline and flexibility allow."
    )
    forecast: GridForecast | None = None
    one_change: OneChange | None = maybe(
        "Only if asked for (`one_change=true`); null if it starts now, or if none is known."
    )


class NextStep(Message):
    """What the next active round would do to a running job, according to a round on the present state."""

    action: Literal["keep", "stop"]
    at: Instant | None = maybe("When that round is due.")
    reason: str | None = None
    detail: str
    gpus: int | None = maybe("Size of its gang if it comes back resized.")


class RunningExplanation(Message):
    """Where and how a job runs, and what comes next."""

    since: Instant
    gpus: int
    placement: list[Share]
    why: list[str] = said("Why it has this size, power limit and clock, in sentences.")
    power_limit_w: float | None = None
    clock_mhz: int | None = None
    expected_end_at: Instant | None = maybe("Null if the job's length is unknown.")
    stop_at: Instant | None = maybe("By when it will be killed; null while no end is set. As `stop_at` of the job.")
    length: LengthEstimate = LengthEstimate()
    next: NextStep | None = maybe("Null while the job is being stopped.")


class EndedExplanation(Message):
    """What became of a job. Times are sums over all its gangs."""

    exit_code: int | None = None
    waited_s: float = said("Time without GPUs, from submission to its end.")
    held_gpus_s: float = said("Time in which it held GPUs.")
    starts: int
    preemptions: int
    restarts: int


class Outcome(StrEnum):
    """Whether the comparison with other policies is available."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


class PolicyOutcome(Message):
    """What would become of the job under a policy, if no further job were submitted."""

    policy: str
    in_force: bool = False
    starts_at: Instant | None = maybe("When it next gets GPUs; null: not within the horizon.")
    ends_at: Instant | None = None
    waits_s: float | None = maybe("From the time of the snapshot to that start.")
    carbon_gco2: float | None = maybe("Emissions from the snapshot to the end, without PUE.")
    failure: str | None = maybe("Why there is no answer for this policy.")


class PolicyComparison(Message):
    """The present queue under every policy, simulated in the background from one snapshot for all who ask."""

    status: Outcome
    as_of: Instant | None = maybe("Time of the snapshot.")
    items: list[PolicyOutcome] = Field(default_factory=list[PolicyOutcome])
    detail: str | None = maybe("Why it is pending or failed.")
    assumptions: list[str] = Field(default_factory=list[str])


class LeverEffect(Message):
    """What one lever of the policy changes for a job, compared with the same job without that lever; the others stay.

    For a job that waits or runs: over what it has left, by the policy's own figures and the forecast. For one that has
    ended: by the ledger, as far as it can tell. The effects of several levers do not add up to the effect of all.
    """

    lever: Literal["width", "batch", "power_limit", "hours", "order", "sleep", "zone"]
    carbon_saved_gco2: float | None = maybe(
        "Less emitted than without it, without PUE (of an ended job with it); null: unknown."
    )
    minutes_added: float | None = maybe("By how much later the job ends; negative: earlier; null: unknown.")
    detail: str = said("What it is compared with, or why a figure is unknown.")


class Explanation(Message):
    """A job, explained. One of `waiting`, `running` and `ended` is set, according to the job's state.

    None is while a cell has the job: there, `GET /v1/jobs/{job_id}/explain` has more.
    """

    job_id: str
    number: int | None = maybe("What people type as its id; see `Job`.")
    array_index: int | None = maybe("Its index if it is a task of an array.")
    name: str
    state: JobState
    reason: str | None = maybe("Stable code of why the job waits or how it ended.")
    detail: str | None = maybe("The reason in words.")
    summary: str = said("The answer in one or two sentences.")
    as_of: Instant
    policy: str = said("The policy in force.")
    submitted_at: Instant
    waiting: WaitingExplanation | None = None
    running: RunningExplanation | None = None
    ended: EndedExplanation | None = None
    footprint: JobFootprint = said("Used and emitted so far.", default=JobFootprint())
    baseline_gco2: float | None = maybe(
        "What the same energy would have emitted at the mean intensity of its zones from submission to its "
        "end; null while it has not ended, or if that mean is unknown."
    )
    story: list[StoryLine] = said("What happened, oldest first.")
    story_left_out: int = said("How many events in the middle of a long story are left out.", default=0)
    under_policies: PolicyComparison | None = maybe("Of a job that the scheduler has in its queue or on GPUs.")
    levers: list[LeverEffect] = many(
        "What each lever of the policy does for the job; empty under a policy that cannot tell."
    )
    assumptions: list[str] = many("What the figures rest on, in sentences.")
