"""Settings of serving, shared by its service and its workers."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.contracts.schema import said
from services.kit.background.settings import WorkSettings
from services.kit.settings import SealingSettings


class ServingSettings(WorkSettings, SealingSettings):
    """``SERVING_*``, and what all processes share."""

    model_config = SettingsConfigDict(env_prefix="SERVING_")

    host: str = "127.0.0.1"
    port: int = Field(default=8090, ge=0, le=65_535)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    carbon_timeout_s: float = Field(default=10, gt=0)
    keep_days: float = said("How long ended plans and instances are kept.", default=30, gt=0)

    traffic_keep_days: float = said("How long reported traffic is kept.", default=16, gt=0)
    traffic_sweep_s: float = said("How often what is past its retention is deleted.", default=600, gt=0)
    traffic_max_age_s: float = said(
        "How long all reporters may be silent before their reports no longer predict demand.", default=600, gt=0
    )

    plan_interval_s: float = said("How often each pool is planned, by the clock.", default=1_800, gt=0)
    plan_lead_s: float = said(
        "How long before each half hour planning begins, for solving and starting instances.", default=120, ge=0
    )
    plan_late_s: float = said(
        "How long after the beginning of its half hour a plan's answer is late.", default=300, gt=0
    )
    plan_look_s: float = said(
        "How often the planner checks for pools that are due and for answered plans.", default=2, gt=0
    )
    plan_retry_s: float = said("How long after a failed plan the next is tried, until it is late.", default=30, gt=0)

    plan_settle_s: float = said(
        "How long an event lasts before a pool is planned because of it; lost GPUs count at once.", default=5, ge=0
    )
    plan_event_gap_s: float = said(
        "Minimum time between two plans of a pool because of events; a sixth of it after lost GPUs.", default=60, ge=0
    )

    plan_workers: int = said("Plans made at once, each in a process of its own.", default=1, ge=1)

    fleet_cut_s: float = said(
        "How long a node may take to cut a GPU on which nothing runs any more.", default=120, gt=0
    )
    fleet_wait_s: float = said(
        "How long a fleet's plan waits until a GPU can be spared within the SLA.", default=120, gt=0
    )
    fleet_retry_s: float = said(
        "How long after a failed plan of a fleet the next is made; doubled up to an hour.", default=30, gt=0
    )
    fleet_solve_s: float = said("How long the search for a fleet's plan may take.", default=300, gt=0)

    instance_look_s: float = said("How often the controller checks the instances of pools.", default=1, gt=0)
    instance_probe_s: float = said("How often an instance that is ready is probed.", default=5, gt=0)
    instance_probe_timeout_s: float = said("How long a probe waits for its answer.", default=2, gt=0)
    instance_probes_at_once: int = said("Probes under way at once.", default=200, ge=1)

    batch_keep_days: float = said(
        "How long files of batches are kept, unless a request says otherwise, and batches after their end.",
        default=30,
        gt=0,
        le=3_650,
    )
    batch_file_bytes: int = said("Size of a file of requests.", default=200 * 1024 * 1024, ge=1_024)
    batch_lines: int = said("Requests of a batch.", default=50_000, ge=1)
    batch_quota_bytes: int = said(
        "Size of all files of a tenant, those that batches wrote included, and of its open batches.",
        default=20 * 1024**3,
        ge=1_024,
    )

    routing_power_s: float = said("Over how long an instance's power is averaged for the router.", default=120, gt=0)
