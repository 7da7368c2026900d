"""The public API as one table: which path goes to which service, and who may call it.

A route is declared once, by its function in the service that answers it. ``python -m tools.published`` reads the
services' routers and writes ``routes.json``, and ``openapi.json`` for people and clients; the gateway loads both, and
imports no service. ``tests/gateway/test_published.py`` fails while they are out of date.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from services.contracts.identity import Role

JSON = "application/json"
EVENTS = "text/event-stream"


class Upstream(StrEnum):
    """Where a route is answered: a service behind the gateway, or the gateway itself."""

    ADMISSION = "admission"
    CARBON = "carbon service"
    GATEWAY = "gateway"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    SERVING = "serving"
    SIMULATOR = "simulator"
    TELEMETRY = "telemetry"


@dataclass(frozen=True, slots=True)
class Route:
    """What the gateway has to know of an operation."""

    operation: str  #: Its name in the description and in generated clients, such as `submit_job`
    method: str  #: The HTTP method, in capitals
    path: str  #: Segments in braces match one segment of ``services.kit.edge.edge.SEGMENT``
    role: Role  #: The lowest role that may call it
    to: Upstream  #: Who answers it
    tag: str  #: The section of the description it belongs to
    media: str = JSON  #: Media type of the response
    has_body: bool = False  #: Whether it takes a body, which is JSON
    has_large_body: bool = False  #: Whether the body may be as large as a batch's
    for_projects: bool = False
    """Whether keys that are limited to a project may call it; the service then limits its answer to it."""

    @property
    def answers_head(self) -> bool:
        """Whether a GET route also answers HEAD, which a stream does not."""
        return self.media == JSON


@cache
def read_routes() -> tuple[Route, ...]:
    rows = json.loads(Path(__file__).with_name("routes.json").read_bytes())
    return tuple(Route(**{**row, "role": Role(row["role"]), "to": Upstream[row["to"]]}) for row in rows)
