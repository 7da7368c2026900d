"""Predicted lengths of jobs, and the models they come from."""

from services.contracts.schema import Instant, Message, said


class JobPrediction(Message):
    """A job's length as predicted when the scheduler first saw it, and the actual one. Amounts are in GPU seconds."""

    job_id: str
    predicted_at: Instant
    model_id: str | None = said("Version of the model that made the prediction; null if there was none yet.")
    group_id: str = said("Jobs in one group are treated as the same job submitted repeatedly.")
    group_seen: bool = said("Whether jobs of the group had ended before. For a new group, 0 is predicted.")
    examples: int = said("How many jobs of the group the model was trained on.")
    gpu_s: float = said("Predicted GPU seconds.")
    duration_s: float = said("Predicted duration on the smallest gang, assuming linear speed-up.")
    spread_gpu_s: float = said("Standard deviation of the earlier runs it was learned from.")
    low_gpu_s: float | None = said("10th percentile of the group's jobs.")
    median_gpu_s: float | None
    high_gpu_s: float | None = said("90th percentile of the group's jobs.")
    actual_gpu_s: float | None = said("Actual GPU seconds; null until the job has succeeded.")
    error_gpu_s: float | None = said("Predicted minus actual.")


class LengthEvaluation(Message):
    """The errors on jobs that the model was not trained on."""

    jobs: int = said("How many jobs, the newest of the history.")
    seen: float = said("Share of them whose group was known.")
    exact: float = said("Share predicted with an error below 1 %.")
    within_tenth: float = said("Share predicted with an error below 10 %.")
    mean_error: float = said("Mean absolute error in GPU seconds.")


class LengthEvaluations(Message):
    """The errors of three predictors on the same jobs."""

    new: LengthEvaluation = said("This model, trained on jobs that ended earlier.")
    last: LengthEvaluation | None = said("The model that was active at the time; null if there was none.")
    user_median: LengthEvaluation = said("The median of the project's earlier jobs.")


class LengthModel(Message):
    """One version of the job length model."""

    id: str
    trained_at: Instant
    through_at: Instant = said("It was trained on jobs that ended up to this time.")
    jobs: int
    groups: int
    active: bool = said(
        "Whether it is in use. A new version replaces the last one if its error on the newest jobs is smaller."
    )
    evaluation: LengthEvaluations


class LengthModelList(Message):
    """The versions, newest first."""

    items: list[LengthModel]
