"""Tables of engines: what their bridges report (written by telemetry), and what is decided of it (by the scheduler)."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Date, Float, Index, Integer, Table, Text, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from services.db.metadata import Timestamp, metadata

engines = Table(
    "engines",
    metadata,
    Column("name", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("places", Text, nullable=False),
    Column("mode", Text, nullable=False),
    Column("queues", ARRAY(Text), nullable=False),
    Column("problem", Text),
    Column("boot_id", Text, nullable=False),
    Column("reported_at", Timestamp, nullable=False, server_default=text("now()")),
)
"""Engines by the last reports of their bridges; the name is that of the bridge's node."""

engine_jobs = Table(
    "engine_jobs",
    metadata,
    Column("engine", Text, primary_key=True),
    Column("external_id", Text, primary_key=True),
    Column("report", JSONB, nullable=False),
    Column("over", Boolean, nullable=False),
    Column("unfolded", Boolean, nullable=False, server_default=text("true")),
    Column("reported_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("job_id", Text),
    Column("decision", JSONB),
    Column("revision", BigInteger, nullable=False, server_default=text("0")),
    Column("sent_at", Timestamp),
    Column("watched", Boolean, nullable=False, server_default=text("false")),
    Column("planned", Boolean, nullable=False, server_default=text("false")),
    Column("would_start_at", Timestamp),
    Index("engine_jobs_unfolded", "engine", postgresql_where=text("unfolded")),
    Index("engine_jobs_live", "engine", "external_id", postgresql_where=text("NOT over")),
    Index("engine_jobs_by_job", "job_id"),
)
"""Jobs as their engine has them: ``report`` is a ``contracts.engines.EngineJob``, ``over`` once it will not run again.

``unfolded`` until the scheduler has read the report; it writes ``job_id``, and ``decision`` with its ``revision``,
which the bridge names in its reports once it has carried it out, and of a dry run (``watched``, as of the last report)
whether any plan knew the job while it waited (``planned``), and until when the last one held it back
(``would_start_at``). Telemetry writes the other columns."""

engine_days = Table(
    "engine_days",
    metadata,
    Column("engine", Text, primary_key=True),
    Column("day", Date, primary_key=True),
    Column("what", Text, primary_key=True),
    Column("count", BigInteger, nullable=False),
)
"""How often each thing happened on a day of UTC: decisions, the same in a dry run, and deviations of the engine."""

engine_savings = Table(
    "engine_savings",
    metadata,
    Column("engine", Text, primary_key=True),
    Column("day", Date, primary_key=True),
    Column("jobs", Integer, nullable=False),
    Column("unplanned", Integer, nullable=False),
    Column("unmeasured", Integer, nullable=False),
    Column("unpriced", Integer, nullable=False),
    Column("later", Integer, nullable=False),
    Column("later_h", Float),
    Column("carbon_gco2", Float),
    Column("would_carbon_gco2", Float),
    Column("settled", Boolean, nullable=False),
)
"""What a dry run would have saved on the jobs of a day of UTC, as ``contracts.engines.EngineSavings`` says."""
