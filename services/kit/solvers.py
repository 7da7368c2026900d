"""Solvers of installed packages: a process that solves calls ``load_solvers`` as it starts."""

from services.core.solvers.solve import OTHERS
from services.kit.plugins import load_plugins


def load_solvers() -> None:
    """Add the solvers of installed packages to HiGHS; ``PluginError`` if one of them cannot be used."""
    for plugin in load_plugins("wattshift.solvers", dict):
        OTHERS.update(plugin.value)
