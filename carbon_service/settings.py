"""Settings of the carbon service, environment prefix ``CARBON_``.

Each provider has settings of its own (``carbon_service.providers.entry``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from carbon_service.providers.recorded import ZONES as RECORDINGS
from services.contracts.schema import Instant, maybe, said
from services.core.domain.carbon import Signal
from services.kit.settings import SharedSettings


def _words(value: Any) -> Any:
    """Split a comma-separated list; an empty string gives no words."""
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
Numbers = Annotated[dict[str, int], NoDecode, BeforeValidator(_pairs)]


class Settings(SharedSettings):
    """The settings of the carbon service."""

    model_config = SettingsConfigDict(env_prefix="CARBON_", extra="ignore", frozen=True, populate_by_name=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8010, ge=0, le=65535)
    zones: Words = said("Zones to serve, separated by commas.", default=("US-CAL-CISO",), min_length=1)
    providers: Pairs = said(
        "Where each zone's values come from, `zone=provider,...`; a zone not named is `recorded`. "
        "`zone=a+b` takes different signals from two providers.",
        default={},
    )
    default_signal: Signal = said("Signal of requests that name none.", default=Signal.AVERAGE_DIRECT)
    location_aliases: Pairs = said(
        "Other names of zones in the Carbon Aware API, `eastus=US-MIDA-PJM,...`.", default={}
    )

    replay_speed: float = said(
        "Grid seconds per real second of recordings.", default=1.0, gt=0, le=100_000, allow_inf_nan=False
    )
    replay_start: Instant | None = maybe(
        "Grid instant at which a replay starts. Default: at speed 1 the season and hour it is now, at "
        "other speeds 2021-08-01T00:00Z. A restart goes on where the replay was unless this or the speed changed."
    )

    prices_file: Path | None = maybe("A file of what electricity costs in each zone (docs/prices.md); none: not known.")

    learn_forecasts: bool = said(
        "Learn forecasts from each zone's own history; if false, use persistence.", default=True
    )
    backfill_s: float = said(
        "History fetched at the first start, grid seconds.", default=90 * 86_400, ge=0, le=366 * 86_400
    )
    retention_s: float = said("Age past which values are deleted.", default=730 * 86_400, ge=86_400)
    max_points: int = said("Most points kept per zone and signal.", default=200_000, ge=1_000)
    max_forecasts: int = said("Most forecasts kept per zone and signal.", default=5_000, ge=10)

    provider_timeout_s: float = Field(default=10.0, gt=0, le=120, allow_inf_nan=False)

    @property
    def sources(self) -> dict[str, tuple[str, ...]]:
        return {
            zone: tuple(name.strip() for name in self.providers.get(zone, "recorded").split("+")) for zone in self.zones
        }

    @model_validator(mode="after")
    def _check_zones(self) -> Settings:
        if unused := sorted(set(self.providers) - set(self.zones)):
            raise ValueError(f"CARBON_PROVIDERS names {', '.join(unused)}, which CARBON_ZONES does not")
        if strangers := sorted(set(self.location_aliases.values()) - set(self.zones)):
            raise ValueError(f"CARBON_LOCATION_ALIASES points to {strangers[0]}, which CARBON_ZONES does not name")
        for zone, names in self.sources.items():
            if "recorded" in names and zone not in RECORDINGS:
                known = ", ".join(sorted(RECORDINGS))
                raise ValueError(
                    f"there is no recording of {zone}, but of {known}; name its provider (docs/carbon.md): "
                    f"CARBON_PROVIDERS={zone}=..."
                )
        return self
