"""Settings of the optimizer, shared by its service and its workers."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.contracts.schema import said
from services.kit.background.settings import WorkSettings


class OptimizerSettings(WorkSettings):
    """``OPTIMIZER_*``, and the settings that all processes share."""

    model_config = SettingsConfigDict(env_prefix="OPTIMIZER_")

    host: str = "127.0.0.1"
    port: int = Field(default=8040, ge=0, le=65_535)
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024)
    max_pending_per_tenant: int = said("Solves a tenant may have queued or running.", default=100, ge=1)
    plan_solve_keep_days: float = said(
        "How long the solves of plans are kept; the plans themselves have the answers.", default=1, gt=0
    )

    train_interval_s: float = said("Least time between trainings of job lengths.", default=3_600, gt=0)
    train_look_s: float = said("How often the worker checks whether one is due.", default=30, gt=0)
    train_min_jobs: int = said("Jobs that must have succeeded since the last one.", default=10, ge=1)
    train_max_jobs: int = said("Most jobs that a training uses, the newest ones.", default=600_000, ge=1)
    models_kept: int = said("Models of job lengths that are kept, beside the active one.", default=48, ge=1)
