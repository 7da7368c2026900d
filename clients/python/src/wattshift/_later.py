"""A module that is imported when something in it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Later:
    """Stands in for a module until it is needed.

    Args:
        name: The module's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute of that name."""
        return getattr(import_module(self._name), name)
