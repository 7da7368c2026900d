"""A module that is imported when something in it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Later:
    """Stands for a module until then.

    Args:
        name: Of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """Return what the module has by that name."""
        return getattr(import_module(self._name), name)
