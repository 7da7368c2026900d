"""Settings of the optimizer, shared by its service and its workers."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.kit.settings import SharedSettings


class OptimizerSettings(SharedSettings):
    """``OPTIMIZER_*``, and what all processes share."""

    model_config = SettingsConfigDict(env_prefix="OPTIMIZER_")

    host: str = "127.0.0.1"
    port: int = 8040
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    max_pending_per_tenant: int = Field(default=100, ge=1, description="Solves a tenant may have queued or running.")
    lease_s: float = Field(
        default=15, gt=0, description="A worker that has not renewed its claim for so long is taken to be dead."
    )
    max_attempts: int = Field(default=3, ge=1, description="Workers a solve may cost before it is given up.")
    sweep_s: float = Field(default=5, gt=0, description="How often what a crash left behind is looked for.")
    resend_s: float = Field(
        default=5, gt=0, description="A message sent more recently may be between the broker and a worker's claim."
    )
    keep_days: float = Field(default=30, gt=0, description="How long an ended solve is kept.")
    carbon_timeout_s: float = Field(default=10, gt=0)
