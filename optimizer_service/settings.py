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
