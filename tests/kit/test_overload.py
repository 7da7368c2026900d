"""A service that is asked for more than it can do says so at once, and recovers."""

from __future__ import annotations

import asyncio

import httpx
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from services.contracts.codes import ProblemCode
from services.contracts.problems import MEDIA_TYPE
from services.kit.overload import OverloadMiddleware


def a_service(goes_on: asyncio.Event, max_requests: int) -> FastAPI:
    app = FastAPI()

    @app.get("/work")
    async def work() -> str:
        await goes_on.wait()
        return "done"

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def parts():
            yield b"begun"
            await goes_on.wait()

        return StreamingResponse(parts())

    @app.get("/fails")
    async def fails() -> None:
        raise RuntimeError

    @app.get("/healthz")
    async def healthz() -> str:
        return "ok"

    app.add_middleware(OverloadMiddleware, max_requests=max_requests, wait_s=lambda _, longest: longest)
    return app


def a_client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://app")


async def test_what_is_beyond_the_limit_is_refused_at_once_and_the_rest_is_done() -> None:
    goes_on = asyncio.Event()
    async with a_client(a_service(goes_on, 3)) as http:
        asked = [asyncio.create_task(http.get("/work")) for _ in range(10)]
        refused, working = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        while len(refused) < 7:
            more, working = await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            refused |= more
        for answer in (task.result() for task in refused):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert answer.headers["content-type"] == MEDIA_TYPE
            assert answer.json()["code"] == ProblemCode.UNAVAILABLE
        assert (await http.get("/healthz")).status_code == 200

        goes_on.set()
        assert [(await task).json() for task in working] == ["done"] * 3
        assert (await http.get("/work")).status_code == 200


async def test_a_request_that_fails_counts_no_longer() -> None:
    async with a_client(a_service(asyncio.Event(), 1)) as http:
        assert [(await http.get("/fails")).status_code for _ in range(3)] == [500] * 3


async def test_a_stream_that_has_begun_keeps_nobody_out() -> None:
    goes_on, begun = asyncio.Event(), asyncio.Event()
    app = a_service(goes_on, 1)

    async def send(message) -> None:
        if message.get("body") == b"begun":
            begun.set()

    async def receive():
        await asyncio.Event().wait()

    scope = {"type": "http", "path": "/stream", "method": "GET", "headers": [], "query_string": b""}
    streaming = asyncio.create_task(app(scope, receive, send))
    await begun.wait()
    async with a_client(app) as http:
        waiting = asyncio.create_task(http.get("/work"))
        goes_on.set()
        assert (await waiting).status_code == 200
    streaming.cancel()
