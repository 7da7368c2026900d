"""What may stand behind the `?` of the public API's addresses. Unknown parameters are refused: a filter that is
misspelt would otherwise answer with everything."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from services.contracts.jobs import LogStream
from services.contracts.schema import Instant, Message, Name, Text
from services.core.domain.jobs import JobState

Cursor = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,200}$")]
Search = Annotated[Text, StringConstraints(min_length=1, max_length=100)]
LabelFilter = Annotated[str, StringConstraints(pattern=r"^[^\x00=]{1,63}=[^\x00]{0,255}$")]


class PageQuery(Message):
    """One page of a list."""

    limit: int = Field(default=50, ge=1, le=500)
    cursor: Cursor | None = Field(default=None, description="`next_cursor` of the page before.")


class JobQuery(PageQuery):
    """Which jobs to list, newest first."""

    state: list[JobState] = Field(default_factory=list[JobState], description="Any of these states; repeatable.")
    project: Name | None = None
    name: Name | None = None
    label: list[LabelFilter] = Field(
        default_factory=list[LabelFilter], max_length=20, description="`key=value`; repeatable, all must hold."
    )
    q: Search | None = Field(default=None, description="Part of the name, in either case.")
    submitted_after: Instant | None = None
    submitted_before: Instant | None = None
    tenant: Name | None = Field(default=None, description="Operators: only this tenant's. Users see their own.")


class EventQuery(Message):
    """How to read events."""

    follow: bool = Field(default=True, description="Stay and send what happens next; false ends with what there is.")


class LogQuery(Message):
    """Which piece of a job's output to read."""

    stream: LogStream = LogStream.STDOUT
    generation: int | None = Field(default=None, ge=1, le=2**31 - 1, description="Which gang; the newest by default.")
    node: Name | None = Field(default=None, description="Which of the gang's nodes; the first by default.")
    offset: int = Field(default=0, ge=0, le=2**53, description="First byte.")
    limit: int = Field(default=65_536, ge=1, le=1_048_576, description="Most bytes; when following, of one piece.")
    follow: bool = Field(default=False, description="Stay and send what is written next, until the gang has ended.")
