"""The configured zones: which provider serves which signals of each, and the results of fetching them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from carbon_service.providers.protocol import Feed, Provider
from carbon_service.repository import SourceKey
from services.contracts.codes import ProblemCode
from services.contracts.invalid import no_such_zone
from services.core.domain.carbon import Signal
from services.kit.problems import ProblemError


class ZoneConfigError(ValueError):
    """The zones, providers and signals in the settings contradict each other; the message says what to change."""


@dataclass(eq=False)
class Source:
    """One signal of one zone from one provider, and the results of the last attempts to fetch it."""

    key: SourceKey
    provider: Provider
    polled: bool = False  #: Whether at least one attempt was made since the process started
    last_success_s: float | None = None  #: When the provider last answered, UTC seconds
    last_error: str | None = None  #: Why the last attempt failed; ``None`` after a success
    skipped_values: int = 0  #: The number of values that were rejected since the process started

    @property
    def feed(self) -> Feed:
        feed = self.provider.feed(self.key.zone)
        if feed is None:
            raise LookupError(f"{self.provider.name} has nothing for {self.key.zone}")
        return feed


@dataclass
class Zones:
    """The configured zones with their sources, one per signal."""

    default_signal: Signal
    by_zone: dict[str, dict[Signal, Source]] = field(default_factory=dict[str, dict[Signal, Source]])

    @property
    def sources(self) -> list[Source]:
        return [source for sources in self.by_zone.values() for source in sources.values()]

    def find(self, zone: str, signal: Signal | None) -> Source:
        """Return a zone's source of a signal, or of its default one; ``ProblemError``: 404 if there is none."""
        sources = self.by_zone.get(zone)
        if sources is None:
            raise ProblemError(404, ProblemCode.UNKNOWN_ZONE, no_such_zone(zone, self.by_zone))
        wanted = signal or self.default_signal
        if wanted not in sources:
            has = ", ".join(sources)
            raise ProblemError(404, ProblemCode.NO_DATA, f"{zone} has no {wanted} signal; it has {has}.")
        return sources[wanted]


def build_zones(
    providers: Mapping[str, Provider], mapping: Mapping[str, Sequence[str]], default_signal: Signal
) -> Zones:
    """Return the sources of every zone.

    Args:
        default_signal: The signal of requests that name none; every zone must have it, so that zones are comparable.

    Raises:
        ZoneConfigError: A provider does not know a zone, two of them offer one zone the same signal, or a zone lacks
            the default signal or, where that is marginal, the average one that accounts need.
    """
    zones = Zones(default_signal)
    for zone, names in mapping.items():
        sources: dict[Signal, Source] = {}
        for provider in (providers[name] for name in names):
            if provider.feed(zone) is None:
                raise ZoneConfigError(f"CARBON_PROVIDERS: {provider.name} has nothing for zone {zone}")
            for signal in provider.signals:
                if signal in sources:
                    others = f"{sources[signal].provider.name} and {provider.name}"
                    raise ZoneConfigError(
                        f"CARBON_PROVIDERS: {others} both offer {signal} for {zone}; keep one of them"
                    )
                sources[signal] = Source(SourceKey(zone, signal, provider.name), provider)
        if default_signal not in sources:
            has = ", ".join(sources) or "none"
            raise ZoneConfigError(f"CARBON_DEFAULT_SIGNAL: {default_signal} is not among the signals of {zone} ({has})")
        if default_signal is Signal.MARGINAL and Signal.AVERAGE_DIRECT not in sources:
            raise ZoneConfigError(
                f"CARBON_PROVIDERS: {zone} has no {Signal.AVERAGE_DIRECT}, by which its emissions are accounted; add a "
                f"provider of it beside the marginal one, such as {zone}=eia+pjm"
            )
        zones.by_zone[zone] = sources
    return zones
