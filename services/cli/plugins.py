"""Policies of installed packages, for commands that simulate."""

from __future__ import annotations

from services.cli.client import EXIT_USAGE, CliError
from services.kit.plugins import PluginError


def add_plugins() -> None:
    """Add the policies of installed packages to those that may be named.

    Raises:
        CliError: One of them cannot be used.
    """
    from services.kit.policies import load_policies

    try:
        load_policies()
    except PluginError as error:
        raise CliError(str(error), EXIT_USAGE) from None
