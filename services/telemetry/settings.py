"""Telemetry's settings: `TELEMETRY_...`, and what the whole installation shares."""

from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from services.contracts.schema import said
from services.core.domain.carbon import Signal
from services.kit.settings import SealingSettings

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TelemetrySettings(SealingSettings):
    """What the operator of telemetry may choose."""

    model_config = SettingsConfigDict(env_prefix="TELEMETRY_")

    host: str = "127.0.0.1"
    port: int = Field(8060, ge=0, le=65_535)
    join_token: str = said("Lets a node register itself.", min_length=16, validation_alias="WATTSHIFT_NODE_JOIN_TOKEN")
    join_token_enrols: bool = Field(
        True,
        description="Whether a node that never enrolled may join with the token that all nodes of the release before "
        "share. Set it to false once `wattshift nodes` shows no node as shared.",
    )
    node_redis: Literal["own", "shared"] = Field(
        "own",
        description="Whether each node gets a user of its own in Valkey or Redis; shared: nodes use the REDIS_URL of "
        "their settings, where the server lets nobody make users.",
    )
    node_redis_url: str = Field(
        "", description="Where nodes reach Valkey or Redis, without user and password; by default where telemetry does."
    )
    join_url: str = Field(
        "", description="Where hosts join over TLS by `wattshift join`; `wattshift up --listen` sets it."
    )
    node_rotate_s: float = Field(
        7 * 86_400.0, gt=0, description="Age at which nodes replace their secrets, by themselves."
    )
    pool_size: int = Field(8, ge=1, le=100, description="Connections to the database.")

    heartbeat_interval_s: float = Field(2.0, gt=0, le=600, description="How often nodes are asked to report.")
    lease_ttl_s: float = Field(20.0, gt=0, le=3_600, description="How long a node may run its gangs without contact.")

    control_plane_w: float = Field(
        0.0,
        ge=0,
        le=1e9,
        allow_inf_nan=False,
        description="What the control plane's own machines draw: gateway, router, scheduler, storage of the platform. "
        "It is booked as the idle energy of a node `control-plane` in the default zone; 0: not known, and not booked.",
    )
    market_gco2_per_kwh: dict[str, NonNegative] = said(
        "For reports: factor of the contracts, or the residual mix, of each zone, gCO2/kWh, as JSON: "
        '`{"DE": 0, "US-CAL-CISO": 215}`. Without one, market-based emissions of a zone are unknown.',
        default={},
    )
    embodied_kgco2: dict[str, NonNegative] = said(
        "For reports: embodied emissions of one GPU with its share of the server, kgCO2e, by model, as "
        'JSON: `{"A100-SXM4-40GB": 320}`. Without one, embodied emissions of a model are unknown.',
        default={},
    )
    device_lifetime_s: float = Field(
        4 * 365 * 86_400.0, gt=0, allow_inf_nan=False, description="For reports: how long a GPU is expected to be used."
    )
    signal: Signal | None = Field(
        None,
        description="Carbon signal of the ledger, an average one; by default the carbon service's own, or "
        "`average_direct` where that is marginal. Signals are never mixed.",
    )
    carbon_refresh_s: float = Field(
        1.0, gt=0, le=600, description="The carbon service is asked at most this often about one zone."
    )

    retention_s: float = Field(
        62 * 86_400.0,
        ge=0,
        le=1e10,
        allow_inf_nan=False,
        description="Age past which raw ledger lines are combined into one line per day, node and owner, at least a "
        "day; 0: never.",
    )
    retention_interval_s: float = Field(3_600.0, gt=0, description="How often old lines are combined.")
    clocks_keep_days: float = Field(
        16.0, gt=0, le=3_650, description="How long the clocks of model servers are kept, minute by minute."
    )

    @field_validator("signal")
    @classmethod
    def _is_an_average(cls, value: Signal | None) -> Signal | None:
        if value is Signal.MARGINAL:
            raise ValueError("must be an average signal: a marginal one is no basis of accounts")
        return value

    @field_validator("retention_s")
    @classmethod
    def _is_a_day(cls, value: float) -> float:
        if 0 < value < 86_400:
            raise ValueError("must be at least a day, 86400, or 0 to combine nothing")
        return value
