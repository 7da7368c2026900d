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
    join_token_enrols: bool = said(
        "Whether a node that never enrolled may join with the token that all nodes of the release before "
        "share. Set it to false once `wattshift nodes` shows no node as shared.",
        default=True,
    )
    node_redis: Literal["own", "shared"] = said(
        "Whether each node gets a user of its own in Valkey or Redis; shared: nodes use the REDIS_URL of "
        "their settings, where the server lets nobody make users.",
        default="own",
    )
    node_redis_url: str = said(
        "Where nodes reach Valkey or Redis, without user and password; by default where telemetry does.", default=""
    )
    join_url: str = said("Where hosts join over TLS by `wattshift join`; `wattshift up --listen` sets it.", default="")
    node_rotate_s: float = said("Age at which nodes replace their secrets, by themselves.", default=7 * 86_400.0, gt=0)
    pool_size: int = said("Connections to the database.", default=8, ge=1, le=100)

    heartbeat_interval_s: float = said("How often nodes are asked to report.", default=2.0, gt=0, le=600)
    lease_ttl_s: float = said("How long a node may run its gangs without contact.", default=20.0, gt=0, le=3_600)

    control_plane_w: float = said(
        "What the control plane's own machines draw: gateway, router, scheduler, storage of the platform. "
        "It is booked as the idle energy of a node `control-plane` in the default zone; 0: not known, and not booked.",
        default=0.0,
        ge=0,
        le=1e9,
        allow_inf_nan=False,
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
    device_lifetime_s: float = said(
        "For reports: how long a GPU is expected to be used.", default=4 * 365 * 86_400.0, gt=0, allow_inf_nan=False
    )
    signal: Signal | None = said(
        "Carbon signal of the ledger, an average one; by default the carbon service's own, or "
        "`average_direct` where that is marginal. Signals are never mixed.",
        default=None,
    )
    carbon_refresh_s: float = said(
        "The carbon service is asked at most this often about one zone.", default=1.0, gt=0, le=600
    )

    retention_s: float = said(
        "Age past which raw ledger lines are combined into one line per day, node and owner, at least a day; 0: never.",
        default=62 * 86_400.0,
        ge=0,
        le=1e10,
        allow_inf_nan=False,
    )
    retention_interval_s: float = said("How often old lines are combined.", default=3_600.0, gt=0)
    clocks_keep_days: float = said(
        "How long the clocks of model servers are kept, minute by minute.", default=16.0, gt=0, le=3_650
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
