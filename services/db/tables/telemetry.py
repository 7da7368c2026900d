"""Tables of telemetry: nodes, what their ranks report, and the energy and carbon ledger."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Date,
    Float,
    Index,
    Integer,
    LargeBinary,
    Numeric,
    Table,
    Text,
    UniqueConstraint,
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
)
"""What each node proves itself with; the node made it, and only hashes are here. ``enrolment`` is what the key follows
from with which admission asks the node. ``next_...`` are accepted too, and take the place of the others when the node
first uses them. ``role`` is what it may register as; NULL: as either, of the release before."""

node_enrolments = Table(
    "node_enrolments",
    metadata,
    Column("token_sha256", LargeBinary, primary_key=True),
    Column("node_id", Text, nullable=False),
    Column("created_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("expires_at", Timestamp, nullable=False),
    Column("used_as", LargeBinary),
    Column("role", Text),
    Index("node_enrolments_by_node", "node_id"),
)
"""One-time tokens by which nodes enrol; ``used_as`` is the credential that one was given for, so that a node whose
answer was lost can ask again. ``role`` is as in ``node_credentials``."""

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

gpu_health = Table(
    "gpu_health",
    metadata,
    Column("node_id", Text, primary_key=True),
    Column("gpu", Integer, primary_key=True),
    Column("uuid", Text, nullable=False),
    Column("drained", Boolean, nullable=False, server_default=text("false")),
    Column("fault_id", Text),
    Column("cause", Text),
    Column("detail", Text, nullable=False, server_default=text("''")),
    Column("since", Timestamp),
    Column("ends_gangs", Boolean, nullable=False, server_default=text("false")),
    Column("lasts", Boolean, nullable=False, server_default=text("false")),
    Column("returned_fault_id", Text),
    CheckConstraint("(cause IS NULL) = (fault_id IS NULL)", name="gpu_health_fault"),
)
"""GPUs that are out of service, or were: ``cause`` is what is the matter, null for nothing, and ``drained`` what an
operator wants. The fault after which an operator returned the GPU is ``returned_fault_id``: it counts no more."""

rank_statuses = Table(
    "rank_statuses",
    metadata,
    Column("allocation_id", Text, primary_key=True),
    Column("node_id", Text, primary_key=True),
    Column("state", Text, nullable=False),
    Column("exit_code", Integer),
    Column("ended_by", Text),
    Column("detail", Text),
    Column("started_at", Timestamp),
    Column("ended_at", Timestamp),
    Column("updated_at", Timestamp, nullable=False, server_default=text("now()")),
    Column("settings", JSONB),
    Column("holds_checkpoint", Boolean),
    Column("listener", Text),
)
"""The last report of each node on its share of a gang. ``holds_checkpoint``: whether the job's folder has anything on
this node, which alone has it; NULL where others have it, too, and where that is not known. ``listener``: who
listens on a server's port (``contracts.nodes.Listener``); NULL where no agent says so."""

settings_in_force = Table(
    "settings_in_force",
    metadata,
    Column("allocation_id", Text, primary_key=True),
    Column("node_id", Text, primary_key=True),
    Column("revision", Integer, primary_key=True),
    Column("power_limit_w", Float),
    Column("clock_mhz", Integer),
    Column("refused", JSONB, nullable=False),
    Column("enforced_w", JSONB, nullable=False),
    Column("since", Timestamp, nullable=False),
)
"""The controls of a gang's devices on a node, a line per change: what was requested and what was refused, the limits
that the devices reported when they were read back, and when the agent found them in force."""

server_clocks = Table(
    "server_clocks",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("start_at", Timestamp, primary_key=True),
    Column("node_id", Text, primary_key=True),
    Column("policy", Text, nullable=False),
    Column("dry_run", Boolean, nullable=False),
    Column("decisions", Integer, nullable=False),
    Column("exceeded", Integer, nullable=False),
    Column("mean_mhz", Float, nullable=False),
    Column("lowest_mhz", Float, nullable=False),
    Column("highest_mhz", Float, nullable=False),
    Column("last_mhz", Float, nullable=False),
    Column("model_error", Float),
    Column("unused", Text),
    Column("unobserved", Integer, nullable=False, server_default=text("0")),
    Index("server_clocks_by_time", "start_at"),
)
"""The clocks that followed latency, a line per server and minute, as ``contracts.nodes.ClockMinute`` describes it."""

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

job_profiles = Table(
    "job_profiles",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("gpus", Integer, primary_key=True),
    Column("progress", Float, nullable=False),
    Column("energy_j", Float, nullable=False),
    Column("gpu_energy_j", Float, nullable=False),
    Column("duration_s", Float, nullable=False),
    Column("last_done", Float),
    Column("generation", Integer, nullable=False, server_default=text("0")),
    Column("since_at", Timestamp),
)
"""A job's work and energy at each gang size: the observations behind GREEN's efficiency.

Each gang counts from its first report of progress, at ``since_at``, so that starting up and what a restart repeats is
left out; ``generation`` is the newest gang that counted."""

node_zones = Table(
    "node_zones",
    metadata,
    Column("node_id", Text, primary_key=True),
    Column("since", Timestamp, primary_key=True),
    Column("zone", Text, nullable=False),
)
"""The grid zones a node was in, for nodes that were ever moved: energy is priced by the zone in force at its time."""

energy_intervals = Table(
    "energy_intervals",
    metadata,
    Column("node_id", Text, primary_key=True),
    Column("boot_id", Text, primary_key=True),
    Column("sequence", BigInteger, primary_key=True),
    Column("start_at", Timestamp, nullable=False),
    Column("end_at", Timestamp, nullable=False),
    Column("metered_gpu_energy_j", Float, nullable=False),
    Column("reported_gpu_energy_j", Float),
    Index("energy_intervals_by_time", "end_at"),
)
"""Intervals of nodes; ``reported_gpu_energy_j`` is what was reported where the node's GPUs cannot have used it."""

energy_usages = Table(
    "energy_usages",
    metadata,
    Column("node_id", Text, primary_key=True),
    Column("boot_id", Text, primary_key=True),
    Column("sequence", BigInteger, primary_key=True),
    Column("owner", Text, primary_key=True),
    Column("job_id", Text),
    Column("start_at", Timestamp, nullable=False),
    Column("end_at", Timestamp, nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("gpu_energy_j", Float, nullable=False),
    Column("cpu_energy_j", Float, nullable=False),
    Column("static_energy_j", Float, nullable=False),
    Column("source", Text, nullable=False),
    Column("cpu_source", Text, nullable=False, server_default=text("'modelled'")),
    Column("zone", Text, nullable=False),
    Column("signal", Text, nullable=False),
    Column("intensity_gco2_per_kwh", Float, nullable=False),
    Column("intensity_estimated", Boolean, nullable=False),
    Column("pue", Float, nullable=False),
    Column("carbon_gco2", Float, nullable=False),
    Column("basis", Text),
    Column("reported_energy_j", Float),
    Column("devices", ARRAY(Integer), nullable=False, server_default=text("'{}'")),
    Column("provider", Text),
    Column("intensity_kind", Text),
    Column("fetched_at", Timestamp),
    Column("release", Text),
    Column("batch", BigInteger, nullable=False, server_default=text("0")),
    Index("energy_usages_by_job", "job_id", "start_at"),
    Index("energy_usages_by_time", "start_at"),
    Index("energy_usages_by_batch", "batch", postgresql_using="brin"),
)
"""The ledger: one line per node, interval and owner (``owner`` is an allocation id, or empty for idle), with the
intensity used: the mean over the interval, weighted by time. ``source`` says how the GPU energy was determined,
``cpu_source`` how the CPU energy was; the static share is always configured. ``basis`` says why a line is not booked as
it was reported (``contracts.nodes.Basis``), ``reported_energy_j`` what was reported of it where that differs.
``devices`` are the GPUs by their index on the node. ``provider`` gave the intensity, ``fetched_at`` is when the newest
value of it was fetched, ``intensity_kind`` the least certain kind of value in it, and ``release`` that of the method;
NULL in lines from before these were kept. ``batch`` is that of the
statement which added the line; 0: before there were batches. Triggers refuse every change and hash each batch
(docs/ledger.md)."""

ledger_lanes = Table(
    "ledger_lanes",
    metadata,
    Column("lane", Integer, primary_key=True, autoincrement=False),
    Column("number", BigInteger, nullable=False),
    Column("hash", LargeBinary, nullable=False),
)
"""The newest batch of each lane. A transaction that adds lines takes a lane which no other has."""

ledger_batches = Table(
    "ledger_batches",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("lane", Integer, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("version", Integer, nullable=False),
    Column("at", Timestamp, nullable=False),
    Column("lines", Integer, nullable=False),
    Column("first_at", Timestamp, nullable=False),
    Column("last_at", Timestamp, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    UniqueConstraint("lane", "number", name="ledger_batches_of_a_lane"),
)
"""What was added together: the number of its lines, when the first and the last of them begin, and the SHA-256 of their
columns of ``version``. The running hash of a lane follows from these rows; its newest value is in ``ledger_lanes``."""

ledger_keys = Table(
    "ledger_keys",
    metadata,
    Column("public_key", LargeBinary, primary_key=True),
    Column("sealed", LargeBinary, nullable=False),
    Column("made_at", Timestamp, nullable=False, server_default=text("now()")),
)
"""The Ed25519 keys of the installation, of which the newest that opens signs."""

ledger_days = Table(
    "ledger_days",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("day", Date, nullable=False, unique=True),
    Column("text", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("public_key", LargeBinary),
    Column("signature", LargeBinary),
    Column("first_at", Timestamp),
    Column("last_at", Timestamp),
)
"""The statement of each day: ``text`` names the heads of all lanes and the statement before, and is what is signed."""

ledger_heads = Table(
    "ledger_heads",
    metadata,
    Column("day_number", BigInteger, primary_key=True, autoincrement=False),
    Column("lane", Integer, primary_key=True, autoincrement=False),
    Column("after_number", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
)
"""Which batches of a lane a day has: those after ``after_number`` up to ``number``."""

ledger_sums = Table(
    "ledger_sums",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("day_number", BigInteger, unique=True),
    Column("text", Text, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("public_key", LargeBinary),
    Column("signature", LargeBinary),
)
"""Sums in ``energy_days`` that replaced the lines of a day, whose hash their ``text`` names, or correct such ones."""

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

energy_days = Table(
    "energy_days",
    metadata,
    Column("day", Timestamp, primary_key=True),
    Column("node_id", Text, primary_key=True),
    Column("owner", Text, primary_key=True),
    Column("zone", Text, primary_key=True),
    Column("signal", Text, primary_key=True),
    Column("pue", Float, primary_key=True),
    Column("job_id", Text),
    Column("start_at", Timestamp, nullable=False),
    Column("end_at", Timestamp, nullable=False),
    Column("energy_j", Float, nullable=False),
    Column("gpu_energy_j", Float, nullable=False),
    Column("estimated_energy_j", Float, nullable=False),
    Column("carbon_gco2", Float, nullable=False),
    Column("gpu_s", Float, nullable=False),
    Column("estimated", Boolean, nullable=False),
    Column("sum_number", BigInteger, primary_key=True, server_default=text("0")),
    Index("energy_days_by_job", "job_id", "start_at"),
)
"""Ledger lines past their retention, summed by UTC day; the mean intensity follows from carbon and energy. Those of
one ``sum_number`` are signed together; 0: before there were batches."""

energy_hours = Table(
    "energy_hours",
    metadata,
    Column("hour", Timestamp, primary_key=True),
    Column("node_id", Text, primary_key=True),
    Column("job_id", Text, primary_key=True),
    Column("zone", Text, primary_key=True),
    Column("signal", Text, primary_key=True),
    Column("lines", BigInteger, nullable=False),
    Column("energy_j", Numeric, nullable=False),
    Column("gpu_energy_j", Numeric, nullable=False),
    Column("estimated_energy_j", Numeric, nullable=False),
    Column("carbon_gco2", Numeric, nullable=False),
    Column("gpu_s", Numeric, nullable=False),
    Column("facility_energy_j", Numeric, nullable=False),
    Column("estimated_gco2", Numeric, nullable=False),
    Column("guessed_gco2", Numeric, nullable=False),
    Column("length_s", Numeric, nullable=False),
    Column("intensity_s", Numeric, nullable=False),
)
"""The lines of ``energy_usages`` and ``energy_days`` that begin in an hour, summed exactly, in decimals: triggers keep
it in the transaction that changes a line. ``job_id`` is empty for idle. ``guessed_gco2`` was priced by an intensity
that was estimated or forecast. ``length_s`` and ``intensity_s``, the intensity
times the length, count each interval of a node once, daily sums not at all."""

metered_days = Table(
    "metered_days",
    metadata,
    Column("day", Timestamp, primary_key=True),
    Column("node_id", Text, primary_key=True),
    Column("metered_gpu_energy_j", Float, nullable=False),
)
"""The devices' own counters over the same days."""

folded_intervals = Table(
    "folded_intervals",
    metadata,
    Column("node_id", Text, primary_key=True),
    Column("boot_id", Text, primary_key=True),
    Column("through_sequence", BigInteger, nullable=False),
)
"""Up to where a node's intervals were combined, so that they are recognised if sent again although their rows are
deleted."""

request_usages = Table(
    "request_usages",
    metadata,
    Column("router", Text, primary_key=True),
    Column("start_at", Timestamp, primary_key=True),
    Column("job_id", Text, primary_key=True),
    Column("tenant_id", Text, primary_key=True),
    Column("key_id", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("request_class", Text, primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("estimated_requests", BigInteger, nullable=False, server_default="0"),
    Column("share_s", Float, nullable=False),
    Column("energy_j", Float, nullable=False),
    Column("carbon_gco2", Float, nullable=False),
    Index("request_usages_by_time", "start_at"),
)
"""Requests as one router process saw them in a minute; of whole days with an empty router, once lines are old.
``share_s`` divides the lines of the server's job; ``energy_j`` and ``carbon_gco2`` are the router's own estimates,
which count only for servers that the ledger has no lines of."""
