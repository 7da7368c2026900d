"""Events of an OpenADR 3 server become orders; the server here answers as the published definitions have it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from services.contracts.grid import LONGEST_S
from services.scheduler.grid.openadr import CALLER, Event, OpenAdr, duration_s, spec_of
from services.scheduler.grid.orders import GridOrders
from tests.scheduler.test_grid_orders import limit_w, node, running
from tests.scheduler.world import World

CUTS = (0.1, 0.25, 0.5)
START = datetime(2030, 1, 1, 18, tzinfo=UTC)


class Vtn:
    """A server with one program, whose tokens are good for three requests."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.reports: list[Any] = []
        self.tokens, self.left = 0, 0
        self.is_away = False
        self.has_pages = True
        self.takes_reports = True
        self.programs: list[Any] = [{"id": "p1", "programName": "peak"}, {"id": "p2", "programName": "prices"}]
        self.wraps = False  #: Whether lists are in an object, which no version of the protocol says

    async def answer(self, request: web.Request) -> web.Response:
        if self.is_away:
            return web.Response(status=503)
        if request.path.endswith("/auth/token"):
            form = dict(await request.post())
            assert form == {"grant_type": "client_credentials", "client_id": "ven", "client_secret": "secret"}
            self.tokens, self.left = self.tokens + 1, 3
            token = {"access_token": f"t{self.tokens}", "token_type": "Bearer", "expires_in": 3600}
            return web.json_response(token)
        self.left -= 1
        if request.headers.get("Authorization") != f"Bearer t{self.tokens}" or self.left < 0:
            return web.json_response({"title": "Unauthorized", "status": 401}, status=401)
        what = request.path.rpartition("/")[2]
        if request.method == "POST" and not self.takes_reports:
            return web.json_response({"title": "Forbidden", "status": 403}, status=403)
        if request.method == "POST":
            self.reports.append(await request.json())
            return web.json_response(self.reports[-1], status=201)
        found: list[Any] = {
            "programs": self.programs,
            "events": self.events,
            "reports": [each for each in self.reports if each["eventID"] == request.query.get("eventID")],
        }[what]
        skip, limit = int(request.query["skip"]), int(request.query["limit"])
        page = found[skip : skip + limit] if self.has_pages else found
        return web.json_response({"items": page} if self.wraps else page)


def event(*intervals: dict[str, Any], event_id: str = "e1", program: str = "p1", **fields: Any) -> dict[str, Any]:
    return {
        "id": event_id,
        "objectType": "EVENT",
        "programID": program,
        "eventName": "evening",
        "intervals": [{"id": at, **each} for at, each in enumerate(intervals)],
        **fields,
    }


def limit(kind: str, value: float) -> dict[str, Any]:
    return {"payloads": [{"type": kind, "values": [value]}]}


def now(duration: str) -> dict[str, Any]:
    return {"start": "0000-00-00", "duration": duration}


@pytest.fixture
async def vtn() -> AsyncIterator[tuple[Vtn, str]]:
    made, app = Vtn(), web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield made, f"http://127.0.0.1:{port}/openadr3"
    await runner.cleanup()


async def over(world: World, ago_s: float = 3_600, lacks_s: float = 0) -> None:
    """Make the orders end some time ago, after an hour in which 1 kWh was used; its last seconds are not booked yet."""
    await world.fetch(
        "UPDATE grid_orders SET announced_at = now() - interval '2 hours', baseline_at = now() - interval '2 hours', "
        "start_at = now() - make_interval(hours => 1, secs => $1), end_at = now() - make_interval(secs => $1) "
        "RETURNING 1",
        ago_s,
    )
    await world.fetch(
        "INSERT INTO energy_usages (node_id, boot_id, sequence, owner, start_at, end_at, gpus, gpu_energy_j, "
        "cpu_energy_j, static_energy_j, source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue, "
        "carbon_gco2) SELECT 'n1', 'b', 1, '', start_at, end_at - make_interval(secs => $1), 4, "
        "3.6e6 - 1000 * $1::float8, 0, 0, 'counter', 'Z', 'average', 300, false, 1, 0 FROM grid_orders LIMIT 1 "
        "RETURNING 1",
        lacks_s,
    )


def door(world: World, url: str) -> OpenAdr:
    settings = world.settings.model_copy(
        update={
            "openadr_url": url,
            "openadr_client_id": "ven",
            "openadr_client_secret": "secret",
            "openadr_programs": ("peak",),
        }
    )
    return OpenAdr(settings, GridOrders(world.database))


async def orders(world: World) -> list[tuple[Any, ...]]:
    rows = await world.fetch("SELECT source, steps, withdrawn_at IS NOT NULL AS gone, revision FROM grid_orders")
    return [tuple(row) for row in rows]


async def test_an_event_is_an_order_as_long_as_it_is_there(world: World, vtn: tuple[Vtn, str]) -> None:
    server, url = vtn
    await node(world)
    job = await running(world, 4, flex=50)
    server.events = [
        event(limit("SIMPLE", 2), intervalPeriod=now("PT1H")),
        event(limit("PRICE", 0.3), event_id="e2", program="p2", intervalPeriod=now("PT1H")),
        event(limit("PRICE", 0.3), event_id="e3", intervalPeriod=now("PT1H")),
        event(limit("IMPORT_CAPACITY_LIMIT", 5), event_id="e4", intervalPeriod=now("an hour")),
    ]
    async with aiohttp.ClientSession() as session:
        looks = door(world, url)
        for _ in range(2):
            await looks.look(session)
        first = {"offset_s": 0, "cut": 0.25, "to_w": None}
        assert await orders(world) == [("openadr", [first], False, 1)]
        await world.scheduler.turn()
        assert await limit_w(world, job) is not None

        server.events[0] = event(limit("SIMPLE", 1), intervalPeriod=now("PT1H"))
        for _ in range(2):
            await looks.look(session)
        assert await orders(world) == [("openadr", [{**first, "cut": 0.1}], False, 2)]

        server.is_away = True
        with pytest.raises(aiohttp.ClientError):
            await looks.look(session)
        assert not (await orders(world))[0][2], "nothing is known, so nothing is withdrawn"
        server.is_away, server.events = False, []
        await door(world, url).look(session)
        assert (await orders(world))[0][2]
    assert server.tokens >= 2


async def test_an_event_that_limits_nothing_any_more_releases_what_it_had_limited(
    world: World, vtn: tuple[Vtn, str]
) -> None:
    server, url = vtn
    await node(world)
    job = await running(world, 4, flex=50)

    async def look(*intervals: dict[str, Any], lasts: str = "PT1H") -> float | None:
        server.events = [event(*intervals, intervalPeriod=now(lasts))]
        async with aiohttp.ClientSession() as session:
            await door(world, url).look(session)
        await world.scheduler.turn()
        return await limit_w(world, job)

    assert await look(limit("SIMPLE", 0)) is None
    assert await orders(world) == [], "an event without a limit is no order"
    assert await look(limit("SIMPLE", 2)) is not None
    assert await look(limit("SIMPLE", 0)) is None
    assert (await GridOrders(world.database).page(None, 1, CALLER))[0].limit_w is None
    assert await look(limit("SIMPLE", 2)) is not None, "it counts again"
    assert await look(limit("PRICE", 0.3)) is None
    assert await look(limit("SIMPLE", 2)) is not None
    assert await look(limit("SIMPLE", 2), lasts="PT0S") is None
    assert [gone for _, _, gone, _ in await orders(world)] == [True]


HOSTILE = {
    "a level without an end": event(limit("SIMPLE", float("inf")), event_id="bad", intervalPeriod=now("PT1H")),
    "no number": event(limit("IMPORT_CAPACITY_LIMIT", float("nan")), event_id="bad", intervalPeriod=now("PT1H")),
    "a value of another type": event(
        {"payloads": [{"type": "SIMPLE", "values": [{}]}]}, event_id="bad", intervalPeriod=now("PT1H")
    ),
    "the end of time": event(
        limit("SIMPLE", 2), event_id="bad", intervalPeriod={"start": "9999-12-31T23:59:59Z", "duration": "P9999Y"}
    ),
    "no text": event(limit("SIMPLE", 2), event_id="b\x00d", intervalPeriod=now("PT1H")),
    "no event": {"id": "bad"},
    "no object": None,
    "no id": {"programID": "p1"},
    "an id that is no text": {"id": 5, "programID": "p1"},
    "a program that is no text": {"id": "bad", "programID": ["p1"]},
    "an endless id": event(
        limit("SIMPLE", 2), event_id="".join(map(str, range(9_000))), intervalPeriod=now("PT1H"), eventName="x"
    ),
}


@pytest.mark.parametrize("bad", HOSTILE.values(), ids=HOSTILE)
async def test_an_event_that_cannot_be_read_keeps_no_other_from_being_followed(
    world: World, vtn: tuple[Vtn, str], bad: dict[str, Any] | None
) -> None:
    server, url = vtn
    server.programs = [None, {"id": 7}, {"programName": "peak"}, *server.programs]
    server.events = [bad, event(limit("SIMPLE", 2), intervalPeriod=now("PT1H"))]
    async with aiohttp.ClientSession() as session:
        await door(world, url).look(session)
    assert ("openadr", [{"offset_s": 0, "cut": 0.25, "to_w": None}], False, 1) in await orders(world)


@pytest.mark.parametrize("unread", ["the event", "the list"])
async def test_what_cannot_be_read_any_more_withdraws_no_order(world: World, vtn: tuple[Vtn, str], unread: str) -> None:
    server, url = vtn
    server.events = [event(limit("SIMPLE", 2), intervalPeriod=now("PT1H"))]
    async with aiohttp.ClientSession() as session:
        looks = door(world, url)
        await looks.look(session)
        server.events, server.wraps = [{"id": "e1"}], unread == "the list"
        with contextlib.suppress(ValueError):
            await looks.look(session)
        assert [gone for _, _, gone, _ in await orders(world)] == [False]
        server.events, server.wraps = [], False
        await looks.look(session)
    assert [gone for _, _, gone, _ in await orders(world)] == [True]


async def test_a_report_that_is_refused_keeps_no_event_from_being_followed(world: World, vtn: tuple[Vtn, str]) -> None:
    server, url = vtn
    await node(world)
    asked = event(limit("SIMPLE", 2), intervalPeriod=now("PT1H"), reportDescriptors=[{"payloadType": "USAGE"}])
    server.events, server.takes_reports = [asked], False
    async with aiohttp.ClientSession() as session:
        await door(world, url).look(session)
        await over(world)
        server.events.append(event(limit("SIMPLE", 1), event_id="e2", intervalPeriod=now("PT1H")))
        await door(world, url).look(session)
    assert len(await orders(world)) == 2


async def test_a_server_without_a_last_page_is_given_up_and_changes_nothing(world: World, vtn: tuple[Vtn, str]) -> None:
    server, url = vtn
    server.events = [event(limit("SIMPLE", 1), event_id=f"e{n}", intervalPeriod=now("PT1H")) for n in range(60)]
    server.has_pages = False
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ValueError, match="pages without an end"):
            await door(world, url).look(session)
    assert await orders(world) == []


async def test_what_was_drawn_is_reported_once_where_that_is_asked(world: World, vtn: tuple[Vtn, str]) -> None:
    server, url = vtn
    await node(world)
    server.events = [
        event(limit("SIMPLE", 2), intervalPeriod=now("PT1H"), reportDescriptors=[{"payloadType": "USAGE"}])
    ]
    async with aiohttp.ClientSession() as session:
        await door(world, url).look(session)
        await over(world)
        for _ in range(2):
            await door(world, url).look(session)
    (report,) = server.reports
    assert (report["programID"], report["eventID"], report["clientName"]) == ("p1", "e1", "wattshift")
    (interval,) = report["resources"][0]["intervals"]
    assert interval["payloads"][0] == {"type": "USAGE", "values": [pytest.approx(1.0, abs=0.001)]}


@pytest.mark.parametrize(("ago_s", "lacks_s", "is_sent"), [(20, 15, False), (20, 0, True), (601, 900, True)])
async def test_a_report_waits_for_the_last_lines_and_not_for_ever(
    world: World, vtn: tuple[Vtn, str], ago_s: float, lacks_s: float, is_sent: bool
) -> None:
    server, url = vtn
    await node(world)
    asked = event(limit("SIMPLE", 2), intervalPeriod=now("PT1H"), reportDescriptors=[{"payloadType": "USAGE"}])
    server.events = [asked]
    async with aiohttp.ClientSession() as session:
        await door(world, url).look(session)
        await over(world, ago_s, lacks_s)
        await door(world, url).look(session)
    said = [each["resources"][0] for each in server.reports]
    assert [each["intervalPeriod"]["duration"] for each in said] == [f"PT{3_600 - lacks_s}S"] * is_sent
    used = [each["intervals"][0]["payloads"][0]["values"] for each in said]
    assert used == [[pytest.approx(1 - lacks_s / 3_600, abs=1e-3)]] * is_sent, "it is of the time that it names"


def test_intervals_follow_each_other_unless_they_say_when() -> None:
    later = {"start": (START + timedelta(hours=3)).isoformat(), "duration": "PT30M"}
    units = [{"objectType": "EVENT_PAYLOAD_DESCRIPTOR", "payloadType": "IMPORT_CAPACITY_LIMIT", "units": "MW"}]
    given = event(
        limit("IMPORT_CAPACITY_LIMIT", 2),
        limit("SIMPLE", 0),
        limit("SIMPLE", 3),
        {**limit("IMPORT_CAPACITY_LIMIT", 1.5), "intervalPeriod": later},
        intervalPeriod={"start": START.isoformat(), "duration": "PT15M"},
        payloadDescriptors=units,
    )
    spec = spec_of(Event.model_validate(given), CUTS, "DE")
    assert spec is not None
    assert (spec.start_at, spec.duration_s, spec.zone) == (START, 3.5 * 3600, "DE")
    assert [(step.offset_s, step.cut, step.to_w) for step in spec.steps] == [
        (0, None, 2e6),
        (900, None, 1e12),
        (1800, 0.5, None),
        (2700, None, 1e12),
        (10_800, None, 1.5e6),
    ]


@pytest.mark.parametrize(
    ("text", "seconds"), [("PT1H30M", 5400), ("P1DT0.5S", 86_400.5), ("P9999Y", LONGEST_S), ("P2W", 1_209_600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "P", "PT", "1H", "PT-1H"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="no ISO 8601 duration"):
        duration_s(text)
