"""Take in batches of requests to models, with their lines and files."""

from alembic import op

revision = "0062"
down_revision = "0061"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE batch_files (
        id TEXT PRIMARY KEY,
        tenant_id TEXT NOT NULL,
        filename TEXT NOT NULL,
        purpose TEXT NOT NULL,
        size_bytes BIGINT DEFAULT '0' NOT NULL,
        is_complete BOOLEAN DEFAULT false NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        expires_at TIMESTAMP WITH TIME ZONE NOT NULL
    )
    """,
    "CREATE INDEX batch_files_by_tenant ON batch_files (tenant_id, id)",
    "CREATE INDEX batch_files_by_expiry ON batch_files (expires_at)",
    """
    CREATE TABLE batch_file_chunks (
        file_id TEXT NOT NULL REFERENCES batch_files ON DELETE CASCADE,
        number INTEGER NOT NULL,
        data BYTEA NOT NULL,
        PRIMARY KEY (file_id, number)
    )
    """,
    """
    CREATE TABLE batches (
        id TEXT PRIMARY KEY,
        tenant_id TEXT NOT NULL,
        caller JSONB NOT NULL,
        endpoint TEXT NOT NULL,
        input_file_id TEXT NOT NULL,
        output_file_id TEXT,
        error_file_id TEXT,
        output_keep_s FLOAT NOT NULL,
        status TEXT DEFAULT 'validating' NOT NULL,
        errors JSONB,
        metadata JSONB,
        moments JSONB DEFAULT '{}' NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
        ended_at TIMESTAMP WITH TIME ZONE,
        total INTEGER DEFAULT '0' NOT NULL,
        completed INTEGER DEFAULT '0' NOT NULL,
        failed INTEGER DEFAULT '0' NOT NULL,
        repeated INTEGER DEFAULT '0' NOT NULL,
        energy_j FLOAT DEFAULT '0' NOT NULL,
        carbon_gco2 FLOAT DEFAULT '0' NOT NULL,
        arrival_gco2_per_kwh FLOAT
    )
    """,
    "CREATE INDEX batches_by_tenant ON batches (tenant_id, id)",
    "CREATE INDEX batches_open ON batches (expires_at) WHERE ended_at IS NULL",
    "CREATE INDEX batches_by_end ON batches (ended_at)",
    """
    CREATE TABLE batch_lines (
        batch_id TEXT NOT NULL REFERENCES batches ON DELETE CASCADE,
        number INTEGER NOT NULL,
        custom_id TEXT NOT NULL,
        model TEXT NOT NULL,
        body TEXT NOT NULL,
        state TEXT DEFAULT 'waiting' NOT NULL,
        attempt INTEGER DEFAULT '0' NOT NULL,
        failures INTEGER DEFAULT '0' NOT NULL,
        result TEXT,
        PRIMARY KEY (batch_id, number),
        UNIQUE (batch_id, custom_id)
    )
    """,
    "CREATE INDEX batch_lines_open ON batch_lines (batch_id, model, state) WHERE result IS NULL",
)


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    for table in ("batch_lines", "batches", "batch_file_chunks", "batch_files"):
        op.execute(f"DROP TABLE {table}")
