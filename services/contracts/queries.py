"""The query parameters of the public API. Unknown ones are refused: a misspelt filter would otherwise select
everything."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from services.contracts.carbon import Clock
from services.contracts.instants import AwareInstant
from services.contracts.jobs import LogStream
from services.contracts.schema import Instant, Message, Name, Text
from services.core.domain.jobs import JobState
from services.core.domain.signal import Signal

LONGEST_S = 366 * 86_400.0

Cursor = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,200}$")]
Search = Annotated[Text, StringConstraints(min_length=1, max_length=100)]
GroupBy = Literal["job", "project", "tenant", "node"]
"""What a footprint report can be summed by."""

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


class PlanQuery(Message):
    """Which rounds to list, newest first."""

    limit: int = Field(default=50, ge=1, le=500)
    cursor: str | None = Field(default=None, max_length=20, description="`next_cursor` of the page before.")


class LedgerQuery(Message):
    """One page of the ledger's lines."""

    limit: int = Field(default=100, ge=1, le=1_000)
    cursor: Text | None = Field(default=None, max_length=500, description="`next_cursor` of the page before.")


class FootprintQuery(LedgerQuery):
    """Which part of the ledger to sum, and by what."""

    group_by: GroupBy = "project"
    start: Instant | None = Field(default=None, description="Lines that begin at or after this moment.")
    end: Instant | None = Field(default=None, description="Lines that begin before this moment.")


class PastJobsQuery(LedgerQuery):
    """Which past jobs, in order of submission."""

    start: Instant | None = Field(default=None, description="Submitted at or after this moment.")
    end: Instant | None = Field(default=None, description="Submitted before this moment.")
    tenant: Name | None = Field(default=None, description="Operators: only this tenant's. Users see their own.")


class SignalQuery(Message):
    """A question about one signal of a grid zone."""

    signal: Signal | None = Field(default=None, description="Default: the installation's default signal.")


class HistoryQuery(SignalQuery):
    """Which past."""

    start: AwareInstant | None = Field(default=None, description="Default: a day of the grid before the end.")
    end: AwareInstant | None = Field(default=None, description="Default: now.")
    limit: int = Field(default=1000, ge=1, le=10_000)
    cursor: str | None = Field(default=None, max_length=64, description="`next_cursor` of the page before.")


class ForecastQuery(SignalQuery):
    """Which future."""

    horizon_s: float | None = Field(default=None, gt=0, le=LONGEST_S, description="Default: a day of the grid.")
    clock: Clock = Field(default="real", description="Whose seconds `horizon_s` counts.")


class OutlookQuery(SignalQuery):
    """How far to look both ways."""

    past_s: float | None = Field(default=None, ge=0, le=LONGEST_S, description="Default: a day of the grid.")
    ahead_s: float | None = Field(default=None, ge=0, le=LONGEST_S, description="Default: a day of the grid.")
    clock: Clock = Field(default="real", description="Whose seconds `past_s` and `ahead_s` count.")
