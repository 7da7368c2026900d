"""The carbon service's client, against a server that answers page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from services.kit import carbon
from services.kit.carbon import Carbon, TooManyPointsError
from services.kit.http import ServiceClient, new_session


class Pages:
    """Answers each question with the next page, of so many values, and remembers what it was asked."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.asked: list[dict[str, str]] = []

    async def history(self, request: web.Request) -> web.Response:
        at = len(self.asked)
        self.asked.append(dict(request.query))
        first = sum(self.sizes[:at])
        points = [_point(index) for index in range(first, first + self.sizes[at])]
        cursor = f"page-{at + 1}" if at + 1 < len(self.sizes) else None
        answer = {"zone": "Z", "signal": "marginal", "provider": "uk", "points": points, "next_cursor": cursor}
        return web.json_response(answer)


def _point(index: int) -> dict[str, Any]:
    start, end = (datetime.fromtimestamp(3_600 * each, UTC).isoformat() for each in (index, index + 1))
    return {"start_at": start, "end_at": end, "gco2_per_kwh": float(index)}


@pytest.fixture
async def pages() -> Pages:
    return Pages(2, 3, 1)


@pytest.fixture
async def client(pages: Pages) -> AsyncIterator[Carbon]:
    app = web.Application()
    app.router.add_get("/v1/carbon/Z/history", pages.history)
    async with TestServer(app) as server, new_session() as session:
        yield Carbon(ServiceClient(session, f"http://127.0.0.1:{server.port}", "carbon"), attempts=1)


async def test_a_history_is_read_to_its_last_page(pages: Pages, client: Carbon) -> None:
    found = await client.history("Z", 0.0, 6 * 3_600.0, "marginal")

    assert [point.gco2_per_kwh for point in found.points] == [0, 1, 2, 3, 4, 5]
    assert (found.provider, found.next_cursor) == ("uk", None)
    period = {"start": "1970-01-01T00:00:00+00:00", "end": "1970-01-01T06:00:00+00:00", "signal": "marginal"}
    assert [each.pop("cursor", None) for each in pages.asked] == [None, "page-1", "page-2"]
    assert pages.asked == 3 * [{**period, "limit": "10000"}]


async def test_a_history_that_is_too_long_is_refused_and_no_part_of_it_taken(
    client: Carbon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carbon, "MOST_POINTS", 5)
    with pytest.raises(TooManyPointsError):
        await client.history("Z", 0.0, 1.0)


async def test_a_history_of_just_as_many_values_as_there_may_be_is_whole(
    client: Carbon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carbon, "MOST_POINTS", 6)
    assert len((await client.history("Z", 0.0, 1.0)).points) == 6
