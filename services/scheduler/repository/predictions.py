"""Predicted lengths of jobs, and the models they come from."""

from datetime import datetime
from typing import NamedTuple

from services.contracts.predictions import LengthModel
from services.db.database import Connection
from services.db.job_specs import MIN_GPUS
from services.db.lengths import AMOUNT, MEASURED
from services.db.rows import fetch_row
from services.kit.readable import readable_messages

ACTIVE = "SELECT id FROM length_models WHERE is_active AND group_version = $1"

CONTENT = "SELECT content FROM length_models WHERE id = $1"

KEEP = """
INSERT INTO job_predictions (job_id, group_version, group_id, user_id, predicted_at, model_id,
                             gpu_s, spread_gpu_s, seen, examples, low_gpu_s, median_gpu_s, high_gpu_s)
SELECT job_id, $1, group_id, user_id, now(), $2,
       gpu_s, spread_gpu_s, seen, examples, low_gpu_s, median_gpu_s, high_gpu_s
  FROM unnest($3::text[], $4::bigint[], $5::bigint[], $6::float8[], $7::float8[], $8::bool[], $9::int[], $10::float8[],
              $11::float8[], $12::float8[])
    AS new (job_id, group_id, user_id, gpu_s, spread_gpu_s, seen, examples, low_gpu_s, median_gpu_s, high_gpu_s),
       set_config('synchronous_commit', 'off', true) AS not_waited_for
ON CONFLICT (job_id) DO NOTHING
"""

PREDICTION = f"""
SELECT j.tenant_id, j.project, j.state, {MIN_GPUS} AS min_gpus, q.predicted_at, q.model_id, q.group_id,
       q.seen AS group_seen, q.examples, q.gpu_s, q.spread_gpu_s, q.low_gpu_s, q.median_gpu_s, q.high_gpu_s,
       CASE WHEN j.state = 'succeeded' THEN {AMOUNT} END AS actual_gpu_s
  FROM jobs j LEFT JOIN job_predictions q ON q.job_id = j.id {MEASURED}
 WHERE j.id = $1
"""

MODELS = """
SELECT id, trained_at, through_at, jobs, groups, is_active AS active, evaluation
  FROM length_models ORDER BY trained_at DESC, id DESC
"""


class Predictions(NamedTuple):
    """What is predicted for some jobs; every column is (n_jobs,).

    Attributes:
        group_id, user_id: Their groups, by ``core.profiles.recurrence``.
        low_gpu_s, median_gpu_s, high_gpu_s: Deciles and median of the group, None for one that is new.
    """

    job_id: list[str]
    group_id: list[int]
    user_id: list[int]
    gpu_s: list[float]  #: GPU seconds, 0 for a group that is new
    spread_gpu_s: list[float]  #: Standard deviation of the earlier runs
    seen: list[bool]  #: Whether the group was seen in training, with ``examples`` jobs
    examples: list[int]
    low_gpu_s: list[float | None]
    median_gpu_s: list[float | None]
    high_gpu_s: list[float | None]


class PredictionRow(NamedTuple):
    """A job with its prediction, whose fields are all None if there is none, and its actual length."""

    tenant_id: str
    project: str
    state: str
    min_gpus: int
    predicted_at: datetime | None
    model_id: str | None
    group_id: int | None
    group_seen: bool | None
    examples: int | None
    gpu_s: float | None
    spread_gpu_s: float | None
    low_gpu_s: float | None
    median_gpu_s: float | None
    high_gpu_s: float | None
    actual_gpu_s: float | None


async def keep(connection: Connection, group_version: int, model_id: str | None, predictions: Predictions) -> None:
    """Store predictions; what has already been stored for a job stands.

    Waiting for the disk took most of the time, so the commit does not: what a crash of the database loses is predicted
    again when the scheduler next sees the job.
    """
    await connection.execute(KEEP, group_version, model_id, *predictions)


async def prediction(connection: Connection, job_id: str) -> PredictionRow | None:
    """Return a job with its predicted and actual length; None if there is no such job."""
    return await fetch_row(connection, PredictionRow, PREDICTION, job_id)


async def models(connection: Connection) -> list[LengthModel]:
    """Return the versions of the model, newest first, without their contents."""
    return readable_messages(LengthModel, await connection.fetch(MODELS))
