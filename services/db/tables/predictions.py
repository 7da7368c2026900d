"""Tables of predicted lengths: trainings, the models they made, and what was predicted for each job."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from services.db.metadata import Timestamp, metadata
from services.db.tables.work import LIVE, work_columns

length_trainings = Table(
    "length_trainings",
    metadata,
    *work_columns("length_trainings", "train_s"),
    Index("length_trainings_live", "state", postgresql_where=LIVE),
)
"""Work as the optimizer's workers claim it (``services.db.background``); only the installation itself submits it."""

length_models = Table(
    "length_models",
    metadata,
    Column("id", Text, primary_key=True),
    Column("trained_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("through_at", Timestamp, nullable=False),
    Column("group_version", Integer, nullable=False),
    Column("jobs", Integer, nullable=False),
    Column("groups", Integer, nullable=False),
    Column("evaluation", JSONB, nullable=False),
    Column("is_active", Boolean, nullable=False, server_default=text("false")),
    Column("content", LargeBinary, nullable=False),
    Index("length_models_one_active", "is_active", unique=True, postgresql_where=text("is_active")),
)
"""A model has the id of its training; ``content`` is what ``services.learning.length_table`` writes: arrays, no code.
It was trained on the jobs that had ended by ``through_at``."""

job_predictions = Table(
    "job_predictions",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("group_version", Integer, nullable=False),
    Column("group_id", BigInteger, nullable=False),
    Column("user_id", BigInteger, nullable=False),
    Column("predicted_at", Timestamp),
    Column("model_id", Text),
    Column("gpu_s", Float, nullable=False, server_default=text("0")),
    Column("spread_gpu_s", Float, nullable=False, server_default=text("0")),
    Column("seen", Boolean, nullable=False, server_default=text("false")),
    Column("examples", Integer, nullable=False, server_default=text("0")),
    Column("low_gpu_s", Float),
    Column("median_gpu_s", Float),
    Column("high_gpu_s", Float),
)
"""What was predicted for a job when the scheduler first saw it. ``predicted_at`` is null for jobs that had ended before
there were predictions: only their group was determined, for the history."""
