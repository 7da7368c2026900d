"""Settings of the simulator, shared by its service and its workers."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.contracts.schema import said
from services.kit.background.settings import WorkSettings


class SimulatorSettings(WorkSettings):
    """The ``SIMULATOR_*`` settings, and those that all processes share."""

    model_config = SettingsConfigDict(env_prefix="SIMULATOR_")

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65_535)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    max_pending_per_tenant: int = said("Runs a tenant may have queued or running.", default=20, ge=1)
    max_jobs: int = said("Most jobs of a run; the bundled year has 146,000.", default=150_000, ge=1)
    max_days: float = said("Longest time over which a run's jobs are submitted.", default=366, gt=0)
    max_gpus: int = said("Largest cluster of a run.", default=20_000, ge=1)
    max_file_bytes: int = said("Of an inline file, unpacked.", default=64 * 1024 * 1024, ge=1024)
    max_run_s: float = said("A run that takes longer is stopped and fails.", default=3_600, ge=1)
    source_timeout_s: float = said("For a page of history or intensities.", default=15, gt=0)
    comparison_max_age_s: float = said(
        "An older simulation of the present queue is renewed when somebody asks for it.", default=300, gt=0
    )
    comparison_min_age_s: float = said("A younger one is not, even for a job that it does not know.", default=15, ge=0)
