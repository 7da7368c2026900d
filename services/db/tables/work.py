"""The columns that every table of work has, as ``services.db.background`` and ``services.kit.background`` need them."""

from sqlalchemy import CheckConstraint, Column, Float, Integer, LargeBinary, Text, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.schema import SchemaItem

from services.db.metadata import Timestamp

LIVE = text("state IN ('queued', 'running')")
KEPT = text("state IN ('queued', 'running', 'succeeded')")
"""Conditions of partial indices. One that is unique over ``KEPT`` enforces that the same work is not done twice."""


def work_columns(table: str, took: str) -> tuple[SchemaItem, ...]:
    """Return the columns of a table of work; ``took`` is the column for how long the work took, seconds.

    A worker owns a running piece of work while ``claim`` is its own and ``lease_until`` is in the future; only the
    owner ends it.
    """
    return (
        Column("id", Text, primary_key=True),
        Column("tenant_id", Text, nullable=False),
        Column("key_id", Text, nullable=False),
        Column("state", Text, nullable=False),
        Column("problem", JSONB, nullable=False),
        Column("problem_sha256", LargeBinary, nullable=False),
        Column("result", JSONB),
        Column("failure", JSONB),
        Column("attempts", Integer, nullable=False, server_default=text("0")),
        Column("claim", Text),
        Column("lease_until", Timestamp),
        Column("submitted_at", Timestamp, nullable=False, server_default=text("now()")),
        Column("enqueued_at", Timestamp),
        Column("started_at", Timestamp),
        Column("ended_at", Timestamp),
        Column(took, Float),
        CheckConstraint("state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled')", name=f"{table}_state"),
    )
