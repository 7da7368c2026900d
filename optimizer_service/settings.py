"""Settings of the optimizer, shared by its service and its workers."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.kit.background.settings import WorkSettings


class OptimizerSettings(WorkSettings):
    """``OPTIMIZER_*``, and what all processes share."""

    model_config = SettingsConfigDict(env_prefix="OPTIMIZER_")

    host: str = "127.0.0.1"
    port: int = 8040
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    max_pending_per_tenant: int = Field(default=100, ge=1, description="Solves a tenant may have queued or running.")
    carbon_timeout_s: float = Field(default=10, gt=0)

    traffic_keep_days: float = Field(default=16, gt=0, description="How long reported traffic is kept.")
    traffic_sweep_s: float = Field(default=600, gt=0, description="How often older traffic is forgotten.")

    train_interval_s: float = Field(default=3_600, gt=0, description="Least time between trainings of job lengths.")
    train_look_s: float = Field(default=30, gt=0, description="How often it is looked whether one is due.")
    train_min_jobs: int = Field(default=10, ge=1, description="Jobs that must have succeeded since the last one.")
    train_max_jobs: int = Field(default=600_000, ge=1, description="History of a training: the newest so many.")
    models_kept: int = Field(
        default=48, ge=1, description="Models of job lengths that are kept, beside the active one."
    )

    plan_interval_s: float = Field(default=1_800, gt=0, description="How often each pool is planned, by the clock.")
    plan_lead_s: float = Field(default=120, ge=0, description="So long before, for solving and for starting instances.")
    plan_late_s: float = Field(default=300, gt=0, description="So long after, an answer is late.")
    plan_look_s: float = Field(default=2, gt=0, description="How often it is looked what is due, and what is answered.")
    plan_retry_s: float = Field(default=30, gt=0, description="After a plan that failed, until it is late.")
    traffic_max_age_s: float = Field(
        default=600, gt=0, description="Silence of all reporters after which nothing is foretold from what they said."
    )

    instance_look_s: float = Field(default=1, gt=0, description="How often the keeper looks at the instances of pools.")
    instance_probe_s: float = Field(default=5, gt=0, description="How often an instance that serves is asked.")
    instance_probe_timeout_s: float = Field(default=2, gt=0, description="For one question to an instance.")
    instance_probes_at_once: int = Field(default=200, ge=1, description="Questions to instances at a time.")
