"""Predicted lengths of jobs, and the models they come from."""

from __future__ import annotations

from pydantic import Field

from services.contracts.schema import Instant, Message


class JobPrediction(Message):
    """What was foretold of a job when the scheduler first saw it, and what it came to. Amounts are GPU seconds."""

    job_id: str
    predicted_at: Instant
    model_id: str | None = Field(description="The version that told it; null: there was none yet.")
    group_id: str = Field(description="Jobs of one group are taken for one job submitted again.")
    group_seen: bool = Field(description="Whether jobs of the group had ended; of a new group 0 is foretold.")
    examples: int = Field(description="How many, among those the model was trained on.")
    gpu_s: float = Field(description="GPU seconds foretold.")
    duration_s: float = Field(description="On its smallest gang, if twice the GPUs take half the time.")
    spread_gpu_s: float = Field(description="Standard deviation over the trees of the forest.")
    low_gpu_s: float | None = Field(description="A tenth of the group's jobs came to less.")
    median_gpu_s: float | None
    high_gpu_s: float | None = Field(description="A tenth of them came to more.")
    actual_gpu_s: float | None = Field(description="What it came to; null until it has succeeded.")
    error_gpu_s: float | None = Field(description="Foretold less actual.")


class LengthEvaluation(Message):
    """How well jobs were foretold that the model had not seen."""

    jobs: int = Field(description="The newest of the history.")
    seen: float = Field(description="Share whose group was known.")
    exact: float = Field(description="Share that was off by less than 1 %.")
    within_tenth: float = Field(description="Share that was off by less than 10 %.")
    mean_error: float = Field(description="Mean absolute error, GPU seconds.")


class LengthEvaluations(Message):
    """The same jobs, foretold three ways."""

    new: LengthEvaluation = Field(description="By this model, fitted to what ended before them.")
    last: LengthEvaluation | None = Field(description="By the model in force at the time; null: there was none.")
    user_median: LengthEvaluation = Field(description="By the median of the project's earlier jobs.")


class LengthModel(Message):
    """One version of the model."""

    id: str
    trained_at: Instant
    through_at: Instant = Field(description="It knows the jobs that had ended by then.")
    jobs: int
    groups: int
    active: bool = Field(
        description="Whether it foretells now; of two it is the one that erred less on the newest jobs."
    )
    evaluation: LengthEvaluations


class LengthModelList(Message):
    """Versions, newest first."""

    items: list[LengthModel]
