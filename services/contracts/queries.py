"""The query parameters of the public API. Unknown ones are refused: a misspelt filter would otherwise select
everything."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from services.contracts.carbon import Clock
from services.contracts.instants import AwareInstant
from services.contracts.invalid import LABEL_PATTERN
from services.contracts.jobs import Job, JobArray, LogStream
from services.contracts.nodes import Node
from services.contracts.schema import LEAST, Instant, Message, Name, Text, many, maybe, said
from services.contracts.slim import ALL_FIELDS, FieldsOf
from services.core.domain.jobs import JobState
from services.core.domain.signal import Signal

LONGEST_S = 366 * 86_400.0


def _plain(text: Any) -> Any:
    if isinstance(text, str) and "_" in text:
        raise ValueError("must be a number")
    return text


Plain = BeforeValidator(_plain)  #: Of a number: ``1_0`` is none, which Python alone reads as ten

Cursor = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,200}$")]
Search = Annotated[Text, StringConstraints(min_length=1, max_length=100)]
GroupBy = Literal["job", "user", "project", "tenant", "model", "zone", "node", "day", "week", "month"]
"""What a footprint report can be summed by."""

OtherGroup = Literal["user", "project", "tenant", "model", "zone", "node", "day", "week", "month"]
"""Of these there are few enough for one answer."""

RequestGroup = Literal["model", "key", "class", "tenant", "day"]  #: What requests can be summed by

LabelFilter = Annotated[str, StringConstraints(pattern=LABEL_PATTERN)]


class PageQuery(Message):
    """Which page of a list."""

    limit: Annotated[int, Plain] = Field(default=50, ge=1, le=500)
    cursor: Cursor | None = maybe("`next_cursor` of the previous page.")


class MetricsQuery(Message):
    """Whose metrics to read."""

    agents: bool = said("Those of the nodes' agents, in place of the services'.", default=False)
    own: bool = said("Those of the gateway that answers alone.", default=False)


class AuditQuery(PageQuery):
    """Which entries of the audit log, newest first."""

    since: Instant | None = maybe("Only entries at or after this time.")
    until: Instant | None = maybe("Only entries before this time.")
    action: Search | None = maybe("Beginning of the action, such as `key.`.")


class SecretQuery(Message):
    """Which of several secrets of the same name."""

    project: Name | None = maybe("That of this project; by default that of the tenant.")


class JobFilters(PageQuery):
    """Which jobs, or arrays of jobs."""

    state: list[JobState] = many("Jobs in any of these states; repeatable.")
    user: Name | None = maybe(
        "Only jobs that this user submitted; of jobs that belong to no user, those with the label `user` of this value."
    )
    project: Name | None = None
    name: Name | None = None
    label: list[LabelFilter] = many("`key=value`; repeatable. Jobs must have all of the labels.", max_length=20)
    submitted_after: Instant | None = None
    submitted_before: Instant | None = None
    tenant: Name | None = maybe("For operators: only this tenant's. Users always see only their own.")
    number: Annotated[int | None, Plain] = maybe(
        "Only what has this number, of each tenant; tasks have none here.", ge=1, le=2**63 - 1
    )


class JobQuery(JobFilters):
    """Which jobs to list, newest first."""

    id_prefix: Annotated[str, StringConstraints(pattern=r"^job_[0-9a-z]{0,26}$")] | None = maybe(
        "Only jobs whose ids begin so."
    )
    array: Annotated[str, StringConstraints(pattern=r"^array_[0-9a-z]{26}$")] | None = maybe(
        "Only tasks of this array."
    )
    tasks: bool = said("`false` leaves out the tasks of arrays.", default=True)
    q: Search | None = maybe("Part of the name; upper and lower case are the same.")
    fields: Annotated[list[str], FieldsOf(Job)] = many(ALL_FIELDS.format(rows="items"))


class ArrayQuery(JobFilters):
    """Which arrays to list, newest first; `state` selects those with a task in any of these states."""

    id_prefix: Annotated[str, StringConstraints(pattern=r"^array_[0-9a-z]{0,26}$")] | None = maybe(
        "Only arrays whose ids begin so."
    )
    fields: Annotated[list[str], FieldsOf(JobArray)] = many(ALL_FIELDS.format(rows="items"))


class EventQuery(Message):
    """How to read events."""

    follow: bool = said(
        "Keep the connection open for new events; `false` ends it after the existing ones.", default=True
    )


class EventsQuery(EventQuery):
    """How to read the events of all jobs."""

    changes: bool = said(
        "Also tell, by `changed` without an id, what else has changed: nodes, policies, pools, apps, "
        "carbon intensities, footprints. Only while events are followed.",
        default=False,
    )


class LogQuery(Message):
    """Which part of a job's output to read."""

    stream: LogStream = LogStream.STDOUT
    generation: Annotated[int | None, Plain] = maybe(
        "Which of the job's gangs; by default the newest.", ge=1, le=2**31 - 1
    )
    node: Name | None = maybe("Which of the gang's nodes; by default the first.")
    offset: Annotated[int, Plain] = said("Offset of the first byte.", default=0, ge=0, le=2**53)
    since: Instant | None = maybe(
        "Begin no earlier than with the line that was being written at this time, by the node's clock, "
        "exact to about a second. Answered with 409 for a gang that an earlier release started."
    )
    limit: Annotated[int, Plain] = said(
        "Maximum number of bytes; when following, per chunk.", default=65_536, ge=1, le=1_048_576
    )
    follow: bool = said("Keep the connection open for new output until the gang has ended.", default=False)


class NodeQuery(Message):
    """Which page of the nodes, by name."""

    limit: Annotated[int | None, Plain] = maybe("By default, all nodes in one page.", ge=1, le=500)
    cursor: Cursor | None = maybe("`next_cursor` of the previous page.")
    clocks: bool = said("`false` leaves out `clocks_mhz` of devices, which are long lists.", default=True)
    trend: bool = said("`true` adds `trend`: temperatures of the past day.", default=False)
    fields: Annotated[list[str], FieldsOf(Node)] = many(ALL_FIELDS.format(rows="items"))


class EngineDaysQuery(Message):
    """How many days to look back."""

    days: Annotated[int, Plain] = said("Within this many days, including today.", default=31, ge=1, le=3_660)


class EngineJobsQuery(Message):
    """Which waiting jobs to list."""

    held: bool = said("Those alone that are held back, or would be.", default=False)


class PlanQuery(Message):
    """Which rounds to list, newest first."""

    limit: Annotated[int, Plain] = Field(default=50, ge=1, le=500)
    cursor: str | None = maybe("`next_cursor` of the previous page.", max_length=20)


class LedgerQuery(Message):
    """Which page of the ledger's lines."""

    limit: Annotated[int, Plain] = Field(default=100, ge=1, le=1_000)
    cursor: Text | None = maybe("`next_cursor` of the previous page.", max_length=4_000)  # names of groups are in it


class HoursQuery(Message):
    """Which hours of the ledger to list, at most 100 days."""

    start: Instant = said("Only hours that begin at or after this time.")
    end: Instant | None = maybe("Only hours that begin before this time; now, if not given.")


LINE_MEDIA = {"csv": "text/csv", "jsonl": "application/x-ndjson"}  #: Of exports of the ledger's lines, by their format


class LinesQuery(Message):
    """Which lines of the ledger to export."""

    start: Instant | None = maybe("Only lines that begin at or after this time.")
    end: Instant | None = maybe("Only lines that begin before this time.")
    job: Name | None = maybe("Only those of the job with this id.")
    format: Literal["csv", "jsonl"] = said("CSV with a head, or an object a line.", default="csv")
    seals: bool = said(
        "For operators: add what shows that nothing was changed, as comments or objects with a `seal`.", default=False
    )


class SavingsQuery(Message):
    """Which days' savings."""

    start: Instant | None = maybe("Only days that begin at or after this time.")
    end: Instant | None = maybe("Only days that end by this time.")


class RequestQuery(Message):
    """Which requests to sum, and by which group."""

    group_by: RequestGroup = "model"
    start: Instant | None = maybe("Only requests that ended at or after this time.")
    end: Instant | None = maybe("Only requests that ended before this time; a period that has not ended yet ends now.")


class PastJobsQuery(LedgerQuery):
    """Which past jobs to list, in order of submission."""

    start: Instant | None = maybe("Only jobs submitted at or after this time.")
    end: Instant | None = maybe("Only jobs submitted before this time.")
    tenant: Name | None = maybe("For operators: only this tenant's. Users always see only their own.")


class SignalQuery(Message):
    """Which signal of a grid zone."""

    signal: Signal | None = maybe("By default, the signal that the installation is configured for.")


class HistoryQuery(SignalQuery):
    """Which past intensities."""

    start: AwareInstant | None = maybe("By default, one day of grid time before the end.")
    end: AwareInstant | None = maybe("By default, now.")
    limit: Annotated[int, Plain] = Field(default=1000, ge=1, le=10_000)
    cursor: str | None = maybe("`next_cursor` of the previous page.", max_length=64)


class ForecastQuery(SignalQuery):
    """How far ahead."""

    horizon_s: Annotated[float | None, Plain] = maybe("By default, one day of grid time.", ge=LEAST, le=LONGEST_S)
    clock: Clock = said(
        "Whether `horizon_s` counts real seconds or grid seconds, which differ while a recording is replayed.",
        default="real",
    )


class OutlookQuery(SignalQuery):
    """How far back and ahead."""

    past_s: Annotated[float | None, Plain] = maybe("By default, one day of grid time.", ge=0, le=LONGEST_S)
    ahead_s: Annotated[float | None, Plain] = maybe("By default, one day of grid time.", ge=0, le=LONGEST_S)
    clock: Clock = said(
        "Whether `past_s` and `ahead_s` count real seconds or grid seconds, which differ while a "
        "recording is replayed.",
        default="real",
    )
