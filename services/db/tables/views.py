"""The views of ``views.sql`` that SQLAlchemy's expressions name."""

from sqlalchemy import column, table
from sqlalchemy.dialects.postgresql import JSONB

node_agents = table("node_agents", *map(column, ("id", "state", "agent_url", "enrolment", "certificate_sha256")))

reported_work = table("reported_work", *map(column, ("job_id", "done", "total", "updated_at")))

footprints = table(
    "footprints", *map(column, ("job_id", "energy_j", "gpu_energy_j", "estimated_energy_j", "carbon_gco2", "gpu_s"))
)

gangs = table("gangs", *map(column, ("id", "job_id", "generation")), column("shares", JSONB))

_OF_LIVE = ("id", "job_id", "gpus", "power_limit_w", "clock_mhz", "batch_size", "running_at", "stop_requested_at")
live_gangs = table("live_gangs", *map(column, _OF_LIVE), column("shares", JSONB))
