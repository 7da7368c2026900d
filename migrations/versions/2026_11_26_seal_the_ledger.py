"""Seal the ledger: lines are only added, each batch is hashed with the one before it, and days can be signed.

Lines of the time before stay as they are, in batch 0, and sums in number 0.
"""

from alembic import op

revision = "0053"
down_revision = "0052"
branch_labels = None
depends_on = None

TABLES = [
    """
    CREATE TABLE ledger_lanes (
        lane INTEGER NOT NULL PRIMARY KEY,
        number BIGINT NOT NULL,
        hash BYTEA NOT NULL
    ) WITH (fillfactor = 20)
    """,
    "CREATE SEQUENCE ledger_lane_ids",
    """
    CREATE TABLE ledger_batches (
        id BIGINT NOT NULL PRIMARY KEY,
        lane INTEGER NOT NULL,
        number BIGINT NOT NULL,
        version INTEGER NOT NULL,
        at TIMESTAMP WITH TIME ZONE NOT NULL,
        lines INTEGER NOT NULL,
        first_at TIMESTAMP WITH TIME ZONE NOT NULL,
        last_at TIMESTAMP WITH TIME ZONE NOT NULL,
        digest BYTEA NOT NULL,
        CONSTRAINT ledger_batches_of_a_lane UNIQUE (lane, number)
    )
    """,
    "CREATE SEQUENCE ledger_batch_ids",
    """
    CREATE TABLE ledger_keys (
        public_key BYTEA NOT NULL PRIMARY KEY,
        sealed BYTEA NOT NULL,
        made_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL
    )
    """,
    """
    CREATE TABLE ledger_days (
        number BIGINT NOT NULL PRIMARY KEY,
        day DATE NOT NULL UNIQUE,
        text TEXT NOT NULL,
        hash BYTEA NOT NULL,
        public_key BYTEA,
        signature BYTEA,
        first_at TIMESTAMP WITH TIME ZONE,
        last_at TIMESTAMP WITH TIME ZONE
    )
    """,
    """
    CREATE TABLE ledger_heads (
        day_number BIGINT NOT NULL,
        lane INTEGER NOT NULL,
        after_number BIGINT NOT NULL,
        number BIGINT NOT NULL,
        PRIMARY KEY (day_number, lane)
    )
    """,
    """
    CREATE TABLE ledger_sums (
        number BIGINT NOT NULL PRIMARY KEY,
        day_number BIGINT UNIQUE,
        text TEXT NOT NULL,
        hash BYTEA NOT NULL,
        public_key BYTEA,
        signature BYTEA
    )
    """,
]

COLUMNS = [
    "ALTER TABLE energy_usages ADD COLUMN batch BIGINT DEFAULT 0 NOT NULL",
    "ALTER TABLE energy_usages ALTER COLUMN batch "
    "SET DEFAULT coalesce(nullif(current_setting('wattshift.batch', true), ''), '0')::bigint",
    "CREATE INDEX energy_usages_by_batch ON energy_usages USING brin (batch) "
    "WITH (pages_per_range = 16, autosummarize = on)",
    "ALTER TABLE energy_days ADD COLUMN sum_number BIGINT DEFAULT 0 NOT NULL",
    "ALTER TABLE energy_days DROP CONSTRAINT energy_days_pkey, "
    "ADD PRIMARY KEY (day, node_id, owner, zone, signal, pue, sum_number)",
]

# Whatever adds lines, the batch is hashed in its transaction. Each transaction takes a lane that no other has, so that
# none waits for another to commit; the hash of a batch covers the one before it in its lane.
OPEN = """
CREATE FUNCTION ledger_open() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('wattshift.batch', nextval('ledger_batch_ids')::text, true);
    RETURN NULL;
END $$
"""

CLOSE = """
CREATE FUNCTION ledger_close() RETURNS trigger LANGUAGE plpgsql SET extra_float_digits = 1 SET timezone = 'UTC' AS $$
DECLARE
    body TEXT; counted INTEGER; began TIMESTAMPTZ; ended TIMESTAMPTZ; head RECORD; digested BYTEA;
    moment TIMESTAMPTZ := clock_timestamp();
BEGIN
    SELECT count(*), min(start_at), max(start_at), string_agg(line, '' ORDER BY line COLLATE "C")
      INTO counted, began, ended, body
      FROM (SELECT start_at, concat_ws(E'\t', node_id, boot_id, sequence, owner, coalesce(job_id, ''),
                to_json(start_at) #>> '{}', to_json(end_at) #>> '{}', gpus, gpu_energy_j, cpu_energy_j,
                static_energy_j, source, cpu_source, zone, signal, intensity_gco2_per_kwh, intensity_estimated::text,
                pue, carbon_gco2, coalesce(basis, ''), coalesce(reported_energy_j::text, ''),
                array_to_string(devices, ' '), coalesce(provider, ''), coalesce(to_json(fetched_at) #>> '{}', ''),
                coalesce(intensity_kind, ''), coalesce(release, '')) || E'\n' AS line
            FROM added) AS lines;
    IF counted = 0 THEN
        RETURN NULL;
    END IF;
    SELECT lane, number + 1 AS number, hash INTO head FROM ledger_lanes ORDER BY lane LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        INSERT INTO ledger_lanes VALUES (nextval('ledger_lane_ids'), 0, decode(repeat('00', 32), 'hex'))
            RETURNING lane, 1::bigint AS number, hash INTO head;
    END IF;
    digested := sha256(convert_to(body, 'UTF8'));
    INSERT INTO ledger_batches VALUES (current_setting('wattshift.batch')::bigint, head.lane, head.number, 1,
        moment, counted, began, ended, digested);
    UPDATE ledger_lanes SET number = head.number, hash = sha256(convert_to(format(
        E'wattshift ledger batch 1\n%s %s %s %s %s %s\n%s\n%s\n', head.lane, head.number, to_json(moment) #>> '{}',
        counted, to_json(began) #>> '{}', to_json(ended) #>> '{}', encode(head.hash, 'hex'), encode(digested, 'hex')),
        'UTF8')) WHERE lane = head.lane;
    RETURN NULL;
END $$
"""

KEEP = """
CREATE FUNCTION ledger_keep() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    stack TEXT;
BEGIN
    GET DIAGNOSTICS stack = PG_CONTEXT;
    IF TG_OP = 'DELETE' AND stack LIKE '%PL/pgSQL function take_folded_lines(%' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION '% of %: the ledger is only added to', TG_OP, TG_TABLE_NAME
        USING HINT = 'Corrections are new lines.', ERRCODE = 'restrict_violation';
END $$
"""

BATCHES = """
    SELECT b.id FROM ledger_batches b JOIN ledger_heads h USING (lane)
    WHERE h.day_number = of_day AND b.number > h.after_number AND b.number <= h.number
"""

TAKE = f"""
CREATE FUNCTION take_folded_lines(of_day BIGINT, before TIMESTAMPTZ) RETURNS SETOF energy_usages LANGUAGE plpgsql AS $$
DECLARE
    first_id BIGINT; last_id BIGINT;
BEGIN
    RETURN QUERY DELETE FROM energy_usages WHERE batch = 0 AND start_at < before RETURNING *;
    SELECT min(id), max(id) INTO first_id, last_id FROM ({BATCHES}) AS known;
    RETURN QUERY DELETE FROM energy_usages WHERE batch BETWEEN first_id AND last_id AND batch IN ({BATCHES})
        RETURNING *;
    DELETE FROM ledger_batches WHERE id IN ({BATCHES});
END $$
"""

APPENDED = ("energy_usages", "ledger_batches", "ledger_heads", "ledger_days", "ledger_sums")
KEPT = "EXECUTE FUNCTION ledger_keep()"
TRIGGERS = [
    "CREATE TRIGGER ledger_open BEFORE INSERT ON energy_usages FOR EACH STATEMENT EXECUTE FUNCTION ledger_open()",
    "CREATE TRIGGER ledger_close AFTER INSERT ON energy_usages REFERENCING NEW TABLE AS added "
    "FOR EACH STATEMENT EXECUTE FUNCTION ledger_close()",
    *(
        f"CREATE TRIGGER ledger_keep BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} FOR EACH STATEMENT {KEPT}"
        for table in APPENDED
    ),
    f"CREATE TRIGGER ledger_keep BEFORE UPDATE OR DELETE ON energy_days FOR EACH ROW WHEN (OLD.sum_number > 0) {KEPT}",
    f"CREATE TRIGGER ledger_keep_all BEFORE TRUNCATE ON energy_days FOR EACH STATEMENT {KEPT}",
]

MERGE = [
    "CREATE TEMPORARY TABLE merged ON COMMIT DROP AS SELECT day, node_id, owner, zone, signal, pue, "
    "min(job_id) AS job_id, min(start_at) AS start_at, max(end_at) AS end_at, sum(energy_j) AS energy_j, "
    "sum(gpu_energy_j) AS gpu_energy_j, sum(estimated_energy_j) AS estimated_energy_j, "
    "sum(carbon_gco2) AS carbon_gco2, sum(gpu_s) AS gpu_s, bool_or(estimated) AS estimated "
    "FROM energy_days GROUP BY 1, 2, 3, 4, 5, 6",
    "DELETE FROM energy_days",
    "INSERT INTO energy_days (day, node_id, owner, zone, signal, pue, job_id, start_at, end_at, energy_j, "
    "gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s, estimated) SELECT * FROM merged",
]


def upgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    for statement in (*TABLES, *COLUMNS, OPEN, CLOSE, KEEP, TAKE, *TRIGGERS):
        op.execute(statement)


def downgrade() -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    for trigger in ("ledger_open", "ledger_close", "ledger_keep"):
        op.execute(f"DROP TRIGGER {trigger} ON energy_usages")
    for trigger in ("ledger_keep", "ledger_keep_all"):
        op.execute(f"DROP TRIGGER {trigger} ON energy_days")
    op.execute("DROP FUNCTION take_folded_lines")
    for statement in MERGE:
        op.execute(statement)
    op.execute(
        "ALTER TABLE energy_days DROP CONSTRAINT energy_days_pkey, DROP COLUMN sum_number, "
        "ADD PRIMARY KEY (day, node_id, owner, zone, signal, pue)"
    )
    op.execute("ALTER TABLE energy_usages DROP COLUMN batch")
    for table in ("ledger_sums", "ledger_heads", "ledger_days", "ledger_keys", "ledger_batches", "ledger_lanes"):
        op.execute(f"DROP TABLE {table}")
    for sequence in ("ledger_batch_ids", "ledger_lane_ids"):
        op.execute(f"DROP SEQUENCE {sequence}")
    for function in ("ledger_open", "ledger_close", "ledger_keep"):
        op.execute(f"DROP FUNCTION {function}")
