"""What was learned of a job's kind: the answers of ``GET /v1/jobs/{job_id}/profile``."""

from __future__ import annotations

from pydantic import Field

from services.contracts.schema import Instant, Message
from services.core.domain.controls import ControlKind


class LearnedCurve(Message):
    """A kind of job on one GPU model, by one kind of setting."""

    gpu_model: str
    setting: ControlKind
    values: list[float] = Field(description="W or MHz, ascending; the last is the default.")
    gpus: int = Field(description="Size of the gangs that the next two are for: the measured one next to the job's.")
    speed: list[float] = Field(description="At each value, relative to the default.")
    power_w: list[float] = Field(description="Mean draw of one GPU at each value.")
    measured_gpus: list[int] = Field(description="Sizes that were measured; others are foreseen by the model.")
    points: int
    family: str | None = Field(description="What its jobs say they train; null: unknown, the prior is a middling one.")
    batch_known: bool = Field(
        description="Whether its jobs say how many samples a step has; else other sizes are foreseen by the usual ones."
    )
    time_mape: float | None = Field(description="Mean absolute error of the model's times on its points, as a share.")
    energy_mape: float | None = Field(description="The same of its energies.")
    detail: str = Field(description="Why there is no model; empty where there is one.")
    fitted_at: Instant


class ControlMeasurement(Message):
    """A gang of the kind that is, or was, run at each setting in turn."""

    job_id: str
    allocation_id: str
    gpu_model: str
    setting: ControlKind
    gpus: int
    state: str = Field(description="`running`, `done`, `cut` (its gang ended or was set) or `failed`.")
    detail: str = Field(description="Why it failed or was cut.")
    settings: list[float] = Field(description="W or MHz, in the order in which they are tried.")
    position: int = Field(description="Which of them is, or was last, in force.")
    began_at: Instant
    ended_at: Instant | None


class ControlInForce(Message):
    """What the devices of a job on one node were set to, as their agent found it."""

    allocation_id: str
    current: bool = Field(description="Whether that gang still holds its devices.")
    node_id: str
    revision: int = Field(description="The gang's settings are counted up with every change.")
    power_limit_w: float | None = Field(description="Set on each; null: the default.")
    clock_mhz: int | None = Field(description="Locked to; null: not locked.")
    enforced_w: list[float] = Field(description="The limits that the devices themselves told, read back.")
    refused: dict[str, str] = Field(description="What they refused, by kind of setting, in their own words.")
    since: Instant = Field(description="When the agent found it in force, by its clock.")


class JobProfile(Message):
    """What is known of the kind of job that a job is of."""

    job_id: str
    kind: str = Field(description="The job's label `kind`, of its tenant alone, or the job itself.")
    curves: list[LearnedCurve]
    measurements: list[ControlMeasurement] = Field(description="The newest first, at most 20.")
    in_force: list[ControlInForce] = Field(description="What its own devices had, the newest first, at most 50.")
