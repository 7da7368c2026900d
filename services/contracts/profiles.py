"""What was learned about a kind of job: the answer to ``GET /v1/jobs/{job_id}/profile``."""

from __future__ import annotations

from pydantic import Field

from services.contracts.schema import Instant, Message
from services.core.domain.controls import ControlKind


class LearnedCurve(Message):
    """Speed and power of a kind of job on one GPU model, by power limit or by clock."""

    gpu_model: str
    setting: ControlKind
    values: list[float] = Field(description="Power limits in W or clocks in MHz, ascending; the last is the default.")
    gpus: int = Field(
        description="Gang size that `speed` and `power_w` are for: the measured size closest to the job's."
    )
    speed: list[float] = Field(description="Speed at each value, relative to the default.")
    power_w: list[float] = Field(description="Mean power of one GPU at each value.")
    measured_gpus: list[int] = Field(description="Gang sizes that were measured; the model extrapolates to others.")
    points: int
    family: str | None = Field(
        description="Kind of model that the jobs train; null if unknown, and then the prior is an average one."
    )
    batch_known: bool = Field(
        description="Whether the jobs report samples per step; otherwise typical values are assumed for other sizes."
    )
    time_mape: float | None = Field(
        description="Mean absolute percentage error of the model's times on its points, as a fraction."
    )
    energy_mape: float | None = Field(description="The same for its energies.")
    detail: str = Field(description="Why there is no model; empty if there is one.")
    fitted_at: Instant


class ControlMeasurement(Message):
    """A gang of this kind that is, or was, run at several values of a control in turn."""

    job_id: str
    allocation_id: str
    gpu_model: str
    setting: ControlKind
    gpus: int
    state: str = Field(
        description="`running`, `done`, `cut` (the gang ended, or its controls were changed) or `failed`."
    )
    detail: str = Field(description="Why it failed or was cut short.")
    settings: list[float] = Field(description="Values in W or MHz, in the order in which they are tried.")
    position: int = Field(description="Index of the current value, or of the last one.")
    began_at: Instant
    ended_at: Instant | None


class ControlInForce(Message):
    """The controls of a job's devices on one node, as reported by the agent."""

    allocation_id: str
    current: bool = Field(description="Whether the gang still holds its devices.")
    node_id: str
    revision: int = Field(description="Counts the changes of the gang's controls.")
    power_limit_w: float | None = Field(description="Power limit set on each device; null for the default.")
    clock_mhz: int | None = Field(description="Clock that the devices are locked to; null if they are not locked.")
    enforced_w: list[float] = Field(description="Power limits as read back from the devices.")
    refused: dict[str, str] = Field(description="Refused controls, with the devices' own error messages.")
    since: Instant = Field(description="When the agent saw them take effect, by its own clock.")


class JobProfile(Message):
    """What is known about jobs of the same kind."""

    job_id: str
    kind: str = Field(description="The job's label `kind`, within its tenant; without that label, the job itself.")
    curves: list[LearnedCurve]
    measurements: list[ControlMeasurement] = Field(description="The latest 20, newest first.")
    in_force: list[ControlInForce] = Field(
        description="Controls of the job's own devices: the latest 50, newest first."
    )
