"""What was learned about a kind of job: the answer to ``GET /v1/jobs/{job_id}/profile``."""

from services.contracts.schema import Instant, Message, said
from services.core.domain.controls import ControlKind


class LearnedCurve(Message):
    """Speed and power of a kind of job on one GPU model, by power limit or by clock."""

    gpu_model: str
    setting: ControlKind
    values: list[float] = said("Power limits in W or clocks in MHz, ascending; the last is the default.")
    gpus: int = said("Gang size that `speed` and `power_w` are for: the measured size closest to the job's.")
    speed: list[float] = said("Speed at each value, relative to the default.")
    power_w: list[float] = said("Mean power of one GPU at each value.")
    measured_gpus: list[int] = said("Gang sizes that were measured; the model extrapolates to others.")
    points: int
    family: str | None = said(
        "Kind of model that the jobs train; null if unknown, and then the prior is an average one."
    )
    batch_known: bool = said(
        "Whether the jobs report samples per step; otherwise typical values are assumed for other sizes."
    )
    time_mape: float | None = said("Mean absolute percentage error of the model's times on its points, as a fraction.")
    energy_mape: float | None = said("The same for its energies.")
    detail: str = said("Why there is no model; empty if there is one.")
    fitted_at: Instant


class ControlMeasurement(Message):
    """A gang of this kind that is, or was, run at several values of a control in turn."""

    job_id: str
    allocation_id: str
    gpu_model: str
    setting: ControlKind
    gpus: int
    state: str = said("`running`, `done`, `cut` (the gang ended, or its controls were changed) or `failed`.")
    detail: str = said("Why it failed or was cut short.")
    settings: list[float] = said("Values in W or MHz, in the order in which they are tried.")
    position: int = said("Index of the current value, or of the last one.")
    began_at: Instant
    ended_at: Instant | None


class ControlInForce(Message):
    """The controls of a job's devices on one node, as reported by the agent."""

    allocation_id: str
    current: bool = said("Whether the gang still holds its devices.")
    node_id: str
    revision: int = said("Counts the changes of the gang's controls.")
    power_limit_w: float | None = said("Power limit set on each device; null for the default.")
    clock_mhz: int | None = said("Clock that the devices are locked to; null if they are not locked.")
    enforced_w: list[float] = said("Power limits as read back from the devices.")
    refused: dict[str, str] = said("Refused controls, with the devices' own error messages.")
    since: Instant = said("When the agent saw them take effect, by its own clock.")


class JobProfile(Message):
    """What is known about jobs of the same kind."""

    job_id: str
    kind: str = said("The job's label `kind`, within its tenant; without that label, the job itself.")
    curves: list[LearnedCurve]
    measurements: list[ControlMeasurement] = said("The latest 20, newest first.")
    in_force: list[ControlInForce] = said("Controls of the job's own devices: the latest 50, newest first.")
