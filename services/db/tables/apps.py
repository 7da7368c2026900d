"""Tables of serving: fleets of GPUs, the applications on them, their plans, and what routers measured of requests."""

from sqlalchemy import CheckConstraint, Column, Double, Index, Integer, Table, Text, text
from sqlalchemy.dialects.postgresql import JSONB

from services.db.metadata import Timestamp, metadata
from services.db.tables.pools import spec_columns

fleets = Table(
    "fleets",
    metadata,
    *spec_columns(),
    Column("assignment", JSONB, nullable=False, server_default=text("'[]'")),
    Column("only_proposes", Text),
    Column("failures", Integer, nullable=False, server_default=text("0")),
    Column("retry_at", Timestamp),
)
"""``assignment`` is what each GPU runs: ``[[node, gpu, [[app, variant, slice], ...]], ...]``. Whoever plans a fleet or
changes its GPUs holds its row lock. Its GPUs are the rows of ``gpu_partitions`` that it owns."""

apps = Table(
    "apps",
    metadata,
    *spec_columns(),
    Column("fleet", Text, nullable=False),
    Column("planned_revision", Integer, nullable=False, server_default=text("0")),
    Column("plan_id", Text),
    Column("target", JSONB, nullable=False, server_default=text("""'{"wanted": [], "leave": []}'""")),
    Index("apps_by_fleet", "fleet"),
)
"""``target`` is what the controller makes true: how many instances of each variant on each slice, ``[[variant, slice,
count], ...]``, and which instances leave first. Instances are rows of ``pool_instances`` whose ``pool`` is ``app:`` and
the name. ``planned_revision`` is the revision that the plan in force was made for."""

fleet_plans = Table(
    "fleet_plans",
    metadata,
    Column("id", Text, primary_key=True),
    Column("fleet", Text, nullable=False),
    Column("trigger", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("detail", Text),
    Column("gco2_per_kwh", Double, nullable=False),
    Column("basis", JSONB, nullable=False),
    Column("problem", JSONB),
    Column("result", JSONB),
    Column("progress", JSONB),
    Column("made_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("ended_at", Timestamp),
    Column("search", JSONB),
    Index("fleet_plans_by_fleet", "fleet", "id"),
    Index(
        "fleet_plans_one_at_a_time",
        "fleet",
        unique=True,
        postgresql_where=text("state IN ('solving', 'measuring', 'carrying_out')"),
    ),
    CheckConstraint(
        "state IN ('solving', 'proposed', 'carrying_out', 'applied', 'failed', 'superseded', 'measuring')",
        name="fleet_plans_state",
    ),
)
"""``basis`` is what the plan was made from: revisions and GPUs. ``problem`` is a ``PartitionRequest``, and the plan's
id the idempotency key of its solve; a plan without one is BASE. ``progress`` is how far carrying it out is.
``search`` is a ``FleetSearch``: what was measured of configurations, and which one is brought up or measured now."""

app_observations = Table(
    "app_observations",
    metadata,
    Column("app", Text, primary_key=True),
    Column("start_at", Timestamp, primary_key=True),
    Column("router", Text, primary_key=True),
    Column("arrivals", Integer, nullable=False),
    Column("answered", Integer, nullable=False),
    Column("failed", Integer, nullable=False),
    Column("latency", JSONB, nullable=False),
    Column("variants", JSONB, nullable=False),
    Column("servers", JSONB, nullable=False),
    Column("accuracy_sum", Double, nullable=False),
    Column("waiting", Integer, nullable=False, server_default=text("0")),
    Index("app_observations_by_time", "start_at"),
)
"""Requests in 5 seconds as one router process saw them. ``latency``: answers by the index of their bucket of
``LATENCY_BOUNDS_MS``; ``variants``: answers by variant; ``accuracy_sum``: of the accuracies of the answers;
``waiting``: requests in the queue when it was reported."""
