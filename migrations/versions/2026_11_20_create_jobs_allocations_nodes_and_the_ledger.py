"""Create jobs, allocations, nodes and the ledger."""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

STATEMENTS = [
    """
    CREATE TABLE audit_log (
        sequence BIGSERIAL NOT NULL,
        at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        tenant_id TEXT NOT NULL,
        key_id TEXT NOT NULL,
        action TEXT NOT NULL,
        target TEXT NOT NULL,
        data JSONB DEFAULT '{}' NOT NULL,
        PRIMARY KEY (sequence)
    )
    """,
    """
    CREATE TABLE energy_intervals (
        node_id TEXT NOT NULL,
        boot_id TEXT NOT NULL,
        sequence BIGINT NOT NULL,
        start_at TIMESTAMP WITH TIME ZONE NOT NULL,
        end_at TIMESTAMP WITH TIME ZONE NOT NULL,
        metered_gpu_energy_j FLOAT NOT NULL,
        PRIMARY KEY (node_id, boot_id, sequence)
    )
    """,
    "CREATE INDEX energy_intervals_by_time ON energy_intervals (end_at)",
    """
    CREATE TABLE energy_usages (
        node_id TEXT NOT NULL,
        boot_id TEXT NOT NULL,
        sequence BIGINT NOT NULL,
        owner TEXT NOT NULL,
        job_id TEXT,
        start_at TIMESTAMP WITH TIME ZONE NOT NULL,
        end_at TIMESTAMP WITH TIME ZONE NOT NULL,
        gpus INTEGER NOT NULL,
        gpu_energy_j FLOAT NOT NULL,
        cpu_energy_j FLOAT NOT NULL,
        static_energy_j FLOAT NOT NULL,
        source TEXT NOT NULL,
        zone TEXT NOT NULL,
        signal TEXT NOT NULL,
        intensity_gco2_per_kwh FLOAT NOT NULL,
        intensity_estimated BOOLEAN NOT NULL,
        pue FLOAT NOT NULL,
        carbon_gco2 FLOAT NOT NULL,
        PRIMARY KEY (node_id, boot_id, sequence, owner)
    )
    """,
    "CREATE INDEX energy_usages_by_job ON energy_usages (job_id, start_at)",
    "CREATE INDEX energy_usages_by_time ON energy_usages (start_at)",
    """
    CREATE TABLE job_events (
        sequence BIGSERIAL NOT NULL,
        transaction_id BIGINT DEFAULT pg_current_xact_id()::text::bigint NOT NULL,
        job_id TEXT NOT NULL,
        tenant_id TEXT NOT NULL,
        at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        type TEXT NOT NULL,
        data JSONB DEFAULT '{}' NOT NULL,
        PRIMARY KEY (sequence)
    )
    """,
    "CREATE INDEX job_events_by_job ON job_events (job_id, transaction_id, sequence)",
    "CREATE INDEX job_events_in_order ON job_events (transaction_id, sequence)",
    """
    CREATE TABLE job_footprints (
        job_id TEXT NOT NULL,
        energy_j FLOAT NOT NULL,
        gpu_energy_j FLOAT NOT NULL,
        estimated_energy_j FLOAT NOT NULL,
        carbon_gco2 FLOAT NOT NULL,
        gpu_s FLOAT NOT NULL,
        PRIMARY KEY (job_id)
    )
    """,
    """
    CREATE TABLE job_profiles (
        job_id TEXT NOT NULL,
        gpus INTEGER NOT NULL,
        progress FLOAT NOT NULL,
        energy_j FLOAT NOT NULL,
        gpu_energy_j FLOAT NOT NULL,
        duration_s FLOAT NOT NULL,
        last_done FLOAT,
        PRIMARY KEY (job_id, gpus)
    )
    """,
    """
    CREATE TABLE job_progress (
        job_id TEXT NOT NULL,
        done FLOAT NOT NULL,
        total FLOAT,
        updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        PRIMARY KEY (job_id)
    )
    """,
    """
    CREATE TABLE jobs (
        id TEXT NOT NULL,
        tenant_id TEXT NOT NULL,
        name TEXT NOT NULL,
        project TEXT NOT NULL,
        labels JSONB NOT NULL,
        spec JSONB NOT NULL,
        state TEXT NOT NULL,
        cancel_requested BOOLEAN DEFAULT false NOT NULL,
        hold_requested BOOLEAN DEFAULT false NOT NULL,
        reason TEXT,
        detail TEXT,
        expected_start_at TIMESTAMP WITH TIME ZONE,
        generation INTEGER DEFAULT 0 NOT NULL,
        preemptions INTEGER DEFAULT 0 NOT NULL,
        restarts INTEGER DEFAULT 0 NOT NULL,
        exit_code INTEGER,
        submitted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        queued_at TIMESTAMP WITH TIME ZONE,
        started_at TIMESTAMP WITH TIME ZONE,
        ended_at TIMESTAMP WITH TIME ZONE,
        PRIMARY KEY (id)
    )
    """,
    "CREATE INDEX jobs_by_tenant ON jobs (tenant_id, id)",
    "CREATE INDEX jobs_labels ON jobs USING gin (labels jsonb_path_ops)",
    "CREATE INDEX jobs_live ON jobs (state) WHERE state NOT IN ('succeeded', 'failed', 'cancelled')",
    """
    CREATE TABLE nodes (
        id TEXT NOT NULL,
        token_sha256 BYTEA NOT NULL,
        address TEXT NOT NULL,
        agent_url TEXT NOT NULL,
        zone TEXT NOT NULL,
        driver TEXT NOT NULL,
        containers BOOLEAN NOT NULL,
        host_power TEXT NOT NULL,
        labels JSONB DEFAULT '{}' NOT NULL,
        devices JSONB NOT NULL,
        readings JSONB DEFAULT '[]' NOT NULL,
        state TEXT DEFAULT 'up' NOT NULL,
        draining BOOLEAN DEFAULT false NOT NULL,
        boot_id TEXT,
        registered_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        heartbeat_at TIMESTAMP WITH TIME ZONE,
        lease_until TIMESTAMP WITH TIME ZONE,
        PRIMARY KEY (id)
    )
    """,
    """
    CREATE TABLE outbox (
        id BIGSERIAL NOT NULL,
        stream TEXT NOT NULL,
        payload JSONB NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        PRIMARY KEY (id)
    )
    """,
    """
    CREATE TABLE plans (
        round BIGSERIAL NOT NULL,
        at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        trigger TEXT NOT NULL,
        policy TEXT NOT NULL,
        jobs INTEGER NOT NULL,
        starts INTEGER NOT NULL,
        preemptions INTEGER NOT NULL,
        holds INTEGER NOT NULL,
        intensity_gco2_per_kwh FLOAT,
        intensity_stale BOOLEAN NOT NULL,
        decide_ms FLOAT NOT NULL,
        actions JSONB NOT NULL,
        PRIMARY KEY (round)
    )
    """,
    """
    CREATE TABLE rank_statuses (
        allocation_id TEXT NOT NULL,
        node_id TEXT NOT NULL,
        state TEXT NOT NULL,
        exit_code INTEGER,
        detail TEXT,
        started_at TIMESTAMP WITH TIME ZONE,
        ended_at TIMESTAMP WITH TIME ZONE,
        updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        PRIMARY KEY (allocation_id, node_id)
    )
    """,
    """
    CREATE TABLE scheduler_state (
        id SERIAL NOT NULL,
        policy TEXT NOT NULL,
        parameters JSONB NOT NULL,
        policy_since TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        policy_changed_by TEXT NOT NULL,
        memory JSONB NOT NULL,
        version BIGINT NOT NULL,
        last_active_at TIMESTAMP WITH TIME ZONE,
        PRIMARY KEY (id),
        CONSTRAINT scheduler_state_one_row CHECK (id = 1)
    )
    """,
    """
    CREATE TABLE submissions (
        tenant_id TEXT NOT NULL,
        idempotency_key TEXT NOT NULL,
        body_sha256 BYTEA NOT NULL,
        job_ids TEXT[] NOT NULL,
        batch BOOLEAN NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        PRIMARY KEY (tenant_id, idempotency_key)
    )
    """,
    """
    CREATE TABLE tenants (
        id TEXT NOT NULL,
        limits JSONB NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        PRIMARY KEY (id)
    )
    """,
    """
    CREATE TABLE allocations (
        id TEXT NOT NULL,
        job_id TEXT NOT NULL,
        generation INTEGER NOT NULL,
        state TEXT NOT NULL,
        gpus INTEGER NOT NULL,
        shares JSONB NOT NULL,
        master_port INTEGER NOT NULL,
        started_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        running_at TIMESTAMP WITH TIME ZONE,
        stop_requested_at TIMESTAMP WITH TIME ZONE,
        stop_reason TEXT,
        ended_at TIMESTAMP WITH TIME ZONE,
        end_reason TEXT,
        PRIMARY KEY (id),
        CONSTRAINT allocations_state CHECK (state IN ('starting', 'running', 'stopping', 'ended')),
        FOREIGN KEY(job_id) REFERENCES jobs (id)
    )
    """,
    "CREATE UNIQUE INDEX allocations_by_job ON allocations (job_id, generation)",
    "CREATE UNIQUE INDEX allocations_one_live_per_job ON allocations (job_id) WHERE state <> 'ended'",
    """
    CREATE TABLE api_keys (
        id TEXT NOT NULL,
        tenant_id TEXT NOT NULL,
        role TEXT NOT NULL,
        label TEXT NOT NULL,
        key_sha256 BYTEA NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        revoked_at TIMESTAMP WITH TIME ZONE,
        PRIMARY KEY (id),
        FOREIGN KEY(tenant_id) REFERENCES tenants (id),
        UNIQUE (key_sha256)
    )
    """,
    """
    CREATE TABLE device_claims (
        node_id TEXT NOT NULL,
        device INTEGER NOT NULL,
        allocation_id TEXT NOT NULL,
        PRIMARY KEY (node_id, device),
        FOREIGN KEY(allocation_id) REFERENCES allocations (id)
    )
    """,
    "CREATE INDEX device_claims_by_allocation ON device_claims (allocation_id)",
    """
    CREATE TABLE rank_ends (
        allocation_id TEXT NOT NULL,
        node_id TEXT NOT NULL,
        exit_code INTEGER,
        detail TEXT,
        at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        PRIMARY KEY (allocation_id, node_id),
        FOREIGN KEY(allocation_id) REFERENCES allocations (id)
    )
    """,
]

TABLES = [
    "rank_ends",
    "device_claims",
    "api_keys",
    "allocations",
    "tenants",
    "submissions",
    "scheduler_state",
    "rank_statuses",
    "plans",
    "outbox",
    "nodes",
    "jobs",
    "job_progress",
    "job_profiles",
    "job_footprints",
    "job_events",
    "energy_usages",
    "energy_intervals",
    "audit_log",
]


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    for table in TABLES:
        op.execute(f"DROP TABLE {table}")
