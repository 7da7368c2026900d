"""Tables of telemetry: nodes, what their ranks report, and the energy and carbon ledger."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from services.db.metadata import Timestamp, metadata

nodes = Table(
    "nodes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("token_sha256", LargeBinary, nullable=False),
    Column("address", Text, nullable=False),
    Column("agent_url", Text, nullable=False),
    Column("zone", Text, nullable=False),
    Column("driver", Text, nullable=False),
    Column("containers", Boolean, nullable=False),
    Column("host_power", Text, nullable=False),
    Column("labels", JSONB, nullable=False, server_default=text("'{}'")),
    Column("devices", JSONB, nullable=False),
    Column("protections", JSONB, nullable=False, server_default=text("'[]'")),
    Column("readings", JSONB, nullable=False, server_default=text("'[]'")),
    Column("state", Text, nullable=False, server_default=text("'up'")),
    Column("draining", Boolean, nullable=False, server_default=text("false")),
    Column("closed", Text),
    Column("boot_id", Text),
    Column("registered_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("heartbeat_at", Timestamp),
    Column("lease_until", Timestamp),
    Column("engine", Text, nullable=False, server_default=text("'wattshift'")),
    Column("queues", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    Column("checkpoints", Text),
    Column("measures_only", Boolean, nullable=False, server_default=text("false")),
    Column("engine_node", Text),
    Column("silent_at", Timestamp),
    Column("most_gpu_w", Float),
    Column("most_host_w", Float),
    Column("marked_intervals", BigInteger, nullable=False, server_default=text("0")),
    Index("nodes_by_engine_node", "engine_node", postgresql_where=text("engine_node IS NOT NULL")),
)
"""A node of another ``engine`` has no agent: a bridge reports it, with the engine's ``queues`` that use it. One that
``measures_only`` has an agent that runs nothing: nothing is placed there, and what it measures is of ``engine_node``.

``checkpoints`` says where its agent keeps those of jobs: ``shared``, ``store`` or ``local``; NULL: it did not say.
``lease_until`` is written before the agent learns of its lease, so the agent's own deadline is never later. The
scheduler sets ``state`` to lost under the same row lock once the lease has certainly expired. ``silent_at`` is when a
lease last ran out before it was renewed. ``most_gpu_w`` and ``most_host_w`` are what its GPUs, and all else of it, can
draw; NULL: not known. ``marked_intervals`` counts those of which a line of the ledger has a ``basis``."""

node_credentials = Table(
    "node_credentials",
    metadata,
    Column("node_id", Text, primary_key=True),
    Column("credential_sha256", LargeBinary, nullable=False),
    Column("redis_sha256", Text, nullable=False),
    Column("enrolment", LargeBinary, nullable=False),
    Column("next_credential_sha256", LargeBinary),
    Column("next_redis_sha256", Text),
    Column("next_enrolment", LargeBinary),
    Column("enrolled_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("rotated_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("revoked_at", Timestamp),
    Column("role", Text),
    Column("certificate_sha256", LargeBinary),
)
"""What each node proves itself with; the node made it, and only hashes are here. ``enrolment`` is what the key follows
from with which admission asks the node. ``next_...`` are accepted too, and take the place of the others when the node
first uses them. ``role`` is what it may register as; NULL: as either, of the release before. By
``certificate_sha256`` admission knows the agent of a node that has joined; NULL: by an authority."""

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

job_progress = Table(
    "job_progress",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("done", Float, nullable=False),
    Column("total", Float),
    Column("updated_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("noise_scale", Float),
    Index("job_progress_with_noise", "job_id", postgresql_where=text("noise_scale IS NOT NULL")),
)
"""What jobs report of themselves; ``noise_scale`` is their gradient noise scale, samples."""

job_footprints = Table(
    "job_footprints",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("energy_j", Float, nullable=False),
    Column("gpu_energy_j", Float, nullable=False),
    Column("estimated_energy_j", Float, nullable=False),
    Column("carbon_gco2", Float, nullable=False),
    Column("gpu_s", Float, nullable=False),
)
"""Running sums of the ledger per job, kept in the transaction that writes the lines."""
