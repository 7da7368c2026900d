"""Settings that several processes share; each process adds its own class with its own prefix."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class SharedSettings(BaseSettings):
    """Addresses and secrets of the installation, the same for every process.

    A process's own settings subclass this with ``env_prefix``; the fields here keep their full names.
    """

    model_config = SettingsConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    database_url: str = Field("", validation_alias="DATABASE_URL")
    redis_url: str = Field("redis://127.0.0.1:6379/0", validation_alias="REDIS_URL")
    service_token: str = Field(
        min_length=16,
        validation_alias="WATTSHIFT_SERVICE_TOKEN",
        description="Secret by which the services recognise each other.",
    )
    carbon_url: str = Field("http://127.0.0.1:8010", validation_alias="WATTSHIFT_CARBON_URL")
    admission_url: str = Field("http://127.0.0.1:8020", validation_alias="WATTSHIFT_ADMISSION_URL")
    scheduler_url: str = Field("http://127.0.0.1:8030", validation_alias="WATTSHIFT_SCHEDULER_URL")
    optimizer_url: str = Field("http://127.0.0.1:8040", validation_alias="WATTSHIFT_OPTIMIZER_URL")
    simulator_url: str = Field("http://127.0.0.1:8080", validation_alias="WATTSHIFT_SIMULATOR_URL")
    serving_url: str = Field("http://127.0.0.1:8090", validation_alias="WATTSHIFT_SERVING_URL")
    telemetry_url: str = Field("http://127.0.0.1:8060", validation_alias="WATTSHIFT_TELEMETRY_URL")
    zone: str = Field(
        "US-CAL-CISO", validation_alias="WATTSHIFT_ZONE", description="Grid zone of nodes that name none."
    )
    data_dir: Path = Field(Path(".wattshift"), validation_alias="WATTSHIFT_DATA_DIR")
    log_format: str = Field("text", pattern="^(text|json)$", validation_alias="WATTSHIFT_LOG_FORMAT")
    log_level: str = Field("INFO", validation_alias="WATTSHIFT_LOG_LEVEL")
