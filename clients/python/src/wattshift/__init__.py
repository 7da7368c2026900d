"""Wattshift for its users: a client of the control plane, and a helper for training code.

``Client`` and ``AsyncClient`` need httpx; ``from wattshift import job`` needs only the standard library, so that
training code can import it in any environment.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wattshift import job as job
    from wattshift import models as models
    from wattshift.aio import AsyncClient as AsyncClient
    from wattshift.client import Client as Client
    from wattshift.errors import ApiError as ApiError
    from wattshift.errors import FieldError as FieldError
    from wattshift.errors import UnreachableError as UnreachableError
    from wattshift.errors import WattshiftError as WattshiftError
    from wattshift.peers import StrangerError as StrangerError
    from wattshift.sessions import ExecResult as ExecResult

_HOMES = {
    "ApiError": "wattshift.errors",
    "AsyncClient": "wattshift.aio",
    "Client": "wattshift.client",
    "ExecResult": "wattshift.sessions",
    "FieldError": "wattshift.errors",
    "StrangerError": "wattshift.peers",
    "UnreachableError": "wattshift.errors",
    "WattshiftError": "wattshift.errors",
}

__all__ = [
    "ApiError",
    "AsyncClient",
    "Client",
    "ExecResult",
    "FieldError",
    "StrangerError",
    "UnreachableError",
    "WattshiftError",
    "job",
    "models",
]


def __getattr__(name: str) -> Any:
    """Import a name only when it is asked for: most of them need httpx."""
    if name in ("job", "models"):
        return import_module(f"wattshift.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'wattshift' has no attribute {name!r}")
