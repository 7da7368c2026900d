"""Settings of admission."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.kit.settings import SharedSettings


class AdmissionSettings(SharedSettings):
    """``ADMISSION_*``, and what all processes share."""

    model_config = SettingsConfigDict(env_prefix="ADMISSION_")

    host: str = "127.0.0.1"
    port: int = Field(default=8020, ge=0, le=65_535)
    max_jobs_per_commit: int = Field(
        default=2_000, ge=1, description="Jobs in one commit; submissions beyond that wait for the next commit."
    )
    commit_patience_s: float = Field(
        default=4, gt=0, description="How long a submission waits for an unreachable database before it is refused."
    )
    budget_interval_s: float = Field(
        default=10, gt=0, le=3_600, description="How often what is used of budgets is counted."
    )
    capacity_max_age_s: float = Field(
        default=5, gt=0, description="How old the nodes' capacity may be when a gang is checked against it."
    )
    event_poll_s: float = Field(
        default=0.15, gt=0, description="How often new events are read while clients follow them."
    )
    event_buffer: int = Field(default=10_000, ge=1, description="Events kept in memory for clients that follow them.")
    keep_alive_s: float = Field(
        default=15, gt=0, description="An event stream without events gets a comment this often."
    )
    log_poll_s: float = Field(default=0.4, gt=0, description="How often new output is read while a client follows it.")
    agent_timeout_s: float = Field(
        default=5, gt=0, description="How long a node may take to answer a request for output."
    )
