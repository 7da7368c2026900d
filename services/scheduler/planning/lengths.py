"""How long a job will still run, by its own progress, by earlier runs like it, or by its time limit."""

from dataclasses import dataclass

from services.contracts.explanations import LengthEstimate
from services.contracts.jobs import JobSpec
from services.scheduler.repository.predictions import Predictions

LEAST_PROGRESS = 0.01  #: A job that reports less than this share as done says too little of its speed


@dataclass(frozen=True)
class Remaining:
    """What is left of a job on its gang; ``words`` says what the estimate rests on."""

    estimate: LengthEstimate
    words: str


def remaining(progress: float, attained_gpu_s: float, gpus: int, spec: JobSpec, predicted: Predictions) -> Remaining:
    """Return what is left of a job on a gang of that size, if twice the GPUs take half the time.

    Args:
        progress: Share of it that is done; NaN if unknown.
        predicted: What the model in force predicts for this job.
    """
    found = _by_progress(progress, attained_gpu_s, gpus) or _by_prediction(progress, attained_gpu_s, gpus, predicted)
    limit_s = spec.time_limit_s
    if found is None:
        if limit_s is None:
            return Remaining(
                LengthEstimate(), "Length: unknown, so that emissions are per hour; --time would limit it."
            )
        words = "Length: as long as its time limit allows; no such job has run."
        return Remaining(LengthEstimate(seconds=limit_s, source="time_limit"), words)
    if limit_s is not None:
        capped = {
            name: min(value, limit_s)
            for name in ("seconds", "low_s", "high_s")
            if (value := getattr(found.estimate, name)) is not None
        }
        found = Remaining(found.estimate.model_copy(update=capped), found.words)
    return found


def _by_progress(progress: float, attained_gpu_s: float, gpus: int) -> Remaining | None:
    if not (progress >= LEAST_PROGRESS and attained_gpu_s > 0):  # NaN, too
        return None
    seconds = attained_gpu_s * (1.0 - progress) / progress / gpus
    words = f"Length: by its own progress, {progress:.0%} done so far; twice the GPUs take half the time."
    return Remaining(LengthEstimate(seconds=seconds, source="progress"), words)


def _by_prediction(progress: float, attained_gpu_s: float, gpus: int, predicted: Predictions) -> Remaining | None:
    if not (predicted.seen[0] and predicted.gpu_s[0] > 0):
        return None

    def left_s(gpu_s: float | None) -> float | None:
        if gpu_s is None:
            return None
        left = gpu_s - attained_gpu_s if progress != progress else gpu_s * (1.0 - progress)
        return max(left, 0.0) / gpus

    estimate = LengthEstimate(
        seconds=left_s(predicted.gpu_s[0]),
        low_s=left_s(predicted.low_gpu_s[0]),
        high_s=left_s(predicted.high_gpu_s[0]),
        source="prediction",
    )
    runs = predicted.examples[0]
    return Remaining(estimate, f"Length: as of {runs} earlier jobs like it; twice the GPUs take half the time.")
