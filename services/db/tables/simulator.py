"""Tables of the simulator: what-if runs, their idempotency keys, and the files they read."""

from sqlalchemy import Column, Date, ForeignKey, Index, Integer, LargeBinary, Table, Text, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from services.db.metadata import Timestamp, metadata
from services.db.tables.work import KEPT, LIVE, work_columns

simulations = Table(
    "simulations",
    metadata,
    *work_columns("simulations", "run_s"),
    Column("inputs", ARRAY(Text), nullable=False),
    Column("done", Integer, nullable=False, server_default=text("0")),
    Column("total", Integer, nullable=False),
    Index("simulations_by_tenant", "tenant_id", "id"),
    Index("simulations_live", "state", postgresql_where=LIVE),
    Index("simulations_by_input", "inputs", postgresql_using="gin"),
    Index("simulations_one_per_problem", "tenant_id", "problem_sha256", unique=True, postgresql_where=KEPT),
)
"""What-if runs, and their progress."""

simulation_submissions = Table(
    "simulation_submissions",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("idempotency_key", Text, primary_key=True),
    Column("body_sha256", LargeBinary, nullable=False),
    Column("simulation_id", Text, ForeignKey("simulations.id", ondelete="CASCADE"), nullable=False),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
    Index("simulation_submissions_by_simulation", "simulation_id"),
)
"""The simulation that an idempotency key refers to; deleted together with it."""

simulation_inputs = Table(
    "simulation_inputs",
    metadata,
    Column("sha256", Text, primary_key=True),
    Column("content", LargeBinary, nullable=False),
    Column("stored_at", Timestamp, nullable=False, server_default=text("now()")),
)
"""Files by their content, compressed with gzip; kept while a simulation names them in ``inputs``."""

savings = Table(
    "savings",
    metadata,
    Column("day", Date, primary_key=True),
    Column("simulation_id", Text),
    Column("figures", JSONB, nullable=False),
)
"""What levers saved on a day, UTC: ``figures`` as ``services.contracts.savings.DaySavings``. ``simulation_id`` is the
replay, which is kept with its inputs; NULL where nothing was replayed."""
