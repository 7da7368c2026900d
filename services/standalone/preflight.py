"""Check the settings of every process before any of them starts."""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence

from services.kit.settings import NOT_POSTGRES, SharedSettings, is_postgres, settings_faults
from services.standalone.process import BadInputError
from services.standalone.processes import Service

PLACEHOLDERS = {
    "WATTSHIFT_SERVICE_TOKEN": "made by the installation",
    "WATTSHIFT_NODE_JOIN_TOKEN": "made by the installation",
}
"""Secrets that the installation has of its own, which are never set by hand."""


def check_settings(services: Sequence[Service], environment: Mapping[str, str]) -> None:
    """Check the settings that the processes would read from ``environment``.

    Raises:
        BadInputError: settings are wrong; one line for each variable, with what would be right.
    """
    given = {**environment, **PLACEHOLDERS}
    faults = [
        fault
        for service in services
        if (settings_type := _settings_of(service)) is not None
        for fault in settings_faults(settings_type, given)
    ]
    if given.get("DATABASE_URL") and not is_postgres(given["DATABASE_URL"]):
        faults.append(NOT_POSTGRES)
    if faults:
        raise BadInputError("\n".join(dict.fromkeys(faults)))


def _settings_of(service: Service) -> type[SharedSettings] | None:
    """Return the settings class of a process: the one in its ``settings`` module with its prefix."""
    package = service.module.rpartition(".")[0]
    try:
        found = importlib.util.find_spec(f"{package}.settings")
    except ModuleNotFoundError:
        found = None
    if found is None:
        return None
    for value in vars(importlib.import_module(found.name)).values():
        if (
            isinstance(value, type)
            and issubclass(value, SharedSettings)
            and value.model_config.get("env_prefix") == service.prefix
        ):
            return value
    return None
