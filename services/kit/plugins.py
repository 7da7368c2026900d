"""What installed packages add to Wattshift, through Python entry points.

A package lists what it adds to one of our groups in its ``pyproject.toml``::

    [project.entry-points."wattshift.policies"]
    youngest-first = "youngest_first:POLICY"

The groups: ``wattshift.policies`` (``services.kit.policies``) and ``wattshift.carbon_providers`` (the carbon service);
``wattshift.commands`` (typer's groups of commands), ``wattshift.tasks`` (of the simulator's worker),
``wattshift.simulations`` (``services.simulator.catalogue``), ``wattshift.run_reports`` (of ``wattshift simulate``) and
``wattshift.rounds`` (the scheduler's) are the lab's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from services.core.domain.errors import WattshiftError

T = TypeVar("T")


class PluginError(WattshiftError):
    """An installed package adds something that cannot be used; the message is one line that names the package."""

    code = "invalid_plugin"


@dataclass(frozen=True)
class Plugin(Generic[T]):
    name: str
    value: T
    origin: str


def load_plugins(group: str, kind: type[T]) -> Iterator[Plugin[T]]:
    """Yield what packages add to a group, by name; ``PluginError`` if it is no ``kind``, or a name is used twice."""
    names: dict[str, str] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value)):
        origin = _origin(entry)
        if entry.name in names:
            raise PluginError(f"{origin} has the same name as {names[entry.name]}; uninstall one of them")
        names[entry.name] = origin
        try:
            value: object = entry.load()
        except Exception as error:
            raise PluginError(f"{origin} cannot be loaded: {_in_a_line(error)}") from error
        if not isinstance(value, kind):
            raise PluginError(f"{origin} is of type {type(value).__name__} instead of {kind.__name__}")
        yield Plugin(entry.name, value, origin)


def refuse(plugin: Plugin[T], error: Exception) -> PluginError:
    """Return the error for an addition that was loaded but cannot be used."""
    return PluginError(f"{plugin.origin} cannot be used: {_in_a_line(error)}")


def _origin(entry: EntryPoint) -> str:
    package = "an unnamed package" if entry.dist is None else f"package {entry.dist.name}"
    return f"plugin {entry.name!r} ({entry.group}, {package})"


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
