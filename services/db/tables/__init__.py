"""The tables and views that SQLAlchemy's expressions name: their columns, by type.

``described.sql`` and ``views.sql``, beside this module, say what they hold and which constraints they have.
"""

from typing import Any

from sqlalchemy import TableClause, column, table, types
from sqlalchemy.dialects.postgresql import JSONB

_TYPES: dict[str, types.TypeEngine[Any]] = {
    **{"text": types.Text(), "texts": types.ARRAY(types.Text), "json": JSONB(), "data": types.LargeBinary()},
    **{"at": types.DateTime(timezone=True), "day": types.Date(), "flags": types.Boolean()},
    **{"whole": types.Integer(), "large": types.BigInteger(), "real": types.Double(), "exact": types.Numeric()},
}


def _table(name: str, **columns: str) -> TableClause:
    """Return a table or view with columns of these types, several of one type with a space between them."""
    return table(name, *(column(each, _TYPES[kind]) for kind, names in columns.items() for each in names.split()))


def _work(
    name: str, took: str, *, text: str = "", json: str = "", whole: str = "", at: str = "", **own: str
) -> TableClause:
    """Return a table of work that workers claim (``services.db.background``); ``took``: how long it took, seconds."""
    return _table(
        name,
        text=f"id tenant_id key_id state claim {text}",
        json=f"problem result failure {json}",
        data="problem_sha256",
        whole=f"attempts {whole}",
        at=f"submitted_at enqueued_at started_at ended_at lease_until {at}",
        real=took,
        **own,
    )


# admission
tenants = _table("tenants", text="id", json="limits", at="created_at", large="accepted_jobs last_number")
users = _table("users", text="id tenant_id name account", at="created_at disabled_at")
api_keys = _table(
    "api_keys",
    text="id tenant_id role label user_id project",
    data="key_sha256",
    at="created_at revoked_at expires_at last_used_at",
    json="limits used",
    texts="replaced",
)
jobs = _table(
    "jobs",
    text="id tenant_id name project state reason detail array_id user_id engine external_id cell",
    json="labels spec",
    flags="cancel_requested hold_requested gated",
    at="expected_start_at submitted_at queued_at started_at ended_at not_before",
    whole="generation preemptions restarts exit_code array_index node_losses",
    real="attained_gpu_s",
    texts="bound_to",
    large="number",
)
budgets = _table(
    "budgets", text="id tenant_id project quantity action month detail", real="amount used", flags="exceeded"
)
cell_jobs = _table(
    "cell_jobs",
    text="job_id cell state body remote_id zone signal",
    whole="attempt moves",
    at="doubt_until",
    json="seen",
    real="pue",
)
cell_energy = _table(
    "cell_energy",
    text="job_id cell zone signal",
    whole="attempt",
    at="hour",
    real="pue energy_j gpu_energy_j estimated_energy_j carbon_gco2 gpu_s",
)
webhooks = _table(
    "webhooks",
    text="id tenant_id url project disabled_reason",
    texts="events",
    whole="secret_revision failures",
    data="secret_sha256",
    at="previous_secret_until created_at enabled_at disabled_at failing_since paused_until",
)
webhook_events = _table("webhook_events", large="id", text="type tenant_id project", at="at", json="data")
webhook_deliveries = _table(
    "webhook_deliveries",
    text="id webhook_id type body state error",
    at="created_at attempted_at next_attempt_at ended_at",
    whole="attempts status",
)
secrets = _table("secrets", text="tenant_id project name", whole="version", data="sealed", at="created_at updated_at")
uploads = _table("uploads", text="tenant_id sha256", large="size_bytes", flags="is_complete", at="created_at used_at")
upload_chunks = _table("upload_chunks", text="tenant_id sha256", whole="number", data="data")
job_events = _table("job_events", large="sequence transaction_id", text="job_id tenant_id type", at="at", json="data")
audit_log = _table("audit_log", large="sequence", at="at", text="tenant_id key_id action target", json="data")

# serving
pools = _table(
    "pools",
    text="name tenant_id key_id plan_id",
    json="spec",
    whole="revision",
    at="deleted_at created_at updated_at planned_at",
)
pool_traffic = _table("pool_traffic", text="pool source", at="start_at", json="counts")
pool_plans = _work(
    "pool_plans", "plan_s", text="pool trigger outcome", whole="revision", at="slot_at from_at deadline_at decided_at"
)
pool_instances = _table(
    "pool_instances",
    text="id pool tenant_id plan_id place mode partition request_class state job_id url reason detail listener",
    json="terms pod",
    at="created_at ready_at silent_since draining_at stopping_at ended_at",
    data="sealed_key",
    flags="checks_key",
)
model_endpoints = _table("model_endpoints", text="name tenant_id key_id", json="spec", at="created_at updated_at")
fleets = _table(
    "fleets",
    text="name tenant_id key_id only_proposes",
    json="spec assignment",
    whole="revision failures",
    at="deleted_at created_at updated_at retry_at",
)
apps = _table(
    "apps",
    text="name tenant_id key_id fleet plan_id",
    json="spec target",
    whole="revision planned_revision",
    at="deleted_at created_at updated_at",
)
fleet_plans = _table(
    "fleet_plans",
    text="id fleet trigger state detail",
    real="gco2_per_kwh",
    json="basis problem result progress search",
    at="made_at ended_at",
)
app_observations = _table(
    "app_observations",
    text="app router",
    at="start_at",
    whole="arrivals answered failed waiting",
    json="latency variants servers",
    real="accuracy_sum",
)

# carbon
carbon_points = _table(
    "carbon_points",
    text="zone signal provider",
    at="start_at end_at fetched_at",
    real="gco2_per_kwh",
    flags="is_estimated",
)
carbon_forecasts = _table("carbon_forecasts", text="zone signal provider", at="generated_at fetched_at", json="points")
carbon_learned_forecasts = _table(
    "carbon_learned_forecasts", text="zone signal provider method note", at="generated_at", json="points backtest"
)
carbon_expected = _table("carbon_expected", text="zone provider", at="start_at fetched_at", json="power_mw")
carbon_replays = _table("carbon_replays", text="name", at="real_at grid_at requested_start_at", real="speed")
carbon_prices = _table(
    "carbon_prices", at="start_at fetched_at", text="zone currency", exact="per_kwh demand_per_kw_month"
)

# optimizer
solves = _work("solves", "solve_s", text="kind", json="progress")
solve_submissions = _table(
    "solve_submissions", text="tenant_id idempotency_key solve_id", data="body_sha256", at="created_at"
)
length_trainings = _work("length_trainings", "train_s")

# simulator
simulations = _work("simulations", "run_s", whole="done total", texts="inputs")
simulation_submissions = _table(
    "simulation_submissions", text="tenant_id idempotency_key simulation_id", data="body_sha256", at="created_at"
)
simulation_inputs = _table("simulation_inputs", text="sha256", data="content", at="stored_at")
savings = _table("savings", day="day", text="simulation_id", json="figures")

# telemetry
gpu_partitions = _table(
    "gpu_partitions",
    text="node_id owner state detail",
    whole="gpu",
    large="revision",
    json="sizes",
    at="wanted_at applied_at",
)

# views
node_agents = _table("node_agents", text="id state agent_url", data="enrolment certificate_sha256")
reported_work = _table("reported_work", text="job_id", real="done total save_every_s save_s", at="updated_at saved_at")
footprints = _table("footprints", text="job_id", real="energy_j gpu_energy_j estimated_energy_j carbon_gco2 gpu_s")
gangs = _table("gangs", text="id job_id", whole="generation", json="shares")
live_gangs = _table(
    "live_gangs",
    text="id job_id",
    whole="gpus clock_mhz batch_size",
    real="power_limit_w",
    at="running_at stop_requested_at",
    json="shares",
)
