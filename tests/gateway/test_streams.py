"""Streams: passed on as they come, closed at both ends."""

import asyncio

import httpx
import pytest
from aiohttp import web

from services.contracts.identity import Role
from tests.gateway.public import a_gateway, authorization

JOB = "/v1/jobs/job_00000000000000000000000000"


class Source:
    """Streams what the test gives it."""

    def __init__(self, content_type: str = "text/event-stream") -> None:
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.closed = asyncio.Event()
        self.content_type = content_type

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": self.content_type, "cache-control": "no-store"})
        await answer.prepare(request)
        try:
            while (piece := await self.pieces.get()) is not None:
                if piece == b"break":
                    assert request.transport
                    request.transport.abort()
                await answer.write(piece)
            return answer
        finally:
            self.closed.set()


async def test_pieces_come_through_one_by_one() -> None:
    source = Source()
    async with (
        a_gateway(source) as client,
        asyncio.timeout(20),
        client.stream("GET", "/v1/events", headers=authorization()) as answer,
    ):
        assert (answer.headers["content-type"], answer.headers["cache-control"]) == ("text/event-stream", "no-store")
        pieces = answer.aiter_raw()
        for text in (b"data: 1\n\n", b": keep-alive\n\n", b"data: 2\n\n"):
            source.pieces.put_nowait(text)
            assert await anext(pieces) == text  # the next one is not even written yet
        source.pieces.put_nowait(None)
        assert [piece async for piece in pieces] == []


async def test_a_client_that_goes_ends_the_stream_at_its_source() -> None:
    source = Source()
    async with a_gateway(source) as client:
        for _ in range(3):
            source.closed.clear()
            async with client.stream("GET", f"{JOB}/events", headers=authorization()) as answer:
                source.pieces.put_nowait(b"data: 1\n\n")
                await anext(answer.aiter_raw())
            await asyncio.wait_for(source.closed.wait(), 10)


async def test_a_client_that_goes_before_the_first_word_does_too() -> None:
    source = Source()
    async with a_gateway(source) as client:
        asking = asyncio.create_task(client.get("/v1/events", headers=authorization()))
        await asyncio.wait({asking}, timeout=0.3)
        asking.cancel()
        await asyncio.wait_for(source.closed.wait(), 10)


async def test_a_source_that_breaks_off_ends_events_cleanly_and_output_visibly() -> None:
    for path, media, is_clean in ((f"{JOB}/events", "text/event-stream", True), (f"{JOB}/logs", "text/plain", False)):
        source = Source(media)
        async with a_gateway(source) as client:
            source.pieces.put_nowait(b"some")
            source.pieces.put_nowait(b"break")
            if is_clean:
                assert (await client.get(path, headers=authorization())).text == "some"
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.get(path, headers=authorization())


async def test_a_silent_source_is_given_up() -> None:
    source = Source()
    async with a_gateway(source, stream_silence_s=0.2) as client:
        source.pieces.put_nowait(b"data: 1\n\n")
        assert (await client.get("/v1/events", headers=authorization())).text == "data: 1\n\n"
        await asyncio.wait_for(source.closed.wait(), 10)


async def test_the_stream_of_a_key_that_is_revoked_ends_before_its_next_piece() -> None:
    source, revoked = Source(), set[Role]()
    async with (
        a_gateway(source, revoked=revoked, key_max_age_s=0.05) as client,
        asyncio.timeout(20),
        client.stream("GET", "/v1/events", headers=authorization()) as answer,
    ):
        pieces = answer.aiter_raw()
        source.pieces.put_nowait(b"data: 1\n\n")
        assert await anext(pieces) == b"data: 1\n\n"
        revoked.add(Role.USER)
        closed = asyncio.create_task(source.closed.wait())
        while not closed.done():
            source.pieces.put_nowait(b"data: 2\n\n")
            await asyncio.wait({closed}, timeout=0.02)
        async for _ in pieces:  # it ends
            pass


async def test_a_tenant_follows_only_so_many_streams() -> None:
    source = Source()
    async with a_gateway(source, max_streams_per_tenant=1) as client:
        async with client.stream("GET", "/v1/events", headers=authorization()) as answer:
            source.pieces.put_nowait(b"data: 1\n\n")
            await anext(answer.aiter_raw())
            refused = await client.get("/v1/events", headers=authorization())
            assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
        await asyncio.wait_for(source.closed.wait(), 10)
        async with client.stream("GET", "/v1/events", headers=authorization()) as answer:
            assert answer.status_code == 200


async def test_a_large_answer_is_whole() -> None:
    content = b"x" * 3_000_000

    async def large(_: web.Request) -> web.StreamResponse:
        return web.Response(body=content, content_type="application/json")

    async with a_gateway(large) as client:
        answer = await client.get(JOB, headers=authorization())
    assert (answer.content, answer.headers["content-length"]) == (content, "3000000")
