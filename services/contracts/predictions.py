"""Predicted lengths of jobs, and the models they come from."""

from __future__ import annotations

from pydantic import Field

from services.contracts.schema import Instant, Message


class JobPrediction(Message):
    """A job's length as predicted when the scheduler first saw it, and the actual one. Amounts are in GPU seconds."""

    job_id: str
    predicted_at: Instant
    model_id: str | None = Field(
        description="Version of the model that made the prediction; null if there was none yet."
    )
    group_id: str = Field(description="Jobs in one group are treated as the same job submitted repeatedly.")
    group_seen: bool = Field(description="Whether jobs of the group had ended before. For a new group, 0 is predicted.")
    examples: int = Field(description="How many jobs of the group the model was trained on.")
    gpu_s: float = Field(description="Predicted GPU seconds.")
    duration_s: float = Field(description="Predicted duration on the smallest gang, assuming linear speed-up.")
    spread_gpu_s: float = Field(description="Standard deviation of the earlier runs it was learned from.")
    low_gpu_s: float | None = Field(description="10th percentile of the group's jobs.")
    median_gpu_s: float | None
    high_gpu_s: float | None = Field(description="90th percentile of the group's jobs.")
    actual_gpu_s: float | None = Field(description="Actual GPU seconds; null until the job has succeeded.")
    error_gpu_s: float | None = Field(description="Predicted minus actual.")


class LengthEvaluation(Message):
    """The errors on jobs that the model was not trained on."""

    jobs: int = Field(description="How many jobs, the newest of the history.")
    seen: float = Field(description="Share of them whose group was known.")
    exact: float = Field(description="Share predicted with an error below 1 %.")
    within_tenth: float = Field(description="Share predicted with an error below 10 %.")
    mean_error: float = Field(description="Mean absolute error in GPU seconds.")


class LengthEvaluations(Message):
    """The errors of three predictors on the same jobs."""

    new: LengthEvaluation = Field(description="This model, trained on jobs that ended earlier.")
    last: LengthEvaluation | None = Field(description="The model that was active at the time; null if there was none.")
    user_median: LengthEvaluation = Field(description="The median of the project's earlier jobs.")


class LengthModel(Message):
    """One version of the job length model."""

    id: str
    trained_at: Instant
    through_at: Instant = Field(description="It was trained on jobs that ended up to this time.")
    jobs: int
    groups: int
    active: bool = Field(
        description="Whether it is in use. A new version replaces the last one if its error on the newest jobs is "
        "smaller."
    )
    evaluation: LengthEvaluations


class LengthModelList(Message):
    """The versions, newest first."""

    items: list[LengthModel]
