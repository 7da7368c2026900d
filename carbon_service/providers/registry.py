"""Every provider by name: ours, and those of other packages.

Each of ours is one entry of ``PROVIDERS``. A package adds a provider by a ``ProviderEntry`` in the entry-point group
``wattshift.carbon_providers`` (``services.kit.plugins``); docs/carbon.md shows a complete one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from carbon_service.providers import (
    aemo,
    eco2mix,
    eia,
    electricity_maps,
    energinet,
    entsoe,
    pjm,
    recorded,
    uk,
    watttime,
)
from carbon_service.providers.entry import ProviderContext, ProviderEntry, ProviderSettings
from carbon_service.providers.protocol import Provider
from carbon_service.zones import ZoneConfigError
from services.contracts.invalid import explained
from services.kit.plugins import load_plugins, refuse

GROUP = "wattshift.carbon_providers"

Entries = Mapping[str, ProviderEntry[Any]]

PROVIDERS: Entries = {
    entry.name: entry
    for entry in (
        *(recorded.ENTRY, uk.ENTRY, eco2mix.ENTRY, energinet.ENTRY, entsoe.ENTRY, eia.ENTRY),
        *(aemo.ENTRY, electricity_maps.ENTRY, watttime.ENTRY, pjm.ENTRY),
    )
}  # fmt: skip


def known_providers() -> Entries:
    """Return our providers and those that installed packages add; ``PluginError`` if one of these is unusable."""
    known: dict[str, ProviderEntry[Any]] = dict(PROVIDERS)
    for plugin in load_plugins(GROUP, ProviderEntry):
        if plugin.name in PROVIDERS:
            raise refuse(plugin, ValueError(f"there is a provider called {plugin.name!r} already"))
        if plugin.value.name != plugin.name:
            raise refuse(plugin, ValueError(f"the provider calls itself {plugin.value.name!r}, not {plugin.name!r}"))
        known[plugin.name] = plugin.value
    return known


def read_settings(sources: Mapping[str, Iterable[str]], entries: Entries) -> dict[str, ProviderSettings]:
    """Return the settings of the providers that zones name; ``ZoneConfigError`` if one is unknown or set up wrongly."""
    found: dict[str, ProviderSettings] = {}
    for zone, names in sources.items():
        for name in names:
            if name not in entries:
                raise ZoneConfigError(f"CARBON_PROVIDERS: {zone}={name}: the providers are {', '.join(entries)}")
            try:
                found[name] = entries[name].read_settings()
            except ValidationError as error:
                raise ZoneConfigError(_complaint(zone, entries[name], error)) from error
    return found


def build_providers(
    settings: Mapping[str, ProviderSettings], entries: Entries, context: ProviderContext
) -> dict[str, Provider]:
    """Return the providers with settings, by name; ``ZoneConfigError`` if one has another name than its entry."""
    built = {name: entries[name].build(own, context) for name, own in settings.items()}
    for name, provider in built.items():
        if provider.name != name:
            raise ZoneConfigError(f"the provider {name!r} calls itself {provider.name!r}")
    return built


def _complaint(zone: str, entry: ProviderEntry[Any], error: ValidationError) -> str:
    """Return one line for each problem with a provider's settings, without their values."""
    problems = [
        ("".join((entry.prefix, *(str(part).upper() for part in each["loc"][:1]))), each)
        for each in error.errors(include_url=False)
    ]
    missing = [variable for variable, each in problems if each["type"] == "missing"]
    lines = [f"zone {zone} is to come from {entry.name}, which needs {' and '.join(missing)}"] if missing else []
    lines += [
        f"{variable}: {explained({**each, 'input': ()})}"  # without the value, which may be a secret
        for variable, each in problems
        if each["type"] != "missing"
    ]
    return "\n".join(lines)
