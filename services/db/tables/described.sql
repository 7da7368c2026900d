-- All tables, as the migrations make them: a description that a test compares with a migrated database.

-- admission: Tables of admission: tenants, users, keys, jobs and what happened to them.
-- Two processes write `jobs` by agreement: admission accepts a job and records what its user wants (cancel, hold,
-- release), the scheduler moves it through its run. Each update names the state it expects, so that neither overwrites
-- the other.

-- `accepted_jobs` counts every job ever accepted. It is raised in the transaction that accepts them, whose lock on the
-- row makes quotas exact; its increase since the active jobs were last counted is the most by which they can have
-- grown. `last_number` is the newest number of a job or an array, given under the same lock, and by the scheduler to
-- jobs of engines (`services/db/job_rows.py`).
CREATE TABLE tenants (
    id TEXT NOT NULL,
    limits JSONB NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    accepted_jobs BIGINT DEFAULT 0 NOT NULL,
    last_number BIGINT DEFAULT 0 NOT NULL,
    PRIMARY KEY (id)
);

-- Who submits jobs. `account` is the operating system's account that the user's jobs run as on nodes.
CREATE TABLE users (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    name TEXT NOT NULL,
    account TEXT,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    disabled_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (id),
    CONSTRAINT users_of_a_tenant UNIQUE (tenant_id, name),
    FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);

-- `last_used_at` is to within a minute: it is written at most that often. A key that has a `project` reaches no other.
-- `used` is what it and the keys in `replaced`, its predecessors, used of their budget for a month.
CREATE TABLE api_keys (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    role TEXT NOT NULL,
    label TEXT NOT NULL,
    key_sha256 BYTEA NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    revoked_at TIMESTAMP WITH TIME ZONE,
    expires_at TIMESTAMP WITH TIME ZONE,
    last_used_at TIMESTAMP WITH TIME ZONE,
    user_id TEXT,
    project TEXT,
    limits JSONB DEFAULT '{}' NOT NULL,
    used JSONB,
    replaced TEXT[] DEFAULT '{}' NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    UNIQUE (key_sha256),
    FOREIGN KEY(user_id) REFERENCES users (id)
);

-- `gated`: whether it may have to wait for other jobs, as it has dependencies or is a task of an array with a limit,
-- waits for something else than GPUs in its engine, or pauses until `not_before`, as it failed again and again. A task
-- of an array has the array's spec, and the dependencies of the array are its own. `number`: what its tenant's people
-- type for its id, for a task that of its array; none of what an older release accepted. `engine`: what runs it, our
-- own agents or an engine such as Slurm, which knows it by `external_id`. `cell`: the other installation that has it,
-- whose state admission mirrors; empty while its place is being chosen, once it is stopped if it runs here; NULL for
-- the jobs of this one: the scheduler plans no others.
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
    attained_gpu_s FLOAT DEFAULT 0 NOT NULL,
    submitted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    queued_at TIMESTAMP WITH TIME ZONE,
    started_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    array_id TEXT,
    array_index INTEGER,
    gated BOOLEAN DEFAULT false NOT NULL,
    user_id TEXT,
    engine TEXT DEFAULT 'wattshift' NOT NULL,
    external_id TEXT,
    bound_to TEXT[],
    node_losses INTEGER DEFAULT 0 NOT NULL,
    not_before TIMESTAMP WITH TIME ZONE,
    number BIGINT,
    cell TEXT,
    PRIMARY KEY (id)
);
CREATE INDEX jobs_bound ON jobs (id) WHERE bound_to IS NOT NULL;
CREATE INDEX jobs_by_array ON jobs (array_id, id) WHERE array_id IS NOT NULL;
CREATE INDEX jobs_by_tenant ON jobs (tenant_id, id);
CREATE INDEX jobs_ended ON jobs (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX jobs_gated ON jobs (id) WHERE gated AND state NOT IN ('succeeded', 'failed', 'cancelled');
CREATE INDEX jobs_in_cells ON jobs (tenant_id) WHERE cell <> '' AND ended_at IS NULL;
CREATE INDEX jobs_labels ON jobs USING gin (labels jsonb_path_ops);
CREATE INDEX jobs_live ON jobs (state) WHERE state NOT IN ('succeeded', 'failed', 'cancelled');
CREATE UNIQUE INDEX jobs_numbered ON jobs (tenant_id, number) WHERE array_id IS NULL;
CREATE UNIQUE INDEX jobs_of_an_engine ON jobs (engine, external_id) WHERE external_id IS NOT NULL;
CREATE INDEX jobs_roaming ON jobs (id) WHERE cell IS NULL AND state = 'queued' AND spec ? 'cells';
CREATE INDEX jobs_succeeded ON jobs (ended_at, id) WHERE state = 'succeeded';
CREATE INDEX jobs_to_place ON jobs (id) WHERE cell = '' AND state = 'queued';

-- Other installations that run jobs of this one. `key` is sealed; `home` is the label by which a cell knows the jobs of
-- this installation.
CREATE TABLE cells (
    name TEXT NOT NULL,
    url TEXT NOT NULL,
    key BYTEA NOT NULL,
    home TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    project TEXT,
    draining BOOLEAN DEFAULT false NOT NULL,
    added_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    heard_at TIMESTAMP WITH TIME ZONE,
    problem TEXT,
    PRIMARY KEY (name)
);

-- The cell that a job was given to last, its copy there, and how the handing over stands. `sending`: it is or will be
-- submitted there, with the `body` and an idempotency key of the job and the `attempt`; until `doubt_until`, a
-- submission that was not answered may still arrive. `leaving`: it is to be withdrawn. `over`: it has ended there, was
-- withdrawn, or never came. `seen`: the copy as it was last read.
CREATE TABLE cell_jobs (
    job_id TEXT NOT NULL,
    cell TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    moves INTEGER DEFAULT 0 NOT NULL,
    state TEXT NOT NULL,
    body TEXT NOT NULL,
    remote_id TEXT,
    doubt_until TIMESTAMP WITH TIME ZONE,
    seen JSONB DEFAULT '{}' NOT NULL,
    zone TEXT DEFAULT '' NOT NULL,
    signal TEXT DEFAULT '' NOT NULL,
    pue FLOAT DEFAULT 1 NOT NULL,
    PRIMARY KEY (job_id),
    CONSTRAINT cell_jobs_state CHECK (state IN ('sending', 'there', 'leaving', 'over'))
);
CREATE INDEX cell_jobs_live ON cell_jobs (cell) WHERE state <> 'over';

-- What copies used, by the hour in which that became known, by the cells' own ledgers.
CREATE TABLE cell_energy (
    job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    cell TEXT NOT NULL,
    hour TIMESTAMP WITH TIME ZONE NOT NULL,
    zone TEXT NOT NULL,
    signal TEXT NOT NULL,
    pue FLOAT NOT NULL,
    energy_j FLOAT NOT NULL,
    gpu_energy_j FLOAT NOT NULL,
    estimated_energy_j FLOAT NOT NULL,
    carbon_gco2 FLOAT NOT NULL,
    gpu_s FLOAT NOT NULL,
    PRIMARY KEY (job_id, attempt, hour)
);
CREATE INDEX cell_energy_by_hour ON cell_energy (hour);

-- What a project (empty: the whole tenant) may use per month, and how much of it is used. The scheduler starts no
-- queued job of a project whose budget is `exceeded` and whose `action` is `hold`.
CREATE TABLE budgets (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    project TEXT NOT NULL,
    quantity TEXT NOT NULL,
    amount FLOAT NOT NULL,
    action TEXT NOT NULL,
    month TEXT,
    used FLOAT DEFAULT 0 NOT NULL,
    exceeded BOOLEAN DEFAULT false NOT NULL,
    detail TEXT,
    PRIMARY KEY (id),
    CONSTRAINT budgets_of_a_project UNIQUE (tenant_id, project, quantity),
    FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);

-- Where messages go. Secrets are derived from the installation's and `secret_revision`; only their hash is here.
-- `failures` counts the attempts that failed since the last that succeeded; nothing is sent until `paused_until`.
CREATE TABLE webhooks (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    url TEXT NOT NULL,
    events TEXT[] NOT NULL,
    project TEXT,
    secret_revision INTEGER DEFAULT 1 NOT NULL,
    secret_sha256 BYTEA NOT NULL,
    previous_secret_until TIMESTAMP WITH TIME ZONE,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    enabled_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    disabled_at TIMESTAMP WITH TIME ZONE,
    disabled_reason TEXT,
    failures INTEGER DEFAULT 0 NOT NULL,
    failing_since TIMESTAMP WITH TIME ZONE,
    paused_until TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (id),
    FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);
CREATE INDEX webhooks_by_tenant ON webhooks (tenant_id, id);

-- Budgets that were exceeded and nodes that were lost (by the scheduler), written in the transaction that finds out.
-- Admission turns each into deliveries and deletes it in one transaction; without a tenant, it concerns operators.
CREATE TABLE webhook_events (
    id BIGSERIAL NOT NULL,
    type TEXT NOT NULL,
    tenant_id TEXT,
    project TEXT,
    at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    data JSONB NOT NULL,
    PRIMARY KEY (id)
);

-- Messages. An attempt moves `next_attempt_at` past its own time-out before it begins, so that no other process makes
-- it too, and that it is repeated if this process dies.
CREATE TABLE webhook_deliveries (
    id TEXT NOT NULL,
    webhook_id TEXT NOT NULL,
    type TEXT NOT NULL,
    body TEXT NOT NULL,
    state TEXT DEFAULT 'pending' NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    attempts INTEGER DEFAULT 0 NOT NULL,
    attempted_at TIMESTAMP WITH TIME ZONE,
    next_attempt_at TIMESTAMP WITH TIME ZONE DEFAULT now(),
    ended_at TIMESTAMP WITH TIME ZONE,
    status INTEGER,
    error TEXT,
    PRIMARY KEY (id),
    FOREIGN KEY(webhook_id) REFERENCES webhooks (id) ON DELETE CASCADE
);
CREATE INDEX webhook_deliveries_by_webhook ON webhook_deliveries (webhook_id, id);
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (webhook_id, next_attempt_at) WHERE state = 'pending';
CREATE INDEX webhook_deliveries_ended ON webhook_deliveries (ended_at);

-- Values that jobs get, sealed by `services/db/sealing.py`. An empty `project` means all of the tenant's.
CREATE TABLE secrets (
    tenant_id TEXT NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    sealed BYTEA NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (tenant_id, project, name),
    FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);

-- Archives with the files of jobs. `used_at` is when it was last uploaded to, or named by a submission.
CREATE TABLE uploads (
    tenant_id TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    size_bytes BIGINT NOT NULL,
    is_complete BOOLEAN DEFAULT false NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    used_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (tenant_id, sha256),
    FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);

CREATE TABLE upload_chunks (
    tenant_id TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    number INTEGER NOT NULL,
    data BYTEA NOT NULL,
    PRIMARY KEY (tenant_id, sha256, number),
    FOREIGN KEY(tenant_id, sha256) REFERENCES uploads (tenant_id, sha256) ON DELETE CASCADE
);

-- What happened. A reader goes by `(transaction_id, sequence)` and stops before the oldest transaction still open:
-- sequences are assigned before their rows are visible, so a reader of sequences alone would skip rows of slower
-- transactions.
CREATE TABLE job_events (
    sequence BIGSERIAL NOT NULL,
    transaction_id BIGINT DEFAULT pg_current_xact_id()::text::bigint NOT NULL,
    job_id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    type TEXT NOT NULL,
    data JSONB DEFAULT '{}' NOT NULL,
    PRIMARY KEY (sequence)
);
CREATE INDEX job_events_by_job ON job_events (job_id, transaction_id, sequence);
CREATE INDEX job_events_in_order ON job_events (transaction_id, sequence);
CREATE INDEX job_events_by_tenant ON job_events (tenant_id, transaction_id, sequence);

-- What operators and admins did.
CREATE TABLE audit_log (
    sequence BIGSERIAL NOT NULL,
    at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    tenant_id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    action TEXT NOT NULL,
    target TEXT NOT NULL,
    data JSONB DEFAULT '{}' NOT NULL,
    PRIMARY KEY (sequence)
);

-- What is kept of jobs that ended long ago and are no longer in `jobs`: what reports group the ledger by.
CREATE TABLE past_jobs (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    project TEXT NOT NULL,
    name TEXT NOT NULL,
    state TEXT NOT NULL,
    user_id TEXT,
    user_label TEXT,
    array_id TEXT,
    array_name TEXT,
    work_unit TEXT,
    work_done FLOAT,
    PRIMARY KEY (id)
);

-- Submissions that made many jobs; how far an array is, is known from its jobs alone.
CREATE TABLE job_arrays (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    name TEXT NOT NULL,
    project TEXT NOT NULL,
    labels JSONB NOT NULL,
    spec JSONB NOT NULL,
    tasks INTEGER NOT NULL,
    first_index INTEGER NOT NULL,
    last_index INTEGER NOT NULL,
    max_running INTEGER,
    submitted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    user_id TEXT,
    number BIGINT,
    PRIMARY KEY (id)
);
CREATE INDEX job_arrays_by_tenant ON job_arrays (tenant_id, id);
CREATE UNIQUE INDEX job_arrays_numbered ON job_arrays (tenant_id, number);

-- `dependent_id` starts only when `needs_id` has ended in a way that meets the condition; both are jobs or arrays.
-- Whether it is met is never stored: the scheduler derives it from the jobs' states.
CREATE TABLE job_dependencies (
    dependent_id TEXT NOT NULL,
    needs_id TEXT NOT NULL,
    condition TEXT NOT NULL,
    PRIMARY KEY (dependent_id, needs_id, condition),
    CONSTRAINT job_dependencies_condition CHECK (condition IN ('ok', 'any', 'not_ok'))
);

-- The place in `job_events` up to which ends of jobs have become deliveries; it moves in the same transaction.
CREATE TABLE webhook_position (
    id SERIAL NOT NULL,
    transaction_id BIGINT NOT NULL,
    sequence BIGINT NOT NULL,
    PRIMARY KEY (id),
    CONSTRAINT webhook_position_one_row CHECK (id = 1)
);

-- The jobs that an idempotency key refers to.
CREATE TABLE submissions (
    tenant_id TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    body_sha256 BYTEA NOT NULL,
    job_ids TEXT[] NOT NULL,
    batch BOOLEAN NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (tenant_id, idempotency_key)
);


-- engines: Tables of engines: what their bridges report (written by telemetry), and what is decided of it (by the scheduler).
-- Engines by the last reports of their bridges; the name is that of the bridge's node. `orders`: plans say in which
-- order released jobs start there.
CREATE TABLE engines (
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    version TEXT NOT NULL,
    places TEXT NOT NULL,
    mode TEXT NOT NULL,
    queues TEXT[] NOT NULL,
    problem TEXT,
    boot_id TEXT NOT NULL,
    reported_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    orders BOOLEAN DEFAULT false NOT NULL,
    PRIMARY KEY (name)
);

-- Jobs as their engine has them: `report` is a `contracts.engines.EngineJob`, `over` once it will not run again.
-- `unfolded` until the scheduler has read the report; it writes `job_id`, and `decision` with its `revision`, which
-- the bridge names in its reports once it has carried it out, whether any plan knew the job while it waited
-- (`planned`), until when the last one held it back (`would_start_at`), the grams by which its run then emits less
-- than one begun at once (`would_save_gco2`), and its place in the last plan's order (`rank`). `watched`: it was in a
-- dry run, as of the last report. Telemetry writes the other columns.
CREATE TABLE engine_jobs (
    engine TEXT NOT NULL,
    external_id TEXT NOT NULL,
    report JSONB NOT NULL,
    "over" BOOLEAN NOT NULL,
    unfolded BOOLEAN DEFAULT true NOT NULL,
    reported_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    job_id TEXT,
    decision JSONB,
    revision BIGINT DEFAULT 0 NOT NULL,
    sent_at TIMESTAMP WITH TIME ZONE,
    watched BOOLEAN DEFAULT false NOT NULL,
    planned BOOLEAN DEFAULT false NOT NULL,
    would_start_at TIMESTAMP WITH TIME ZONE,
    would_save_gco2 DOUBLE PRECISION,
    rank INTEGER,
    PRIMARY KEY (engine, external_id)
);
CREATE INDEX engine_jobs_by_job ON engine_jobs (job_id);
CREATE INDEX engine_jobs_live ON engine_jobs (engine, external_id) WHERE NOT over;
CREATE INDEX engine_jobs_unfolded ON engine_jobs (engine) WHERE unfolded;

-- Orders of the grid to draw less. `steps` are its limits by the time since its start, `past` what amendments replaced;
-- `baseline_w` is what its scope drew before it, once that is known; `ratio` is measured over modelled draw.
CREATE TABLE grid_orders (
    id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    source TEXT NOT NULL,
    idempotency_key TEXT,
    body_sha256 BYTEA NOT NULL,
    name TEXT NOT NULL,
    zone TEXT,
    announced_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    start_at TIMESTAMP WITH TIME ZONE NOT NULL,
    end_at TIMESTAMP WITH TIME ZONE NOT NULL,
    notice_s FLOAT NOT NULL,
    steps JSONB NOT NULL,
    baseline_w FLOAT,
    baseline_at TIMESTAMP WITH TIME ZONE,
    withdrawn_at TIMESTAMP WITH TIME ZONE,
    revision INTEGER DEFAULT 1 NOT NULL,
    past JSONB DEFAULT '[]' NOT NULL,
    ratio FLOAT DEFAULT 1 NOT NULL,
    PRIMARY KEY (id)
);
CREATE UNIQUE INDEX grid_orders_keyed ON grid_orders (key_id, idempotency_key);
CREATE INDEX grid_orders_by_end ON grid_orders (end_at);

-- GPUs that are taken for a time: by node, for the jobs of a tenant, or for maintenance where there is none. `slots` are
-- the times that were free when it was made, `stays` the jobs that may then still run there.
CREATE TABLE reservations (
    id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    idempotency_key TEXT,
    body_sha256 BYTEA NOT NULL,
    name TEXT NOT NULL,
    tenant_id TEXT,
    made_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    start_at TIMESTAMP WITH TIME ZONE NOT NULL,
    end_at TIMESTAMP WITH TIME ZONE NOT NULL,
    gpu_model TEXT,
    gpus JSONB NOT NULL,
    slots JSONB NOT NULL,
    stays JSONB NOT NULL,
    cancelled_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (id)
);
CREATE UNIQUE INDEX reservations_keyed ON reservations (key_id, idempotency_key);
CREATE INDEX reservations_by_end ON reservations (end_at);

-- How often each thing happened on a day of UTC: decisions, the same in a dry run, and deviations of the engine.
CREATE TABLE engine_days (
    engine TEXT NOT NULL,
    day DATE NOT NULL,
    what TEXT NOT NULL,
    count BIGINT NOT NULL,
    PRIMARY KEY (engine, day, what)
);

-- What a dry run would have saved on the jobs of a day of UTC, as `contracts.engines.EngineSavings` says.
CREATE TABLE engine_savings (
    engine TEXT NOT NULL,
    day DATE NOT NULL,
    jobs INTEGER NOT NULL,
    unplanned INTEGER NOT NULL,
    unmeasured INTEGER NOT NULL,
    unpriced INTEGER NOT NULL,
    later INTEGER NOT NULL,
    later_h FLOAT,
    carbon_gco2 FLOAT,
    would_carbon_gco2 FLOAT,
    settled BOOLEAN NOT NULL,
    PRIMARY KEY (engine, day)
);


-- predictions: Tables of predicted lengths: trainings, the models they made, and what was predicted for each job.
-- Work as the optimizer's workers claim it (`services.db.background`); only the installation itself submits it.
CREATE TABLE length_trainings (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    state TEXT NOT NULL,
    problem JSONB NOT NULL,
    problem_sha256 BYTEA NOT NULL,
    result JSONB,
    failure JSONB,
    attempts INTEGER DEFAULT 0 NOT NULL,
    claim TEXT,
    lease_until TIMESTAMP WITH TIME ZONE,
    submitted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    enqueued_at TIMESTAMP WITH TIME ZONE,
    started_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    train_s FLOAT,
    PRIMARY KEY (id),
    CONSTRAINT length_trainings_state CHECK (state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled'))
);
CREATE INDEX length_trainings_live ON length_trainings (state) WHERE state IN ('queued', 'running');

-- A model has the id of its training; `content` is what `services.learning.length_table` writes: arrays, no code.
-- It was trained on the jobs that had ended by `through_at`.
CREATE TABLE length_models (
    id TEXT NOT NULL,
    trained_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    through_at TIMESTAMP WITH TIME ZONE NOT NULL,
    group_version INTEGER NOT NULL,
    jobs INTEGER NOT NULL,
    groups INTEGER NOT NULL,
    evaluation JSONB NOT NULL,
    is_active BOOLEAN DEFAULT false NOT NULL,
    content BYTEA NOT NULL,
    PRIMARY KEY (id)
);
CREATE UNIQUE INDEX length_models_one_active ON length_models (is_active) WHERE is_active;

-- What was predicted for a job when the scheduler first saw it. `predicted_at` is null for jobs that had ended
-- before there were predictions: only their group was determined, for the history.
CREATE TABLE job_predictions (
    job_id TEXT NOT NULL,
    group_version INTEGER NOT NULL,
    group_id BIGINT NOT NULL,
    user_id BIGINT NOT NULL,
    predicted_at TIMESTAMP WITH TIME ZONE,
    model_id TEXT,
    gpu_s FLOAT DEFAULT 0 NOT NULL,
    spread_gpu_s FLOAT DEFAULT 0 NOT NULL,
    seen BOOLEAN DEFAULT false NOT NULL,
    examples INTEGER DEFAULT 0 NOT NULL,
    low_gpu_s FLOAT,
    median_gpu_s FLOAT,
    high_gpu_s FLOAT,
    PRIMARY KEY (job_id)
);


-- scheduler: Tables of the scheduler: allocations, device claims, plans, its memory, and the outbox of commands.
-- A gang's devices, `shares` = `[{"node_id", "devices"}]`; their controls, null at the default, and the reasons for
-- refusals, by kind of control; what one of its GPUs drew before an order of the grid set them (`unordered_w`, while one
-- does) and before anything did (`unlimited_w`); its total batch, samples, where the job's user lets policies choose
-- that. The partial unique index enforces that a gang runs at most once.
CREATE TABLE allocations (
    id TEXT NOT NULL,
    job_id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    state TEXT NOT NULL,
    gpus INTEGER NOT NULL,
    shares JSONB NOT NULL,
    master_port INTEGER NOT NULL,
    batch_size INTEGER,
    started_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    running_at TIMESTAMP WITH TIME ZONE,
    stop_requested_at TIMESTAMP WITH TIME ZONE,
    stop_reason TEXT,
    ended_at TIMESTAMP WITH TIME ZONE,
    end_reason TEXT,
    power_limit_w FLOAT,
    clock_mhz INTEGER,
    settings_revision INTEGER DEFAULT 0 NOT NULL,
    settings_refused JSONB DEFAULT '{}' NOT NULL,
    unordered_w FLOAT,
    unlimited_w FLOAT,
    PRIMARY KEY (id),
    CONSTRAINT allocations_state CHECK (state IN ('starting', 'running', 'stopping', 'ended')),
    FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE UNIQUE INDEX allocations_by_job ON allocations (job_id, generation);
CREATE INDEX allocations_ended ON allocations (ended_at) WHERE ended_at IS NOT NULL;
CREATE UNIQUE INDEX allocations_one_live_per_job ON allocations (job_id) WHERE state <> 'ended';

-- The present holder of a device, or both where two jobs share a GPU.
-- The primary key enforces that no device has more than two holders (`slot` 0 and 1), and a trigger that none has a
-- second one but a claim that is `packed`, which needs a first one.
-- `uuid` is the device's when it was claimed, null where that was not known: of a MIG slice it tells whether the
-- device of that number is still the same. A slice has the GPU that it is part of, `parent`, and its `profile`. A
-- trigger refuses a claim on a GPU of which a slice is held, and on a slice of a GPU that is held itself.
CREATE TABLE device_claims (
    node_id TEXT NOT NULL,
    device INTEGER NOT NULL,
    allocation_id TEXT NOT NULL,
    uuid TEXT,
    parent INTEGER,
    profile TEXT,
    slot INTEGER DEFAULT 0 NOT NULL,
    packed BOOLEAN DEFAULT false NOT NULL,
    PRIMARY KEY (node_id, device, slot),
    CONSTRAINT device_claims_slot CHECK (slot IN (0, 1)),
    FOREIGN KEY(allocation_id) REFERENCES allocations (id)
);
CREATE INDEX device_claims_by_allocation ON device_claims (allocation_id);
CREATE INDEX device_claims_of_slices ON device_claims (node_id, parent) WHERE parent IS NOT NULL;

-- The ends of a gang's node shares that the scheduler has processed.
CREATE TABLE rank_ends (
    allocation_id TEXT NOT NULL,
    node_id TEXT NOT NULL,
    exit_code INTEGER,
    ended_by TEXT,
    detail TEXT,
    at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (allocation_id, node_id),
    FOREIGN KEY(allocation_id) REFERENCES allocations (id)
);

CREATE TABLE scheduler_state (
    id SERIAL NOT NULL,
    policy TEXT NOT NULL,
    parameters JSONB NOT NULL,
    policy_since TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    policy_changed_by TEXT NOT NULL,
    memory JSONB NOT NULL,
    version BIGINT NOT NULL,
    last_active_at TIMESTAMP WITH TIME ZONE,
    topology TEXT DEFAULT '' NOT NULL,
    PRIMARY KEY (id),
    CONSTRAINT scheduler_state_one_row CHECK (id = 1)
);

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
);

-- Nodes that were ever powered down or pinned awake; all others are on. For the present change: how often its hook
-- was run, when first (`acted_at`), when it last succeeded (`done_at`), and the earliest time of its next run.
-- `off_at` is null unless the node draws nothing but its standby.
CREATE TABLE node_power (
    node_id TEXT NOT NULL,
    state TEXT DEFAULT 'on' NOT NULL,
    since TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    pinned BOOLEAN DEFAULT false NOT NULL,
    reason TEXT DEFAULT '' NOT NULL,
    detail TEXT DEFAULT '' NOT NULL,
    attempts INTEGER DEFAULT 0 NOT NULL,
    acted_at TIMESTAMP WITH TIME ZONE,
    done_at TIMESTAMP WITH TIME ZONE,
    next_attempt_at TIMESTAMP WITH TIME ZONE,
    off_at TIMESTAMP WITH TIME ZONE,
    stays_on_until TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (node_id),
    CONSTRAINT node_power_state CHECK (state IN ('on', 'going_down', 'off', 'waking', 'failed'))
);

-- How long nodes were off and how long they took to wake, with the configured power; telemetry enters it into the
-- ledger.
CREATE TABLE node_power_periods (
    id BIGSERIAL NOT NULL,
    node_id TEXT NOT NULL,
    state TEXT NOT NULL,
    start_at TIMESTAMP WITH TIME ZONE NOT NULL,
    end_at TIMESTAMP WITH TIME ZONE NOT NULL,
    power_w FLOAT NOT NULL,
    PRIMARY KEY (id),
    CONSTRAINT node_power_periods_state CHECK (state IN ('off', 'waking'))
);
CREATE INDEX node_power_periods_by_node ON node_power_periods (node_id, id);

-- Commands committed with the plan; the relay deletes a row once Redis has it.
CREATE TABLE outbox (
    id BIGSERIAL NOT NULL,
    stream TEXT NOT NULL,
    payload JSONB NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (id)
);

-- Gangs that are, or were, run at each of `settings` in turn, the default first; `position` is the one in force
-- since `slice_since`: for `window_s` at most, until the first report `slice_s` after its first. A failed
-- measurement is not repeated for its job; one that was cut short is.
CREATE TABLE setting_measurements (
    allocation_id TEXT NOT NULL,
    job_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    gpu_model TEXT NOT NULL,
    setting TEXT NOT NULL,
    gpus INTEGER NOT NULL,
    nodes INTEGER NOT NULL,
    settings JSONB NOT NULL,
    window_s FLOAT NOT NULL,
    position INTEGER DEFAULT 0 NOT NULL,
    slice_since TIMESTAMP WITH TIME ZONE,
    slice_s FLOAT DEFAULT 0 NOT NULL,
    state TEXT DEFAULT 'running' NOT NULL,
    detail TEXT DEFAULT '' NOT NULL,
    began_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    ended_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (allocation_id),
    CONSTRAINT setting_measurements_state CHECK (state IN ('running', 'done', 'cut', 'failed')),
    FOREIGN KEY(allocation_id) REFERENCES allocations (id)
);
CREATE INDEX setting_measurements_by_kind ON setting_measurements (kind, began_at);
CREATE INDEX setting_measurements_running ON setting_measurements (allocation_id) WHERE state = 'running';

-- The measurements of a kind of job, the newest for each configuration: seconds per unit of the job's own work, and
-- the mean draw of one GPU. `local_batch` is 0 if the job does not report it. A kind that users named is
-- "tenant/label".
CREATE TABLE setting_points (
    kind TEXT NOT NULL,
    gpu_model TEXT NOT NULL,
    setting TEXT NOT NULL,
    gpus INTEGER NOT NULL,
    nodes INTEGER NOT NULL,
    local_batch FLOAT NOT NULL,
    value FLOAT NOT NULL,
    step_time_s FLOAT NOT NULL,
    power_w FLOAT NOT NULL,
    elapsed_s FLOAT NOT NULL,
    job_id TEXT NOT NULL,
    measured_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (kind, gpu_model, setting, gpus, nodes, local_batch, value)
);

-- The model fitted to a kind's points, as (sizes x settings); without rows where it could not be fitted. `by_batch`
-- = `{"batch", "step_s"}`: total batches, and (sizes x batches) step times at the default; null where none is
-- known.
CREATE TABLE setting_profiles (
    kind TEXT NOT NULL,
    gpu_model TEXT NOT NULL,
    setting TEXT NOT NULL,
    gpus JSONB NOT NULL,
    settings JSONB NOT NULL,
    speed JSONB NOT NULL,
    power_w JSONB NOT NULL,
    measured_gpus JSONB NOT NULL,
    points INTEGER NOT NULL,
    time_mape FLOAT,
    energy_mape FLOAT,
    detail TEXT DEFAULT '' NOT NULL,
    fitted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    by_batch JSONB,
    PRIMARY KEY (kind, gpu_model, setting)
);


-- schema: What the schema says of itself, to releases that are older than it. Migrations alone write here.
-- One row: the newest revision that the oldest release that may run on this schema has to know.
CREATE TABLE schema_compatibility (
    least_revision TEXT NOT NULL
);


-- telemetry: Tables of telemetry: nodes, what their ranks report, and the energy and carbon ledger.
-- How GPUs are to be cut, and how far their nodes are with it: `sizes` in sevenths, in the order of their places,
-- empty for a whole GPU. Only jobs of the fleet `owner` run on a GPU that has one. `services.db.gpu_partitions` writes
-- what is wanted.
CREATE TABLE gpu_partitions (
    node_id TEXT NOT NULL,
    gpu INTEGER NOT NULL,
    revision BIGINT NOT NULL,
    sizes JSONB NOT NULL,
    owner TEXT,
    state TEXT DEFAULT 'pending' NOT NULL,
    detail TEXT DEFAULT '' NOT NULL,
    wanted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    applied_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (node_id, gpu),
    CONSTRAINT gpu_partitions_state CHECK (state IN ('pending', 'busy', 'applied', 'failed'))
);
CREATE INDEX gpu_partitions_by_owner ON gpu_partitions (owner) WHERE owner IS NOT NULL;

-- A node of another `engine` has no agent: a bridge reports it, with the engine's `queues` that use it. One that
-- `measures_only` has an agent that runs nothing: nothing is placed there, and what it measures is of `engine_node`.
--
-- `checkpoints` says where its agent keeps those of jobs: `shared`, `store` or `local`; NULL: it did not say.
-- `lease_until` is written before the agent learns of its lease, so the agent's own deadline is never later. The
-- scheduler sets `state` to lost under the same row lock once the lease has certainly expired. `silent_at` is when a
-- lease last ran out before it was renewed. `most_gpu_w` and `most_host_w` are what its GPUs, and all else of it,
-- can draw; NULL: not known. `marked_intervals` counts those of which a line of the ledger has a `basis`.
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
    protections JSONB DEFAULT '[]' NOT NULL,
    readings JSONB DEFAULT '[]' NOT NULL,
    state TEXT DEFAULT 'up' NOT NULL,
    draining BOOLEAN DEFAULT false NOT NULL,
    closed TEXT,
    boot_id TEXT,
    registered_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    heartbeat_at TIMESTAMP WITH TIME ZONE,
    lease_until TIMESTAMP WITH TIME ZONE,
    engine TEXT DEFAULT 'wattshift' NOT NULL,
    queues TEXT[] DEFAULT '{}' NOT NULL,
    checkpoints TEXT,
    measures_only BOOLEAN DEFAULT false NOT NULL,
    engine_node TEXT,
    silent_at TIMESTAMP WITH TIME ZONE,
    most_gpu_w FLOAT,
    most_host_w FLOAT,
    marked_intervals BIGINT DEFAULT 0 NOT NULL,
    PRIMARY KEY (id)
);
CREATE INDEX nodes_by_engine_node ON nodes (engine_node) WHERE engine_node IS NOT NULL;

-- What each node proves itself with; the node made it, and only hashes are here. `enrolment` is what the key follows
-- from with which admission asks the node. `next_...` are accepted too, and take the place of the others when the
-- node first uses them. `role` is what it may register as; NULL: as either, of the release before. By
-- `certificate_sha256` admission knows the agent of a node that has joined; NULL: by an authority.
CREATE TABLE node_credentials (
    node_id TEXT NOT NULL,
    credential_sha256 BYTEA NOT NULL,
    redis_sha256 TEXT NOT NULL,
    enrolment BYTEA NOT NULL,
    next_credential_sha256 BYTEA,
    next_redis_sha256 TEXT,
    next_enrolment BYTEA,
    enrolled_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    rotated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    revoked_at TIMESTAMP WITH TIME ZONE,
    role TEXT,
    certificate_sha256 BYTEA,
    PRIMARY KEY (node_id)
);

-- What jobs report of themselves; `noise_scale` is their gradient noise scale, samples. `save_every_s` is how long the
-- last save of their work came after the one before, or after their start.
CREATE TABLE job_progress (
    job_id TEXT NOT NULL,
    done FLOAT NOT NULL,
    total FLOAT,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    noise_scale FLOAT,
    saved_at TIMESTAMP WITH TIME ZONE,
    save_every_s FLOAT,
    save_s FLOAT,
    PRIMARY KEY (job_id)
);
CREATE INDEX job_progress_with_noise ON job_progress (job_id) WHERE noise_scale IS NOT NULL;

-- Running sums of the ledger per job, kept in the transaction that writes the lines.
CREATE TABLE job_footprints (
    job_id TEXT NOT NULL,
    energy_j FLOAT NOT NULL,
    gpu_energy_j FLOAT NOT NULL,
    estimated_energy_j FLOAT NOT NULL,
    carbon_gco2 FLOAT NOT NULL,
    gpu_s FLOAT NOT NULL,
    PRIMARY KEY (job_id)
);

-- One-time tokens by which nodes enrol; `used_as` is the credential that one was given for, so that a node whose
-- answer was lost can ask again. `role` is as in `node_credentials`.
CREATE TABLE node_enrolments (
    token_sha256 BYTEA NOT NULL,
    node_id TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    used_as BYTEA,
    role TEXT,
    PRIMARY KEY (token_sha256)
);
CREATE INDEX node_enrolments_by_node ON node_enrolments (node_id);

-- GPUs that are out of service, or were: `cause` is what is the matter, null for nothing, and `drained` what an
-- operator wants. The fault after which an operator returned the GPU is `returned_fault_id`: it counts no more.
CREATE TABLE gpu_health (
    node_id TEXT NOT NULL,
    gpu INTEGER NOT NULL,
    uuid TEXT NOT NULL,
    drained BOOLEAN DEFAULT false NOT NULL,
    fault_id TEXT,
    cause TEXT,
    detail TEXT DEFAULT '' NOT NULL,
    since TIMESTAMP WITH TIME ZONE,
    ends_gangs BOOLEAN DEFAULT false NOT NULL,
    lasts BOOLEAN DEFAULT false NOT NULL,
    returned_fault_id TEXT,
    PRIMARY KEY (node_id, gpu),
    CONSTRAINT gpu_health_fault CHECK ((cause IS NULL) = (fault_id IS NULL))
);

-- The last report of each node on its share of a gang. `holds_checkpoint`: whether the job's folder has anything on
-- this node, which alone has it; NULL where others have it, too, and where that is not known. `listener`: who
-- listens on a server's port (`contracts.nodes.Listener`); NULL where no agent says so.
CREATE TABLE rank_statuses (
    allocation_id TEXT NOT NULL,
    node_id TEXT NOT NULL,
    state TEXT NOT NULL,
    exit_code INTEGER,
    ended_by TEXT,
    detail TEXT,
    started_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    settings JSONB,
    holds_checkpoint BOOLEAN,
    listener TEXT,
    PRIMARY KEY (allocation_id, node_id)
);

-- The controls of a gang's devices on a node, a line per change: what was requested and what was refused, the
-- limits that the devices reported when they were read back, and when the agent found them in force.
CREATE TABLE settings_in_force (
    allocation_id TEXT NOT NULL,
    node_id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    power_limit_w FLOAT,
    clock_mhz INTEGER,
    refused JSONB NOT NULL,
    enforced_w JSONB NOT NULL,
    since TIMESTAMP WITH TIME ZONE NOT NULL,
    PRIMARY KEY (allocation_id, node_id, revision)
);

-- The clocks that followed latency, a line per server and minute, as `contracts.nodes.ClockMinute` describes it.
CREATE TABLE server_clocks (
    job_id TEXT NOT NULL,
    start_at TIMESTAMP WITH TIME ZONE NOT NULL,
    node_id TEXT NOT NULL,
    policy TEXT NOT NULL,
    dry_run BOOLEAN NOT NULL,
    decisions INTEGER NOT NULL,
    exceeded INTEGER NOT NULL,
    mean_mhz FLOAT NOT NULL,
    lowest_mhz FLOAT NOT NULL,
    highest_mhz FLOAT NOT NULL,
    last_mhz FLOAT NOT NULL,
    model_error FLOAT,
    unused TEXT,
    unobserved INTEGER DEFAULT 0 NOT NULL,
    PRIMARY KEY (job_id, start_at, node_id)
);
CREATE INDEX server_clocks_by_time ON server_clocks (start_at);

-- A day of temperatures: of each node a row every ten minutes, with the degrees Celsius of its GPUs by their indices.
CREATE TABLE gpu_temperatures (
    at TIMESTAMP WITH TIME ZONE NOT NULL,
    node_id TEXT NOT NULL,
    celsius JSONB NOT NULL,
    PRIMARY KEY (at, node_id)
);

-- A job's work and energy at each gang size: the observations behind GREEN's efficiency.
-- Each gang counts from its first report of progress, at `since_at`, so that starting up and what a restart repeats
-- is left out; `generation` is the newest gang that counted.
CREATE TABLE job_profiles (
    job_id TEXT NOT NULL,
    gpus INTEGER NOT NULL,
    progress FLOAT NOT NULL,
    energy_j FLOAT NOT NULL,
    gpu_energy_j FLOAT NOT NULL,
    duration_s FLOAT NOT NULL,
    last_done FLOAT,
    generation INTEGER DEFAULT 0 NOT NULL,
    since_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (job_id, gpus)
);

-- The grid zones a node was in, for nodes that were ever moved: energy is priced by the zone in force at its time.
CREATE TABLE node_zones (
    node_id TEXT NOT NULL,
    since TIMESTAMP WITH TIME ZONE NOT NULL,
    zone TEXT NOT NULL,
    PRIMARY KEY (node_id, since)
);

-- Intervals of nodes; `reported_gpu_energy_j` is what was reported where the node's GPUs cannot have used it.
CREATE TABLE energy_intervals (
    node_id TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    sequence BIGINT NOT NULL,
    start_at TIMESTAMP WITH TIME ZONE NOT NULL,
    end_at TIMESTAMP WITH TIME ZONE NOT NULL,
    metered_gpu_energy_j FLOAT NOT NULL,
    reported_gpu_energy_j FLOAT,
    PRIMARY KEY (node_id, boot_id, sequence)
);
CREATE INDEX energy_intervals_by_time ON energy_intervals (end_at);

-- The ledger: one line per node, interval and owner (`owner` is an allocation id, or empty for idle), with the
-- intensity used: the mean over the interval, weighted by time. `source` says how the GPU energy was determined,
-- `cpu_source` how the CPU energy was; the static share is always configured. `basis` says why a line is not booked
-- as it was reported (`contracts.nodes.Basis`), `reported_energy_j` what was reported of it where that differs.
-- `devices` are the GPUs by their index on the node. `provider` gave the intensity, `fetched_at` is when the newest
-- value of it was fetched, `intensity_kind` the least certain kind of value in it, and `release` that of the
-- method; NULL in lines from before these were kept. `batch` is that of the statement which added the line; 0:
-- before there were batches. Triggers refuse every change and hash each batch (docs/ledger.md).
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
    cpu_source TEXT DEFAULT 'modelled' NOT NULL,
    zone TEXT NOT NULL,
    signal TEXT NOT NULL,
    intensity_gco2_per_kwh FLOAT NOT NULL,
    intensity_estimated BOOLEAN NOT NULL,
    pue FLOAT NOT NULL,
    carbon_gco2 FLOAT NOT NULL,
    basis TEXT,
    reported_energy_j FLOAT,
    devices INTEGER[] DEFAULT '{}' NOT NULL,
    provider TEXT,
    intensity_kind TEXT,
    fetched_at TIMESTAMP WITH TIME ZONE,
    release TEXT,
    batch BIGINT DEFAULT 0 NOT NULL,
    PRIMARY KEY (node_id, boot_id, sequence, owner)
);
CREATE INDEX energy_usages_by_batch ON energy_usages USING brin (batch);
CREATE INDEX energy_usages_by_job ON energy_usages (job_id, start_at);
CREATE INDEX energy_usages_by_time ON energy_usages (start_at);

-- The newest batch of each lane. A transaction that adds lines takes a lane which no other has.
CREATE TABLE ledger_lanes (
    lane INTEGER NOT NULL,
    number BIGINT NOT NULL,
    hash BYTEA NOT NULL,
    PRIMARY KEY (lane)
);

-- What was added together: the number of its lines, when the first and the last of them begin, and the SHA-256 of
-- their columns of `version`. The running hash of a lane follows from these rows; its newest value is in
-- `ledger_lanes`.
CREATE TABLE ledger_batches (
    id BIGINT NOT NULL,
    lane INTEGER NOT NULL,
    number BIGINT NOT NULL,
    version INTEGER NOT NULL,
    at TIMESTAMP WITH TIME ZONE NOT NULL,
    lines INTEGER NOT NULL,
    first_at TIMESTAMP WITH TIME ZONE NOT NULL,
    last_at TIMESTAMP WITH TIME ZONE NOT NULL,
    digest BYTEA NOT NULL,
    PRIMARY KEY (id),
    CONSTRAINT ledger_batches_of_a_lane UNIQUE (lane, number)
);

-- The Ed25519 keys of the installation, of which the newest that opens signs.
CREATE TABLE ledger_keys (
    public_key BYTEA NOT NULL,
    sealed BYTEA NOT NULL,
    made_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (public_key)
);

-- The statement of each day: `text` names the heads of all lanes and the statement before, and is what is signed.
CREATE TABLE ledger_days (
    number BIGINT NOT NULL,
    day DATE NOT NULL,
    text TEXT NOT NULL,
    hash BYTEA NOT NULL,
    public_key BYTEA,
    signature BYTEA,
    first_at TIMESTAMP WITH TIME ZONE,
    last_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (number),
    UNIQUE (day)
);

-- Which batches of a lane a day has: those after `after_number` up to `number`.
CREATE TABLE ledger_heads (
    day_number BIGINT NOT NULL,
    lane INTEGER NOT NULL,
    after_number BIGINT NOT NULL,
    number BIGINT NOT NULL,
    PRIMARY KEY (day_number, lane)
);

-- Sums in `energy_days` that replaced the lines of a day, whose hash their `text` names, or correct such ones.
CREATE TABLE ledger_sums (
    number BIGINT NOT NULL,
    day_number BIGINT,
    text TEXT NOT NULL,
    hash BYTEA NOT NULL,
    public_key BYTEA,
    signature BYTEA,
    PRIMARY KEY (number),
    UNIQUE (day_number)
);

-- Ledger lines past their retention, summed by UTC day; the mean intensity follows from carbon and energy. Those of
-- one `sum_number` are signed together; 0: before there were batches.
CREATE TABLE energy_days (
    day TIMESTAMP WITH TIME ZONE NOT NULL,
    node_id TEXT NOT NULL,
    owner TEXT NOT NULL,
    zone TEXT NOT NULL,
    signal TEXT NOT NULL,
    pue FLOAT NOT NULL,
    job_id TEXT,
    start_at TIMESTAMP WITH TIME ZONE NOT NULL,
    end_at TIMESTAMP WITH TIME ZONE NOT NULL,
    energy_j FLOAT NOT NULL,
    gpu_energy_j FLOAT NOT NULL,
    estimated_energy_j FLOAT NOT NULL,
    carbon_gco2 FLOAT NOT NULL,
    gpu_s FLOAT NOT NULL,
    estimated BOOLEAN NOT NULL,
    sum_number BIGINT DEFAULT 0 NOT NULL,
    PRIMARY KEY (day, node_id, owner, zone, signal, pue, sum_number)
);
CREATE INDEX energy_days_by_job ON energy_days (job_id, start_at);

-- The lines of `energy_usages` and `energy_days` that begin in an hour, summed exactly, in decimals: triggers keep
-- it in the transaction that changes a line. `job_id` is empty for idle. `guessed_gco2` was priced by an intensity
-- that was estimated or forecast. `length_s` and `intensity_s`, the intensity times the length, count each interval
-- of a node once, daily sums not at all.
CREATE TABLE energy_hours (
    hour TIMESTAMP WITH TIME ZONE NOT NULL,
    node_id TEXT NOT NULL,
    job_id TEXT NOT NULL,
    zone TEXT NOT NULL,
    signal TEXT NOT NULL,
    lines BIGINT NOT NULL,
    energy_j NUMERIC NOT NULL,
    gpu_energy_j NUMERIC NOT NULL,
    estimated_energy_j NUMERIC NOT NULL,
    carbon_gco2 NUMERIC NOT NULL,
    gpu_s NUMERIC NOT NULL,
    facility_energy_j NUMERIC NOT NULL,
    estimated_gco2 NUMERIC NOT NULL,
    guessed_gco2 NUMERIC NOT NULL,
    length_s NUMERIC NOT NULL,
    intensity_s NUMERIC NOT NULL,
    PRIMARY KEY (hour, node_id, job_id, zone, signal)
);

-- The devices' own counters over the same days.
CREATE TABLE metered_days (
    day TIMESTAMP WITH TIME ZONE NOT NULL,
    node_id TEXT NOT NULL,
    metered_gpu_energy_j FLOAT NOT NULL,
    PRIMARY KEY (day, node_id)
);

-- Up to where a node's intervals were combined, so that they are recognised if sent again although their rows are
-- deleted.
CREATE TABLE folded_intervals (
    node_id TEXT NOT NULL,
    boot_id TEXT NOT NULL,
    through_sequence BIGINT NOT NULL,
    PRIMARY KEY (node_id, boot_id)
);

-- Requests as one router process saw them in a minute; of whole days with an empty router, once lines are old.
-- `share_s` divides the lines of the server's job; `energy_j` and `carbon_gco2` are the router's own estimates,
-- which count only for servers that the ledger has no lines of.
CREATE TABLE request_usages (
    router TEXT NOT NULL,
    start_at TIMESTAMP WITH TIME ZONE NOT NULL,
    job_id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    model TEXT NOT NULL,
    request_class TEXT NOT NULL,
    requests BIGINT NOT NULL,
    input_tokens BIGINT NOT NULL,
    output_tokens BIGINT NOT NULL,
    estimated_requests BIGINT DEFAULT '0' NOT NULL,
    share_s FLOAT NOT NULL,
    energy_j FLOAT NOT NULL,
    carbon_gco2 FLOAT NOT NULL,
    PRIMARY KEY (router, start_at, job_id, tenant_id, key_id, model, request_class)
);
CREATE INDEX request_usages_by_time ON request_usages (start_at);
CREATE INDEX request_usages_by_key ON request_usages (key_id, start_at);

-- serving: files of batches, in chunks, so that every serving process and every backup has them. One that is not
-- complete is being uploaded, or its upload broke off.
CREATE TABLE batch_files (
    id TEXT PRIMARY KEY,
    tenant_id TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    size_bytes BIGINT DEFAULT '0' NOT NULL,
    is_complete BOOLEAN DEFAULT false NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL
);
CREATE INDEX batch_files_by_tenant ON batch_files (tenant_id, id);
CREATE INDEX batch_files_by_expiry ON batch_files (expires_at);
CREATE TABLE batch_file_chunks (
    file_id TEXT NOT NULL REFERENCES batch_files ON DELETE CASCADE,
    number INTEGER NOT NULL,
    data BYTEA NOT NULL,
    PRIMARY KEY (file_id, number)
);

-- serving: batches of requests to models. `moments` has when each status began, Unix seconds, by OpenAI's names
-- (`in_progress_at`); `caller` is the identity that the lines are sent for; `arrival_gco2_per_kwh` the intensity when
-- the batch came, against which it saves. `repeated` counts lines sent again because a crash left open how they ended.
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
    arrival_gco2_per_kwh FLOAT,
    input_bytes BIGINT DEFAULT 0 NOT NULL
);
CREATE INDEX batches_by_tenant ON batches (tenant_id, id);
CREATE INDEX batches_open ON batches (expires_at) WHERE ended_at IS NULL;
CREATE INDEX batches_by_end ON batches (ended_at);

-- serving: lines of batches that have not ended: `waiting`, `sent`, `succeeded` or `failed`. Only the attempt under way
-- can write a line's result.
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
);
CREATE INDEX batch_lines_open ON batch_lines (batch_id, model, state) WHERE result IS NULL;


-- serving: Tables of serving: pools, their traffic, plans and instances, and external model servers.
-- `plan_id` is the plan in force. A process that applies a plan, or creates or drains instances, holds the pool's row
-- lock. A deleted pool stays until its last instance has ended.
CREATE TABLE pools (
    name TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    spec JSONB NOT NULL,
    revision INTEGER DEFAULT 1 NOT NULL,
    deleted_at TIMESTAMP WITH TIME ZONE,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    plan_id TEXT,
    planned_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (name)
);

-- Requests in 5 seconds as one source saw them: `{PoolPartition.counted_as: {class: count}}`, classes without any left
-- out. The name of a partition makes no difference; other thresholds have counts of their own.
CREATE TABLE pool_traffic (
    pool TEXT NOT NULL,
    start_at TIMESTAMP WITH TIME ZONE NOT NULL,
    source TEXT NOT NULL,
    counts JSONB NOT NULL,
    PRIMARY KEY (pool, start_at, source)
);

-- `slot_at` is the half hour of the clock that the plan is for, `from_at` when its first step begins; `outcome` is
-- what was done with the answer.
CREATE TABLE pool_plans (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    state TEXT NOT NULL,
    problem JSONB NOT NULL,
    problem_sha256 BYTEA NOT NULL,
    result JSONB,
    failure JSONB,
    attempts INTEGER DEFAULT 0 NOT NULL,
    claim TEXT,
    lease_until TIMESTAMP WITH TIME ZONE,
    submitted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    enqueued_at TIMESTAMP WITH TIME ZONE,
    started_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    plan_s FLOAT,
    pool TEXT NOT NULL,
    revision INTEGER NOT NULL,
    trigger TEXT NOT NULL,
    slot_at TIMESTAMP WITH TIME ZONE NOT NULL,
    from_at TIMESTAMP WITH TIME ZONE NOT NULL,
    deadline_at TIMESTAMP WITH TIME ZONE NOT NULL,
    outcome TEXT,
    decided_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (id),
    CONSTRAINT pool_plans_state CHECK (state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled'))
);
CREATE INDEX pool_plans_by_pool ON pool_plans (pool, id);
CREATE UNIQUE INDEX pool_plans_one_per_problem ON pool_plans (pool, problem_sha256) WHERE state IN ('queued', 'running', 'succeeded');
CREATE INDEX pool_plans_undecided ON pool_plans (pool) WHERE outcome IS NULL;

-- `terms` are the specs that the instance was made from: `{"mode": ServerMode, "place": PoolPlace, "probes":
-- ServerProbes}`. `id` is also the idempotency key of its job's submission, so that no instance ever has two jobs.
-- `sealed_key` is opened for its node and the routers alone. `pod` is an `InstancePod`, of one in a Kubernetes cluster,
-- which has no job.
CREATE TABLE pool_instances (
    id TEXT NOT NULL,
    pool TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    plan_id TEXT,
    place TEXT NOT NULL,
    mode TEXT NOT NULL,
    partition TEXT,
    request_class TEXT,
    terms JSONB NOT NULL,
    state TEXT NOT NULL,
    job_id TEXT,
    url TEXT,
    reason TEXT,
    detail TEXT,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    ready_at TIMESTAMP WITH TIME ZONE,
    silent_since TIMESTAMP WITH TIME ZONE,
    draining_at TIMESTAMP WITH TIME ZONE,
    stopping_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    listener TEXT,
    sealed_key BYTEA,
    checks_key BOOLEAN,
    pod JSONB,
    PRIMARY KEY (id),
    CONSTRAINT pool_instances_state CHECK (state IN ('wanted', 'starting', 'ready', 'draining', 'stopping', 'ended'))
);
CREATE INDEX pool_instances_by_pool ON pool_instances (pool, id);
CREATE INDEX pool_instances_live ON pool_instances (pool) WHERE state <> 'ended';

-- `spec` is an `EndpointSpec`. It contains no key, only the name of the file that does.
CREATE TABLE model_endpoints (
    name TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    spec JSONB NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (name)
);


-- serving: Tables of serving: fleets of GPUs, the applications on them, their plans, and what routers measured of requests.
-- `assignment` is what each GPU runs: `[[node, gpu, [[app, variant, slice], ...]], ...]`. Whoever plans a fleet or
-- changes its GPUs holds its row lock. Its GPUs are the rows of `gpu_partitions` that it owns.
CREATE TABLE fleets (
    name TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    spec JSONB NOT NULL,
    revision INTEGER DEFAULT 1 NOT NULL,
    deleted_at TIMESTAMP WITH TIME ZONE,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    assignment JSONB DEFAULT '[]' NOT NULL,
    only_proposes TEXT,
    failures INTEGER DEFAULT 0 NOT NULL,
    retry_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (name)
);

-- `target` is what the controller makes true: how many instances of each variant on each slice, `[[variant, slice,
-- count], ...]`, and which instances leave first. Instances are rows of `pool_instances` whose `pool` is `app:` and
-- the name. `planned_revision` is the revision that the plan in force was made for.
CREATE TABLE apps (
    name TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    spec JSONB NOT NULL,
    revision INTEGER DEFAULT 1 NOT NULL,
    deleted_at TIMESTAMP WITH TIME ZONE,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    fleet TEXT NOT NULL,
    planned_revision INTEGER DEFAULT 0 NOT NULL,
    plan_id TEXT,
    target JSONB DEFAULT '{"wanted": [], "leave": []}' NOT NULL,
    PRIMARY KEY (name)
);
CREATE INDEX apps_by_fleet ON apps (fleet);

-- `basis` is what the plan was made from: revisions and GPUs. `problem` is a `PartitionRequest`, and the plan's id the
-- idempotency key of its solve; a plan without one is BASE. `progress` is how far carrying it out is. `search` is a
-- `FleetSearch`: what was measured of configurations, and which one is brought up or measured now.
CREATE TABLE fleet_plans (
    id TEXT NOT NULL,
    fleet TEXT NOT NULL,
    trigger TEXT NOT NULL,
    state TEXT NOT NULL,
    detail TEXT,
    gco2_per_kwh DOUBLE PRECISION NOT NULL,
    basis JSONB NOT NULL,
    problem JSONB,
    result JSONB,
    progress JSONB,
    made_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    ended_at TIMESTAMP WITH TIME ZONE,
    search JSONB,
    PRIMARY KEY (id),
    CONSTRAINT fleet_plans_state CHECK (state IN ('solving', 'proposed', 'carrying_out', 'applied', 'failed', 'superseded', 'measuring'))
);
CREATE INDEX fleet_plans_by_fleet ON fleet_plans (fleet, id);
CREATE UNIQUE INDEX fleet_plans_one_at_a_time ON fleet_plans (fleet) WHERE state IN ('solving', 'measuring', 'carrying_out');

-- Requests in 5 seconds as one router process saw them. `latency`: answers by the index of their bucket of
-- `LATENCY_BOUNDS_MS`; `variants`: answers by variant; `accuracy_sum`: of the accuracies of the answers; `waiting`:
-- requests in the queue when it was reported.
CREATE TABLE app_observations (
    app TEXT NOT NULL,
    start_at TIMESTAMP WITH TIME ZONE NOT NULL,
    router TEXT NOT NULL,
    arrivals INTEGER NOT NULL,
    answered INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    latency JSONB NOT NULL,
    variants JSONB NOT NULL,
    servers JSONB NOT NULL,
    accuracy_sum DOUBLE PRECISION NOT NULL,
    waiting INTEGER DEFAULT 0 NOT NULL,
    PRIMARY KEY (app, start_at, router)
);
CREATE INDEX app_observations_by_time ON app_observations (start_at);


-- carbon: Tables of the carbon service: measured intensities, forecasts, and the state of a replay, prices.
-- One measured interval each. A provider's values are kept under its name: two providers' methods are not comparable,
-- so that a zone which changes its provider starts a new history.
CREATE TABLE carbon_points (
    zone TEXT NOT NULL,
    signal TEXT NOT NULL,
    provider TEXT NOT NULL,
    start_at TIMESTAMP WITH TIME ZONE NOT NULL,
    end_at TIMESTAMP WITH TIME ZONE NOT NULL,
    gco2_per_kwh FLOAT NOT NULL,
    is_estimated BOOLEAN NOT NULL,
    fetched_at TIMESTAMP WITH TIME ZONE NOT NULL,
    PRIMARY KEY (zone, signal, provider, start_at)
);

-- Every forecast as issued, `points` = `[[start, end, gCO2/kWh]]` in UTC seconds: what was known when.
CREATE TABLE carbon_forecasts (
    zone TEXT NOT NULL,
    signal TEXT NOT NULL,
    provider TEXT NOT NULL,
    generated_at TIMESTAMP WITH TIME ZONE NOT NULL,
    fetched_at TIMESTAMP WITH TIME ZONE NOT NULL,
    points JSONB NOT NULL,
    PRIMARY KEY (zone, signal, provider, generated_at)
);

-- The forecast learned from a provider's history, `points` = `[[start, end, gCO2/kWh, p10, p90]]` in UTC seconds; none
-- if persistence is used, because of the backtest or for lack of history.
CREATE TABLE carbon_learned_forecasts (
    zone TEXT NOT NULL,
    signal TEXT NOT NULL,
    provider TEXT NOT NULL,
    generated_at TIMESTAMP WITH TIME ZONE NOT NULL,
    method TEXT NOT NULL,
    note TEXT NOT NULL,
    points JSONB NOT NULL,
    backtest JSONB,
    PRIMARY KEY (zone, signal, provider, generated_at)
);

-- What wind and sun were expected to generate in an hour the day before, MW by source.
CREATE TABLE carbon_expected (
    zone TEXT NOT NULL,
    provider TEXT NOT NULL,
    start_at TIMESTAMP WITH TIME ZONE NOT NULL,
    power_mw JSONB NOT NULL,
    fetched_at TIMESTAMP WITH TIME ZONE NOT NULL,
    PRIMARY KEY (zone, provider, start_at)
);

-- The state of a replay of recordings: at `real_at` the grid's clock showed `grid_at` and ran at `speed`.
CREATE TABLE carbon_replays (
    name TEXT NOT NULL,
    real_at TIMESTAMP WITH TIME ZONE NOT NULL,
    grid_at TIMESTAMP WITH TIME ZONE NOT NULL,
    speed FLOAT NOT NULL,
    requested_start_at TIMESTAMP WITH TIME ZONE,
    PRIMARY KEY (name)
);

-- What electricity costs in one hour of UTC, and the demand charge in force then. Hours that have ended stay as they
-- are, whatever the tariff becomes.
CREATE TABLE carbon_prices (
    start_at TIMESTAMP WITH TIME ZONE NOT NULL,
    zone TEXT NOT NULL,
    currency TEXT NOT NULL,
    per_kwh NUMERIC NOT NULL,
    demand_per_kw_month NUMERIC NOT NULL,
    fetched_at TIMESTAMP WITH TIME ZONE NOT NULL,
    PRIMARY KEY (start_at, zone)
);


-- optimizer: Tables of the optimizer: solves, and their idempotency keys.
-- Problems, and their answers once a worker has solved them.
CREATE TABLE solves (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    state TEXT NOT NULL,
    problem JSONB NOT NULL,
    problem_sha256 BYTEA NOT NULL,
    result JSONB,
    failure JSONB,
    attempts INTEGER DEFAULT 0 NOT NULL,
    claim TEXT,
    lease_until TIMESTAMP WITH TIME ZONE,
    submitted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    enqueued_at TIMESTAMP WITH TIME ZONE,
    started_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    solve_s FLOAT,
    kind TEXT NOT NULL,
    progress JSONB,
    PRIMARY KEY (id),
    CONSTRAINT solves_state CHECK (state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled'))
);
CREATE INDEX solves_by_tenant ON solves (tenant_id, id);
CREATE INDEX solves_live ON solves (state) WHERE state IN ('queued', 'running');
CREATE UNIQUE INDEX solves_one_per_problem ON solves (tenant_id, kind, problem_sha256) WHERE state IN ('queued', 'running', 'succeeded');

-- The solve that an idempotency key refers to; deleted together with it.
CREATE TABLE solve_submissions (
    tenant_id TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    body_sha256 BYTEA NOT NULL,
    solve_id TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (tenant_id, idempotency_key),
    FOREIGN KEY(solve_id) REFERENCES solves (id) ON DELETE CASCADE
);
CREATE INDEX solve_submissions_by_solve ON solve_submissions (solve_id);


-- simulator: Tables of the simulator: what-if runs, their idempotency keys, and the files they read.
-- What-if runs, and their progress.
CREATE TABLE simulations (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    key_id TEXT NOT NULL,
    state TEXT NOT NULL,
    problem JSONB NOT NULL,
    problem_sha256 BYTEA NOT NULL,
    result JSONB,
    failure JSONB,
    attempts INTEGER DEFAULT 0 NOT NULL,
    claim TEXT,
    lease_until TIMESTAMP WITH TIME ZONE,
    submitted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    enqueued_at TIMESTAMP WITH TIME ZONE,
    started_at TIMESTAMP WITH TIME ZONE,
    ended_at TIMESTAMP WITH TIME ZONE,
    run_s FLOAT,
    inputs TEXT[] NOT NULL,
    done INTEGER DEFAULT 0 NOT NULL,
    total INTEGER NOT NULL,
    PRIMARY KEY (id),
    CONSTRAINT simulations_state CHECK (state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled'))
);
CREATE INDEX simulations_by_input ON simulations USING gin (inputs);
CREATE INDEX simulations_by_tenant ON simulations (tenant_id, id);
CREATE INDEX simulations_live ON simulations (state) WHERE state IN ('queued', 'running');
CREATE UNIQUE INDEX simulations_one_per_problem ON simulations (tenant_id, problem_sha256) WHERE state IN ('queued', 'running', 'succeeded');

-- The simulation that an idempotency key refers to; deleted together with it.
CREATE TABLE simulation_submissions (
    tenant_id TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    body_sha256 BYTEA NOT NULL,
    simulation_id TEXT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (tenant_id, idempotency_key),
    FOREIGN KEY(simulation_id) REFERENCES simulations (id) ON DELETE CASCADE
);
CREATE INDEX simulation_submissions_by_simulation ON simulation_submissions (simulation_id);

-- Files by their content, compressed with gzip; kept while a simulation names them in `inputs`.
CREATE TABLE simulation_inputs (
    sha256 TEXT NOT NULL,
    content BYTEA NOT NULL,
    stored_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    PRIMARY KEY (sha256)
);

-- What levers saved on a day, UTC: `figures` as `services.contracts.savings.DaySavings`. `simulation_id` is the
-- replay, which is kept with its inputs; NULL where nothing was replayed.
CREATE TABLE savings (
    day DATE NOT NULL,
    simulation_id TEXT,
    figures JSONB NOT NULL,
    PRIMARY KEY (day)
);
