"""The entry of a provider: its name, its settings, and how it is built."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx
from pydantic_settings import BaseSettings, SettingsConfigDict

from carbon_service.providers.http import Pacing, ProviderClient, RateLimit
from carbon_service.providers.protocol import ForecastIssue, Provider, Series
from carbon_service.replay import Replay
from services.core.domain.carbon import Signal


class ProviderSettings(BaseSettings):
    """Settings of one provider; the provider ``uk`` reads its field ``url`` from ``CARBON_UK_URL``.

    A field without a default is one that the provider requires, such as a key; an empty variable counts as missing.
    Secrets are ``SecretStr``, so that no log shows them.
    """

    model_config = SettingsConfigDict(extra="ignore", frozen=True, env_ignore_empty=True)


@dataclass(frozen=True)
class ProviderContext:
    """What the carbon service gives to every provider."""

    http: httpx.AsyncClient  #: The session for all requests; ``ProviderClient`` adds retries, limits and refusals to it
    now_s: Callable[[], float]  #: The real clock, UTC seconds
    pacing: Pacing  #: Timeouts and waits of requests
    replay: Replay  #: How the recordings' clock runs; only recordings use it


S = TypeVar("S", bound=ProviderSettings)


@dataclass(frozen=True)
class ProviderEntry(Generic[S]):
    """A provider that operators may name in ``CARBON_PROVIDERS``."""

    name: str  #: Its name in ``CARBON_PROVIDERS``, and the provider's own ``name``
    settings: type[S]
    """The class of its settings, read from ``CARBON_<NAME>_...`` variables where a zone uses the provider."""
    build: Callable[[S, ProviderContext], Provider]  #: Makes the provider; it sends no request yet

    @property
    def prefix(self) -> str:
        return f"CARBON_{self.name.upper().replace('-', '_')}_"

    def read_settings(self, **given: Any) -> S:
        """Return the settings: those given, others from the environment; ``ValidationError`` if one is wrong."""
        return self.settings(_env_prefix=self.prefix, **given)  # pyright: ignore[reportCallIssue]


def among(offered: Iterable[Signal]) -> Callable[[tuple[Signal, ...]], tuple[Signal, ...]]:
    """Return a validator of a setting that picks at least one of the signals on offer."""
    known = tuple(offered)

    def check(signals: tuple[Signal, ...]) -> tuple[Signal, ...]:
        if not signals or set(signals) - set(known):
            raise ValueError(f"must be among {', '.join(known)}")
        return signals

    return check


class LiveSettings(ProviderSettings):
    """Settings of a provider that is asked over HTTP; its subclass gives the address a default."""

    url: str


L = TypeVar("L", bound=LiveSettings)


class LiveProvider(Generic[L]):
    """A provider that is asked over HTTP; the subclass has ``feed`` and ``history``."""

    name = ""
    signals: tuple[Signal, ...] = (Signal.AVERAGE_DIRECT,)
    recent_s = 2 * 3600.0  #: How far back ``latest`` looks

    def __init__(
        self, settings: L, context: ProviderContext, limit: RateLimit, headers: Mapping[str, str] = {}
    ) -> None:
        self._settings = settings
        self._now_s = context.now_s
        self._client = ProviderClient(context.http, settings.url, context.pacing, limit, headers)

    def grid_s(self, zone: str, time_s: float) -> float:
        return time_s

    async def latest(self, zone: str, signal: Signal) -> Series:
        now_s = self._now_s()
        recent = await self.history(zone, signal, now_s - self.recent_s, now_s)
        return Series(recent.points[-1:], recent.skipped)

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        raise NotImplementedError

    async def forecast(self, zone: str, signal: Signal, horizon_s: float) -> tuple[ForecastIssue, ...]:
        """Return no forecast: unless a subclass has one, the provider publishes none."""
        return ()
