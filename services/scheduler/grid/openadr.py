"""The door for a utility that speaks OpenADR 3: a virtual end node (VEN), which polls a server (VTN) for its events.

An event with ``IMPORT_CAPACITY_LIMIT`` or ``SIMPLE`` in its intervals becomes an order under the event's id: given
once, amended when the event changes, withdrawn when it is gone. Whatever else events carry, such as prices, is left
alone. When an order has ended whose event asks for reports, the energy of the ledger is reported to the VTN, once.

Source: the OpenADR 3.0.1 and 3.1 definitions (programs, events, reports, OAuth 2.0 client credentials).
"""

import asyncio
import re
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from services.contracts.grid import (
    LONGEST_S,
    NO_LIMIT_W,
    GridOrder,
    GridOrderChange,
    GridOrderReport,
    GridOrderSpec,
    GridOrderState,
    GridStep,
)
from services.contracts.identity import Identity, Role
from services.kit.logging import Log
from services.scheduler.grid.orders import GridOrders
from services.scheduler.settings import SchedulerSettings

log = Log(__name__)

SOURCE = "openadr"
CALLER = Identity(tenant_id="default", role=Role.OPERATOR, key_id=SOURCE)
PAGE, MOST = 50, 5_000  #: Objects that a VTN returns at once, and in all, at most
BOOKED_S = 600.0  #: So long after an event its last lines are waited for
UNITS_W = {"W": 1.0, "KW": 1e3, "MW": 1e6}
_DURATION = re.compile(
    r"P(?:(\d+)Y)?(?:(\d+)M)?(?:(\d+)W)?(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", re.IGNORECASE
)
_SECONDS = (365 * 86_400, 30 * 86_400, 604_800, 86_400, 3_600, 60, 1)


class Object(BaseModel):
    """An object of the protocol; what is not read here may be anything."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class Period(Object):
    """When an interval is, as ISO 8601 has it."""

    start: str | None = None
    duration: str | None = None


class Payload(Object):
    """What an interval says of one kind of thing."""

    type: str
    values: list[Any] = Field(min_length=1)


class Interval(Object):
    """A part of an event; without a period of its own it follows the one before."""

    period: Period = Field(default=Period(), alias="intervalPeriod")
    payloads: list[Payload]


class Descriptor(Object):
    """The units of a kind of payload."""

    kind: str = Field(alias="payloadType")
    units: str | None = None


class Event(Object):
    """An event."""

    id: str
    program: str = Field(alias="programID")
    name: str | None = Field(default=None, alias="eventName")
    period: Period = Field(default=Period(), alias="intervalPeriod")
    intervals: list[Interval]
    payloads: list[Descriptor] | None = Field(default=None, alias="payloadDescriptors")
    reports: list[Any] | None = Field(default=None, alias="reportDescriptors")


class OpenAdr:
    """Keeps orders as the events of a VTN are."""

    def __init__(self, settings: SchedulerSettings, orders: GridOrders) -> None:
        self._settings = settings
        self._orders = orders
        self._token, self._token_until_s = "", 0.0
        self._told: dict[str, str] = {}  #: What was last logged about an event
        self._reported = set[str]()

    async def run(self) -> None:
        """Poll until cancelled; without an address there is nothing to do."""
        if not self._settings.openadr_url:
            return
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            while True:
                try:
                    await self.look(session)
                except Exception as error:  # whatever the VTN has answered, it is asked again
                    self._token = ""
                    self._tell("", f"{type(error).__name__}: {error}")
                await asyncio.sleep(self._settings.openadr_poll_s)

    async def look(self, session: aiohttp.ClientSession) -> None:
        """Read all events once, and make orders as they are; what could not be read changes nothing."""
        wanted = self._settings.openadr_programs
        found = await self._all(session, "programs")
        programs = {_text(each, "id") for each in found if not wanted or _text(each, "programName") in wanted}
        programs.add(None)  # an event that names none cannot be read, which is not the same as its being gone
        events = [each for each in await self._all(session, "events") if _text(each, "programID") in programs]
        events = [each for each in events if _text(each, "id")]
        self._tell("", "")
        known = await self._orders.of_key(CALLER.key_id)
        for each in events:
            try:
                await self._follow(session, Event.model_validate(each), known.get(each["id"]))
                self._tell(each["id"], "")
            except Exception as error:  # of this event alone
                self._tell(each["id"], str(error))
        there = {each["id"] for each in events}
        self._told = {event_id: problem for event_id, problem in self._told.items() if event_id in there}
        self._reported &= there
        for event_id, order in known.items():
            if event_id not in there and order.state in (GridOrderState.ANNOUNCED, GridOrderState.IN_FORCE):
                await self._orders.withdraw(order.id, CALLER)

    async def _follow(self, session: aiohttp.ClientSession, event: Event, order: GridOrder | None) -> None:
        spec = spec_of(event, self._settings.openadr_simple_cuts, self._settings.openadr_zone)
        if order is None:
            if spec is not None and any(step.to_w != NO_LIMIT_W for step in spec.steps):
                await self._orders.give(spec, CALLER, event.id, SOURCE)
        elif order.state is GridOrderState.ENDED:
            await self._report(session, event, order)
        elif order.state is GridOrderState.WITHDRAWN:
            return
        elif spec is None:
            await self._orders.withdraw(order.id, CALLER)
        else:
            begins = spec.start_at if order.state is GridOrderState.ANNOUNCED else None
            is_later = begins is not None and begins != order.start_at
            longer_s = spec.duration_s - (order.end_at - order.start_at).total_seconds()
            if is_later or abs(longer_s) > 1e-3 or order.steps != spec.steps:
                change = GridOrderChange(start_at=begins, duration_s=spec.duration_s, steps=spec.steps)
                await self._orders.amend(order.id, change, CALLER)

    def _tell(self, event_id: str, problem: str) -> None:
        if self._told.get(event_id, "") != problem:
            log.warning("openadr.problem" if problem else "openadr.well_again", event_id=event_id, error=problem)
        self._told[event_id] = problem

    async def _report(self, session: aiohttp.ClientSession, event: Event, order: GridOrder) -> None:
        """Report what was drawn in an event that asks for it, once it is booked, unless the VTN has a report of it."""
        name = self._settings.openadr_client_name
        if not event.reports or event.id in self._reported:
            return
        if not await self._all(session, "reports", eventID=event.id, clientName=name):
            found = await self._orders.report(order.id)
            if found.until < order.end_at and datetime.now(UTC) < order.end_at + timedelta(seconds=BOOKED_S):
                return
            await self._ask(session, "POST", "reports", json=report_of(found, event, name))
        self._reported.add(event.id)

    async def _all(self, session: aiohttp.ClientSession, what: str, **asked: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while len(found) < MOST:  # a VTN that takes no notice of `skip` has no last page
            params = {**asked, "skip": str(len(found)), "limit": str(PAGE)}
            page = await self._ask(session, "GET", what, params=params)
            if not isinstance(page, list):
                raise ValueError(f"the server answers no list of {what}")  # nor are they all gone
            found += (listed := cast("list[dict[str, Any]]", page))
            if len(listed) < PAGE:
                return found
        raise ValueError(f"the server has {MOST} {what} or more, or pages without an end")

    async def _ask(self, session: aiohttp.ClientSession, method: str, what: str, **given: Any) -> Any:
        """Return the JSON of an answer; a token that is no longer good is replaced once."""
        url = f"{self._settings.openadr_url.rstrip('/')}/{what}"
        for is_last in (False, True):
            async with session.request(method, url, headers=await self._bearer(session), **given) as answer:
                if answer.status == 401 and not is_last:
                    self._token = ""
                    continue
                if answer.status == 409:  # another scheduler has sent the same report
                    return None
                answer.raise_for_status()
                return await answer.json(content_type=None)

    async def _bearer(self, session: aiohttp.ClientSession) -> Mapping[str, str]:
        settings = self._settings
        if not settings.openadr_client_id:
            return {}
        if not self._token or time.monotonic() >= self._token_until_s:
            form = {
                "grant_type": "client_credentials",
                "client_id": settings.openadr_client_id,
                "client_secret": settings.openadr_client_secret,
            }
            url = settings.openadr_token_url or f"{settings.openadr_url.rstrip('/')}/auth/token"
            async with session.post(url, data=form) as answer:
                answer.raise_for_status()
                token = await answer.json(content_type=None)
            self._token = token["access_token"]
            self._token_until_s = time.monotonic() + 0.8 * float(token.get("expires_in", 300))
        return {"Authorization": f"Bearer {self._token}"}


def _text(document: Any, name: str) -> str | None:
    """Return a field of what should be an object; None unless it is a text."""
    value = cast("dict[str, Any]", document).get(name) if isinstance(document, dict) else None
    return value if isinstance(value, str) else None


def spec_of(event: Event, simple_cuts: tuple[float, ...], zone: str | None) -> GridOrderSpec | None:
    """Return the order that an event means, with ``NO_LIMIT_W`` where it limits nothing; None if it has no length.

    Args:
        simple_cuts: What levels 1, 2 and 3 of ``SIMPLE`` leave out of the baseline, as shares.
        zone: The grid zone that events are for; None for the whole cluster.

    Raises:
        ValueError: Its times or values cannot be read.
    """
    spans = [*_spans(event, simple_cuts)]
    if not spans:
        return None
    start, steps, end_s = spans[0][0], list[GridStep](), 0.0
    for begin, lasts_s, step in spans:
        offset_s = end_s if begin is None or start is None else max((begin - start).total_seconds(), end_s)
        if offset_s > end_s:
            steps.append(GridStep(offset_s=end_s, to_w=NO_LIMIT_W))
        steps.append(
            step.model_copy(update={"offset_s": offset_s}) if step else GridStep(offset_s=offset_s, to_w=NO_LIMIT_W)
        )
        end_s = offset_s + lasts_s
    return GridOrderSpec(
        name=(event.name or event.id)[:200],
        zone=zone,
        start_at=start,
        duration_s=min(end_s, LONGEST_S),
        steps=[step for step in steps if step.offset_s < LONGEST_S],
    )


def _spans(event: Event, simple_cuts: tuple[float, ...]) -> Iterator[tuple[datetime | None, float, GridStep | None]]:
    """Yield each interval's start, None for now, its length in seconds, and its limit."""
    units = {each.kind: each.units or "KW" for each in event.payloads or ()}
    following = _instant(event.period.start)
    for interval in event.intervals:
        start = following if interval.period.start is None else _instant(interval.period.start)
        lasts_s = duration_s(interval.period.duration or event.period.duration or "PT0S")
        step = None
        for payload in interval.payloads:
            value = float(payload.values[0])
            if payload.type == "IMPORT_CAPACITY_LIMIT":
                unit = units.get(payload.type, "KW").upper()
                if unit not in UNITS_W:
                    raise ValueError(f"a limit in {unit} is unknown; known: {', '.join(UNITS_W)}")
                step = GridStep(to_w=max(value, 0.0) * UNITS_W[unit])
            elif payload.type == "SIMPLE" and step is None and value >= 1:
                step = GridStep(cut=simple_cuts[min(int(value), len(simple_cuts)) - 1])
        if lasts_s > 0:
            yield start, lasts_s, step
        following = None if start is None else start + timedelta(seconds=lasts_s)


def _instant(text: str | None) -> datetime | None:
    """Return a time of the protocol; None for now, which is written as a date of zeros or left out."""
    if not text or text.startswith(("0000", "0001")):
        return None
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def duration_s(text: str) -> float:
    """Return an ISO 8601 duration in seconds, ``LONGEST_S`` at most: ``P9999Y`` has no end; ``ValueError`` if none."""
    found = _DURATION.fullmatch(text)
    if found is None or text.upper() in ("P", "PT"):
        raise ValueError(f"{text!r} is no ISO 8601 duration")
    return min(sum(float(each or 0) * of for each, of in zip(found.groups(), _SECONDS, strict=True)), LONGEST_S)


def report_of(found: GridOrderReport, event: Event, client: str) -> dict[str, Any]:
    """Return the report to a VTN on an event that is over: the energy used, and its baseline, kWh."""
    hours = (found.until - found.since).total_seconds() / 3_600
    energy_kwh = {"USAGE": found.mean_w * hours / 1e3, "BASELINE": found.baseline_w * hours / 1e3}
    payloads = [{"type": kind, "values": [round(value, 3)]} for kind, value in energy_kwh.items()]
    described = {"objectType": "REPORT_PAYLOAD_DESCRIPTOR", "units": "KWH"}
    return {
        "programID": event.program,
        "eventID": event.id,
        "clientName": client,
        "reportName": f"{client}/{event.id}",
        "payloadDescriptors": [{**described, "payloadType": kind} for kind in energy_kwh],
        "resources": [
            {
                "resourceName": "AGGREGATED_REPORT",
                "intervalPeriod": {"start": found.since.isoformat(), "duration": f"PT{round(3_600 * hours)}S"},
                "intervals": [{"id": 0, "payloads": payloads}],
            }
        ],
    }
