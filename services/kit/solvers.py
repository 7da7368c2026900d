"""Solvers of installed packages: a process that solves calls ``load_solvers`` as it starts."""

from collections.abc import Iterator

from services.core.domain.solving import Backend
from services.core.solvers.solve import OTHERS, Solver
from services.kit.plugins import Plugin, load_plugins


def load_solvers() -> None:
    """Add the solvers of installed packages to HiGHS; ``PluginError`` if one of them cannot be used."""
    added: Iterator[Plugin[dict[Backend, Solver]]] = load_plugins("wattshift.solvers", dict)
    for plugin in added:
        OTHERS.update(plugin.value)
