"""Settings of the carbon service, environment prefix ``CARBON_``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from carbon_service.providers import electricity_maps, pjm, recorded, uk, watttime
from services.contracts.schema import Instant
from services.core.domain.carbon import Signal
from services.kit.settings import SharedSettings

PROVIDERS = ("recorded", "uk", "electricity_maps", "watttime", "pjm")
CREDENTIALS = {
    "electricity_maps": ("electricity_maps_token",),
    "watttime": ("watttime_username", "watttime_password"),
    "pjm": ("pjm_key",),
}


def _words(value: Any) -> Any:
    """Split a comma-separated list; an empty one has no words."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


def _pairs(value: Any) -> Any:
    """Split ``key=value,key=value``."""
    if not isinstance(value, str):
        return value
    pairs: dict[str, str] = {}
    for word in _words(value):
        key, separator, meaning = (part.strip() for part in word.partition("="))
        if not separator or not key or not meaning:
            raise ValueError(f"expected name=value, separated by commas; got {word!r}")
        if key in pairs:
            raise ValueError(f"{key} is named twice")
        pairs[key] = meaning
    return pairs


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]
Pairs = Annotated[dict[str, str], NoDecode, BeforeValidator(_pairs)]
Signals = Annotated[tuple[Signal, ...], NoDecode, BeforeValidator(_words)]
Nodes = Annotated[dict[str, int], NoDecode, BeforeValidator(_pairs)]


class Settings(SharedSettings):
    """What the operator of the carbon service may choose."""

    model_config = SettingsConfigDict(env_prefix="CARBON_", extra="ignore", frozen=True, populate_by_name=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8010, ge=0, le=65535)
    zones: Words = Field(default=("US-CAL-CISO",), min_length=1, description="Zones to know, separated by commas.")
    providers: Pairs = Field(
        default={},
        description="Where each zone's values come from, `zone=provider,...`; a zone not named is `recorded`. "
        "`zone=a+b` takes different signals from two providers.",
    )
    default_signal: Signal = Field(
        default=Signal.AVERAGE_DIRECT, description="What is meant where a request names no signal."
    )
    location_aliases: Pairs = Field(
        default={}, description="Other names of zones in the Carbon Aware API, `eastus=US-MIDA-PJM,...`."
    )

    replay_speed: float = Field(
        default=1.0, gt=0, le=100_000, allow_inf_nan=False, description="Grid seconds per real second of recordings."
    )
    replay_start: Instant | None = Field(
        default=None,
        description="Grid instant at which a replay starts. Default: at speed 1 the season and hour it is now, at "
        "other speeds 2021-08-01T00:00Z. A restart goes on where the replay was unless this or the speed changed.",
    )

    learn_forecasts: bool = Field(default=True, description="Forecast from each zone's own history; else persistence.")
    backfill_s: float = Field(default=90 * 86_400, ge=0, le=366 * 86_400, description="First history, grid seconds.")
    retention_s: float = Field(default=730 * 86_400, ge=86_400, description="Age past which values are deleted.")
    max_points: int = Field(default=200_000, ge=1_000, description="Most points kept per zone and signal.")
    max_forecasts: int = Field(default=5_000, ge=10, description="Most forecasts kept per zone and signal.")

    provider_timeout_s: float = Field(default=10.0, gt=0, le=120, allow_inf_nan=False)
    uk_url: str = uk.BASE_URL
    electricity_maps_url: str = electricity_maps.BASE_URL
    electricity_maps_token: SecretStr = SecretStr("")
    electricity_maps_signals: Signals = (Signal.AVERAGE_DIRECT, Signal.AVERAGE_LIFECYCLE)
    watttime_url: str = watttime.BASE_URL
    watttime_username: str = ""
    watttime_password: SecretStr = SecretStr("")
    watttime_regions: Pairs = Field(default=watttime.REGIONS, description="WattTime's region of each zone.")
    watttime_signals: Signals = (Signal.MARGINAL,)
    pjm_url: str = pjm.BASE_URL
    pjm_key: SecretStr = SecretStr("")
    pjm_pnodes: Nodes = Field(default=pjm.PNODES, description="PJM's pricing node of each zone.")
    pjm_resolution: Literal["fivemin", "hourly"] = "fivemin"
    pjm_requests_per_minute: int = Field(default=6, ge=1, le=600, description="6 without a PJM membership, 600 with.")

    @property
    def sources(self) -> dict[str, tuple[str, ...]]:
        """The names of the providers of every zone."""
        return {
            zone: tuple(name.strip() for name in self.providers.get(zone, "recorded").split("+")) for zone in self.zones
        }

    @model_validator(mode="after")
    def _check_zones(self) -> Settings:
        if unused := sorted(set(self.providers) - set(self.zones)):
            raise ValueError(f"CARBON_PROVIDERS names {', '.join(unused)}, which CARBON_ZONES does not")
        for zone, names in self.sources.items():
            if unknown := [name for name in names if name not in PROVIDERS]:
                raise ValueError(f"CARBON_PROVIDERS: {zone}={unknown[0]}: the providers are {', '.join(PROVIDERS)}")
            if "recorded" in names and zone not in recorded.ZONES:
                has = ", ".join(recorded.ZONES)
                raise ValueError(
                    f"there is no recording of {zone} (only of {has}); name a provider in CARBON_PROVIDERS"
                )
            for name in names:
                self._check_credentials(zone, name)
        if strangers := sorted(set(self.location_aliases.values()) - set(self.zones)):
            raise ValueError(f"CARBON_LOCATION_ALIASES points to {strangers[0]}, which CARBON_ZONES does not name")
        return self

    def _check_credentials(self, zone: str, name: str) -> None:
        lacking = [field for field in CREDENTIALS.get(name, ()) if not _revealed(getattr(self, field))]
        if lacking:
            variables = " and ".join(f"CARBON_{field.upper()}" for field in lacking)
            raise ValueError(f"zone {zone} is to come from {name}, which needs {variables}")
        allowed: dict[str, tuple[Sequence[Signal], Sequence[Signal]]] = {
            "electricity_maps": (self.electricity_maps_signals, tuple(electricity_maps.FACTORS)),
            "watttime": (self.watttime_signals, tuple(watttime.SIGNAL_TYPES)),
        }
        wanted, offered = allowed.get(name, ((), ()))
        if name in allowed and (not wanted or set(wanted) - set(offered)):
            raise ValueError(f"CARBON_{name.upper()}_SIGNALS must be among {', '.join(offered)}")

    @property
    def replay_start_s(self) -> float | None:
        """The start of a replay that was asked for, UTC seconds."""
        return None if self.replay_start is None else self.replay_start.astimezone(UTC).timestamp()


def _revealed(value: str | SecretStr) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else value
