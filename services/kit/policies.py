"""Policies of installed packages: a process that builds policies calls ``load_policies`` as it starts."""

from services.core.policies.registry import PolicyEntry, add_policy
from services.kit.plugins import load_plugins, refuse

GROUP = "wattshift.policies"


def load_policies() -> None:
    """Add installed packages' policies, once; ``PluginError`` if one cannot be used, or has the name of another."""
    for plugin in load_plugins(GROUP, PolicyEntry):
        try:
            add_policy(plugin.name, plugin.value)
        except Exception as error:  # whatever a foreign config or constructor raises
            raise refuse(plugin, error) from error
