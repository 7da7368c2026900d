"""Policies, their parameters, and the rounds that they decided."""

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from services.contracts.schema import Instant, Message, Page, Text, maybe, said
from services.core.domain.controls import ControlKind

PolicyName = Annotated[Text, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,62}$")]
"""A policy's name; one with several parts, such as ``fair+joint``, has them joined by ``+``."""


class PolicyParameter(Message):
    """A parameter that operators can set."""

    name: str
    type: str
    default: Any
    minimum: float | None = None
    maximum: float | None = None
    unit: str | None = None
    meaning: str
    choices: list[str] | None = None


class PolicyDescription(Message):
    """A policy that the scheduler can run."""

    name: str
    summary: str
    source: str
    active: bool
    parameters: list[PolicyParameter]


class PolicyList(Message):
    """The policies; exactly one is active."""

    items: list[PolicyDescription]


class PolicyChoice(Message):
    """Which policy to run with which parameters. Parameters left out take their defaults."""

    name: PolicyName
    parameters: dict[str, Any] = Field(default_factory=dict[str, Any], max_length=100)


class ActivePolicy(Message):
    """The active policy."""

    name: str
    parameters: dict[str, Any]
    since: Instant
    changed_by: str
    round_interval_s: float
    problem: str | None = maybe(
        "Why the stored policy cannot be used. Rounds continue with the last usable one, or with the default."
    )


class TenantShare(Message):
    """What a tenant is guaranteed of the GPUs, its share of the others, and what it holds of them."""

    tenant_id: str
    weight: float
    share: float = said("Its part of the GPUs by weight among the tenants that have jobs, 0 to 1.")
    gpus: int = said("GPUs that its jobs hold.")
    guaranteed_gpus: int = said("GPUs that it is guaranteed.", default=0)
    borrowed_gpus: int = said("How many more it holds.", default=0)
    max_gpus: int | None = maybe("The most that it may hold; null: no limit.")
    waiting_jobs: int
    used_gpu_hours: float | None = said(
        "GPU hours that count against it, which fade with the policy's half-life; null if the policy does "
        "not share between tenants."
    )


class TenantShares(Message):
    """How the GPUs are divided between the tenants that have jobs, or guaranteed GPUs."""

    policy: str
    active: bool = said("Whether the policy shares between tenants: `fair+` is before its name.")
    jain: float | None = said(
        "Jain's index of used GPU hours by weight, over the tenants that have jobs waiting: 1 is even, 1/n "
        "is all for one. Null with fewer than two, or if the policy does not share."
    )
    items: list[TenantShare]


class PlannedAction(Message):
    """One action of a plan."""

    action: str
    job_id: str | None = maybe("Null if the action concerns a node.")
    node_id: str | None = maybe("The node, for `power_down` and `wake`.")
    reason: str
    gpus: int | None = None
    power_limit_w: float | None = maybe("For `set_power_limit`; null restores the default.")
    clock_mhz: int | None = maybe("For `set_clock`; null restores the default.")
    setting: ControlKind | None = maybe("For `profile_settings`: the control that is varied.")


class PlanSummary(Message):
    """A scheduling round."""

    round: int
    at: Instant
    trigger: str
    policy: str
    jobs: int
    starts: int
    preemptions: int
    holds: int
    intensity_gco2_per_kwh: float | None = said(
        "Carbon intensity when the plan was made; the mean over the nodes' zones by their GPUs."
    )
    intensity_stale: bool = said("Whether that of any zone was past its age.")
    decide_ms: float
    actions: list[PlannedAction] = Field(default_factory=list[PlannedAction])


class PlanList(Page[PlanSummary]):
    """Rounds, newest first."""
