"""Settings of the simulator, shared by its service and its workers."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.kit.background.settings import WorkSettings


class SimulatorSettings(WorkSettings):
    """The ``SIMULATOR_*`` settings, and those that all processes share."""

    model_config = SettingsConfigDict(env_prefix="SIMULATOR_")

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65_535)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    max_pending_per_tenant: int = Field(default=20, ge=1, description="Runs a tenant may have queued or running.")
    max_jobs: int = Field(default=150_000, ge=1, description="Most jobs of a run; the bundled year has 146,000.")
    max_days: float = Field(default=366, gt=0, description="Longest time over which a run's jobs are submitted.")
    max_gpus: int = Field(default=20_000, ge=1, description="Largest cluster of a run.")
    max_file_bytes: int = Field(default=64 * 1024 * 1024, ge=1024, description="Of an inline file, unpacked.")
    max_run_s: float = Field(default=3_600, ge=1, description="A run that takes longer is stopped and fails.")
    source_timeout_s: float = Field(default=15, gt=0, description="For a page of history or intensities.")
    comparison_max_age_s: float = Field(
        default=300, gt=0, description="An older simulation of the present queue is renewed when somebody asks for it."
    )
    comparison_min_age_s: float = Field(
        default=15, ge=0, description="A younger one is not, even for a job that it does not know."
    )
