"""Settings of the optimizer, shared by its service and its workers."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.kit.background.settings import WorkSettings


class OptimizerSettings(WorkSettings):
    """``OPTIMIZER_*``, and the settings that all processes share."""

    model_config = SettingsConfigDict(env_prefix="OPTIMIZER_")

    host: str = "127.0.0.1"
    port: int = Field(default=8040, ge=0, le=65_535)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    max_pending_per_tenant: int = Field(default=100, ge=1, description="Solves a tenant may have queued or running.")
    plan_solve_keep_days: float = Field(
        default=1, gt=0, description="How long the solves of plans are kept; the plans themselves have the answers."
    )
    carbon_timeout_s: float = Field(default=10, gt=0)

    train_interval_s: float = Field(default=3_600, gt=0, description="Least time between trainings of job lengths.")
    train_look_s: float = Field(default=30, gt=0, description="How often the worker checks whether one is due.")
    train_min_jobs: int = Field(default=10, ge=1, description="Jobs that must have succeeded since the last one.")
    train_max_jobs: int = Field(default=600_000, ge=1, description="Most jobs that a training uses, the newest ones.")
    models_kept: int = Field(
        default=48, ge=1, description="Models of job lengths that are kept, beside the active one."
    )
