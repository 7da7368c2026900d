"""Tables of telemetry: nodes, what their ranks report, and the energy and carbon ledger."""

from sqlalchemy import BigInteger, CheckConstraint, Column, Index, Integer, Table, Text, text
from sqlalchemy.dialects.postgresql import JSONB

from services.db.metadata import Timestamp, metadata

gpu_partitions = Table(
    "gpu_partitions",
    metadata,
    Column("node_id", Text, primary_key=True),
    Column("gpu", Integer, primary_key=True),
    Column("revision", BigInteger, nullable=False),
    Column("sizes", JSONB, nullable=False),
    Column("owner", Text),
    Column("state", Text, nullable=False, server_default=text("'pending'")),
    Column("detail", Text, nullable=False, server_default=text("''")),
    Column("wanted_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("applied_at", Timestamp),
    CheckConstraint("state IN ('pending', 'busy', 'applied', 'failed')", name="gpu_partitions_state"),
    Index("gpu_partitions_by_owner", "owner", postgresql_where=text("owner IS NOT NULL")),
)
"""How GPUs are to be cut, and how far their nodes are with it: ``sizes`` in sevenths, in the order of their places,
empty for a whole GPU. Only jobs of the fleet ``owner`` run on a GPU that has one. ``services.db.gpu_partitions`` writes
what is wanted."""
