"""A row of the public API's table."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from services.contracts.identity import Role

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"
LINES = "text/csv"


class Upstream(StrEnum):
    """The services behind the gateway."""

    ADMISSION = "admission"
    CARBON = "carbon service"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    SERVING = "serving"
    SIMULATOR = "simulator"
    TELEMETRY = "telemetry"


AnswerType = type[BaseModel] | type[list[Any]] | type[dict[str, Any]]
"""A model, or a list or mapping of one."""


@dataclass(frozen=True, slots=True)
class Status:
    """A status that an operation answers besides success and the problems that every operation may answer."""

    code: int
    meaning: str


@dataclass(frozen=True, slots=True)
class Route:
    """One operation of the public API.

    Attributes:
        method: The HTTP method, in capitals.
        path: Segments in braces match one segment of ``services.kit.edge.matching.SEGMENT``.
        role: The least role that may ask.
        to: The service that answers.
        tag: The section of the description it belongs to.
        summary: What it does, in a few words.
        detail: What the summary leaves open, in whole sentences.
        operation: Its name in generated clients, such as `submit_job`. Once released, it is never changed.
        query: Model of the query parameters; None where the operation takes none.
        body: Model of the JSON body; None where the operation takes none.
        answer: Type of the JSON answer; None where ``media`` is not JSON or there is no body.
        event: Model of an event's data, where ``media`` is that of event streams.
        lines: Model of a line, where ``media`` is that of lines: CSV, or JSON lines if the query asks for them.
        media: Media type of the answer.
        status: Of success.
        headers: Request headers the operation reads, besides the usual ones.
        statuses: What else it answers.
        for_projects: Whether keys that are limited to a project may ask; the service then limits its answer to it.
        has_large_body: Whether the body may be as large as a batch's.
    """

    method: str
    path: str
    role: Role
    to: Upstream
    tag: str
    summary: str
    detail: str = ""
    operation: str = field(kw_only=True)
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    answer: AnswerType | None = None
    event: type[BaseModel] | None = None
    lines: type[BaseModel] | None = None
    media: str = JSON
    status: int = 200
    headers: tuple[str, ...] = ()
    statuses: tuple[Status, ...] = ()
    for_projects: bool = False
    has_large_body: bool = False

    @property
    def answers_head(self) -> bool:
        """Whether a GET answers HEAD too, which a stream does not."""
        return self.media == JSON
