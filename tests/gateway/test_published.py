"""``deploy/openapi.json`` is what a running gateway serves."""

import json

from aiohttp import web

from gateway.published import PATH
from tests.gateway.public import a_gateway


async def test_the_published_description_is_that_of_the_running_gateway() -> None:
    async def unused(_: web.Request) -> web.StreamResponse:
        raise AssertionError("the description comes from the gateway itself")

    async with a_gateway(unused) as client:
        served = (await client.get("/openapi.json")).json()

    is_current = json.loads(PATH.read_text()) == served
    assert is_current, "the API has changed: run `.venv/bin/python -m gateway.published`"
