"""What would become of a job if it were submitted now: where and when it would start, and what it would emit."""

from typing import Literal

from services.contracts.jobs import Share
from services.contracts.schema import Instant, Message, many, maybe, said


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
