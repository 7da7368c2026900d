"""Settings of the gateway."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.kit.edge.settings import EdgeSettings


class GatewaySettings(EdgeSettings):
    """``GATEWAY_*``, and what all processes share."""

    model_config = SettingsConfigDict(env_prefix="GATEWAY_")

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65_535)
    open_emissions: bool = Field(
        default=False,
        description="Answer `/emissions/...` and `/locations` without a key: the Carbon Aware API's clients send none.",
    )
    open_requests_per_s: float = Field(default=5, gt=0, description="Without a key, from one address.")
    open_burst: int = Field(default=20, ge=1, description="Without a key, from one address after a pause.")
    session_s: int = Field(
        default=12 * 3600, ge=60, le=31 * 86_400, description="How long after signing in the dashboard asks again."
    )
    max_streams_per_tenant: int = Field(default=200, ge=1, description="Event and log streams open at once.")
    group_entries: int = Field(default=128, ge=1, description="Most submissions in one request to admission.")
    group_bytes: int = Field(default=4 * 1024 * 1024, ge=1, description="Their bodies together, unless one is larger.")
    groups_in_flight: int = Field(default=2, ge=1, description="Requests with submissions on their way at once.")
    submit_timeout_s: float = Field(default=15, gt=0)
    upstream_timeout_s: float = Field(default=30, gt=0, description="For an answer that is not a stream.")
    connect_timeout_s: float = Field(default=2, gt=0)
    stream_silence_s: float = Field(default=60, gt=0, description="A stream silent for so long is closed.")
