"""Model servers that answer what they should not: each request gets one answer or one clear error, in time, and the
next one, from another tenant or to another server, is served as if nothing had been.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.router.streams import StreamReader
from services.router.upstream import MOST_HEAD_BYTES
from tests.router.conftest import Stage, error_of
from tests.support.routers import MODEL, Running, a_key, a_routed_pool, a_routed_server, chat

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FAST = {"first_byte_timeout_s": 0.5, "silence_timeout_s": 0.5, "total_timeout_s": 1.5, "max_answer_bytes": 1_000_000}


def sized(body: bytes, head: bytes = OK) -> bytes:
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


def event(body: Any) -> bytes:
    return chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


@asynccontextmanager
async def a_server(pieces: Iterator[bytes], *, closes: bool = True) -> AsyncIterator[str]:
    """Yield the address of a server that answers every connection with these bytes, whatever is asked."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if not closes:
                await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def served_by(stage: Stage, pieces: Iterator[bytes], **how: bool) -> AsyncIterator[Running]:
    """Yield a router before such a server, and before a good one of another tenant."""
    async with a_server(pieces, **how) as url, stage.router(**FAST) as router:
        stage.plane.pools = [a_routed_pool(), a_routed_pool("umbras", tenant_id="umbra", models=["u"])]
        good = a_routed_server(stage.two, "u1", pool="umbras", tenant_id="umbra")
        stage.plane.servers = [a_routed_server(stage.one, url=url), good]
        await router.adopted()
        yield router
        answer = await router.ask(json=chat(model="u"), key=a_key("umbra"))
        assert answer.status_code == 200, "another tenant pays for it"
        assert router.router.fleet.servers["instance_1"].held == 0
        assert router.router.fleet.servers["instance_1"].origin.busy == set()


REFUSED = {
    "half a body": (sized(b"x" * 100)[:-50], "upstream_closed"),
    "half a chunk": (OK + b"transfer-encoding: chunked\r\n\r\n64\r\nxx", "upstream_closed"),
    "half a head": (OK, "upstream_closed"),
    "no http": (b"\x00\xff\xfe\r\n\r\n", "upstream_malformed"),
    "a length that is none": (OK + b"content-length: -7\r\n\r\n{}", "upstream_malformed"),
    "two lengths": (OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x", "upstream_malformed"),
    "a chunk of any size": (OK + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n", "upstream_malformed"),
    "a header of two lines": (OK + b"x: a\nb\r\n\r\n", "upstream_malformed"),
    "another protocol": (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "upstream_malformed"),
    "a status that is none": (sized(b"{}", b"HTTP/1.1 000 Odd\r\n"), "upstream_malformed"),
    "a status beyond all": (sized(b"{}", b"HTTP/1.1 999 Odd\r\n"), "upstream_malformed"),
    "a very long header": (OK + b"x: " + b"x" * (MOST_HEAD_BYTES + 300_000), "upstream_malformed"),
    "many headers": (OK + b"x: y\r\n" * 100_000 + b"\r\n{}", "upstream_malformed"),
    "a very large body": (sized(b"x" * 2_000_000), "upstream_too_large"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_an_answer_that_is_none_becomes_one_error(stage: Stage, what: str) -> None:
    content, code = REFUSED[what]
    async with served_by(stage, itertools.repeat(content, 1)) as router:
        assert error_of(await router.ask(json=chat(store=True))) == (502, code)


ENDLESS = {
    "headers": (OK, b"x: y\r\n" * 1_000, "upstream_malformed"),
    "one header": (OK + b"x: ", b"x" * 10_000, "upstream_malformed"),
    "interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1_000, "upstream_malformed"),
    "a body": (OK + b"transfer-encoding: chunked\r\n\r\n", chunk(b"x" * 10_000), "upstream_too_large"),
    "a chunk's extension": (OK + b"transfer-encoding: chunked\r\n\r\n5;", b"x" * 10_000, "upstream_malformed"),
    "trailers": (OK + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n", b"x: y\r\n" * 999, "upstream_malformed"),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_an_answer_without_end_is_ended(stage: Stage, what: str) -> None:
    begin, again, code = ENDLESS[what]
    async with served_by(stage, itertools.chain([begin], itertools.repeat(again))) as router:
        assert error_of(await router.ask(json=chat(store=True))) == (502, code)


@pytest.mark.parametrize("sent", [b"", OK, OK + b"content-length: 9\r\n\r\n{"], ids=["nothing", "a head", "a byte"])
async def test_a_server_that_hangs_is_given_up(stage: Stage, sent: bytes) -> None:
    async with served_by(stage, itertools.repeat(sent, 1), closes=False) as router:
        assert error_of(await router.ask(json=chat(store=True))) == (504, "upstream_timeout")


async def test_a_stream_without_end_ends_at_the_limit(stage: Stage) -> None:
    endless = itertools.chain([EVENTS], itertools.repeat(event({"choices": [{"delta": {"content": "x"}}]}) * 10))
    async with served_by(stage, endless) as router:
        answer = await router.ask(json=chat(stream=True))
        assert answer.text.rstrip().endswith("}")
        assert json.loads(answer.text.rstrip().rpartition("data: ")[2])["error"]["code"] == "upstream_broke_off"


async def test_a_client_that_reads_nothing_keeps_no_place(stage: Stage) -> None:
    """Neither while its answer goes on nor once that has ended; the server is not blamed."""
    endless = itertools.chain(
        [EVENTS], itertools.repeat(event({"choices": [{"delta": {"content": "x" * 1_000}}]}) * 99)
    )
    async with a_server(endless) as url, stage.router(total_timeout_s=0.5) as router:
        stage.plane.servers = [a_routed_server(stage.one, url=url, capacity=1)]
        await router.adopted()
        server = router.router.fleet.servers["instance_1"]
        async with router.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            assert (answer.status_code, server.held) == (200, 1)
            await stage.one.until(lambda: server.held == 0)
            assert (router.router.gate.in_flight, server.breaker.failures) == (1, 0)
            text = (await answer.aread()).decode()
        assert json.loads(text.rstrip().rpartition("data: ")[2])["error"]["code"] == "upstream_broke_off"
        await stage.one.until(lambda: not router.router.gate.in_flight)
        await router.router.usage.send(all_windows=True)
        (usage,) = [each for report in stage.plane.usage for each in report.usages]
        assert (usage.requests, server.held, server.breaker.failures) == (1, 0, 0)
        assert usage.share_s < 2.0


PASSED = {
    "an error as a success": b'{"error": {"message": "out of memory", "code": 500}}',
    "no json": b"<html>502 Bad Gateway</html>",
    "nothing": b"",
    "half of json": b'{"choices": [{"message": {"content": "x',
    "deep json": b"[" * 100_000,
    "tokens below zero": b'{"usage": {"prompt_tokens": -7, "completion_tokens": -9}}',
    "tokens beyond all": b'{"usage": {"prompt_tokens": 1e400, "completion_tokens": ' + b"9" * 400 + b"}}",
    "usage that is none": b'{"usage": ["prompt_tokens"]}',
    "bytes": bytes(range(256)),
}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_no_more_tokens_are_believed_than_a_server_can_have_made(stage: Stage, is_stream: bool) -> None:
    body = b'{"choices": [{}], "usage": {"prompt_tokens": 3, "completion_tokens": 9000000}}'
    done = EVENTS + chunk(b"data: " + body + b"\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    async with served_by(stage, itertools.repeat(done if is_stream else sized(body))) as router:
        assert (await router.ask(json=chat(stream=is_stream))).status_code == 200
        await router.router.usage.send(all_windows=True)
        (usage,) = [each for report in stage.plane.usage for each in report.usages]
        assert (usage.input_tokens, usage.output_tokens < 1_000, usage.estimated_requests) == (3, True, 1)


async def test_a_server_whose_name_cannot_be_asked_for_holds_up_no_other(stage: Stage) -> None:
    async with stage.router(probe_s=60) as router:
        await router.adopted()
        odd = a_routed_server(stage.two, "endpoint:odd", pool=None, models=["odd"], url="http://a..b")
        stage.plane.servers = [odd, *stage.plane.servers]
        await router.adopted()
        router.router.fleet.servers["instance_1"].tells_load = True
        await router.router.probe_servers()
        assert not router.router.fleet.servers["instance_1"].tells_load
        assert error_of(await router.ask(json=chat(model="odd"))) == (503, "no_server")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("what", PASSED)
async def test_what_a_server_says_passes_and_is_not_believed(stage: Stage, what: str, is_stream: bool) -> None:
    body = PASSED[what]
    line = b"data: " + body + b"\n\n"
    answered = EVENTS + chunk(line) + b"0\r\n\r\n" if is_stream else sized(body)
    async with served_by(stage, itertools.repeat(answered)) as router:
        answer = await router.ask(json=chat(stream=is_stream))
        assert answer.status_code == 200
        assert body in answer.content
        await router.router.usage.send(all_windows=True)
    usages = [usage for report in stage.plane.usage for usage in report.usages if usage.model == MODEL]
    assert [(usage.requests, usage.input_tokens >= 0, usage.output_tokens >= 0) for usage in usages] == [
        (1, True, True)
    ]


async def test_what_comes_after_an_answer_is_nobodys(stage: Stage) -> None:
    """A second answer that nobody asked for, in the same packet or while the connection waits."""
    twice = itertools.repeat(sized(b'{"first": 1}') + sized(b'{"stolen": 1}', b"HTTP/1.1 418 No\r\n"), 1)
    async with served_by(stage, twice, closes=False) as router:
        answer = await router.ask()
        assert (answer.status_code, answer.json()) == (200, {"first": 1})
        assert router.router.fleet.servers["instance_1"].origin.idle == []


@given(st.lists(st.binary(max_size=60), max_size=20))
@settings(suppress_health_check=list(HealthCheck))
def test_however_a_stream_is_garbled_every_byte_of_it_passes(pieces: list[bytes]) -> None:
    marked = [
        piece.replace(b"\x00", b"\n\n").replace(b"\x01", b"data: ").replace(b"\x02", b'{"usage":') for piece in pieces
    ]
    reader = StreamReader(lambda: pytest.fail("not stated"), wants_usage=False)
    out = b"".join(map(reader.feed, marked)) + bytes(reader._held)
    assert out == b"".join(marked)
