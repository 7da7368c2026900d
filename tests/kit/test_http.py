"""The client between services, against a real server on loopback."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from services.contracts.codes import ProblemCode
from services.contracts.problems import MEDIA_TYPE
from services.kit import scraping
from services.kit.http import ServiceClient, new_session
from services.kit.problems import ProblemError, not_found
from services.kit.scraping import place_of, scraped
from services.kit.sockets import SOCKETS
from services.kit.tokens import Outgoing

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

TOKENS = Outgoing("gateway", "carbon", b"k" * 32, clock_s=lambda: 1_000.0)


@asynccontextmanager
async def a_peer(handler: Handler, *, timeout_s: float = 5) -> AsyncIterator[ServiceClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with new_session() as session:
        yield ServiceClient(session, f"http://127.0.0.1:{port}", "the peer", tokens=TOKENS, timeout_s=timeout_s)
    await runner.cleanup()


def answering(*statuses: int) -> tuple[Handler, list[str]]:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        status = statuses[min(len(asked), len(statuses) - 1)]
        asked.append(f"{request.method} {request.headers['authorization']}")
        return web.Response(status=status, text="fine")

    return handle, asked


async def test_a_safe_request_is_tried_again() -> None:
    handler, asked = answering(503, 502, 200)
    async with a_peer(handler) as peer:
        assert await peer.request("GET", "/x") == b"fine"
    assert asked == [f"GET {TOKENS.authorization()}"] * 3


async def test_an_answer_that_is_larger_than_any_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()  # of a length that is not announced
        await answer.prepare(request)
        await answer.write(b"x" * 1_001)
        return answer

    monkeypatch.setattr(scraping, "LARGEST_BYTES", 1_000)
    async with a_peer(handle) as peer, new_session() as session:
        assert len(await peer.request("GET", "/x")) == 1_001
        peer._most_bytes = 1_000
        with pytest.raises(ProblemError) as caught:
            await peer.request("GET", "/x", attempts=1)
        assert await scraped(session, f"{peer._base_url}/metrics", {}) is None
    assert caught.value.status == 503


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_no_answer(status: int) -> None:
    """Cells and nodes answer this client, and what it asks for next would be theirs to choose."""
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=status if len(asked) == 1 else 200, headers={"location": "/elsewhere"})

    async with a_peer(handler=handle) as peer:
        with pytest.raises(ProblemError) as caught:
            await peer.request("GET", "/x")
    assert (caught.value.status, asked) == (503, ["/x"])


@pytest.mark.parametrize(("status", "tries"), [(503, 4), (404, 1), (500, 1)])
async def test_what_stays_wrong_is_a_problem(status: int, tries: int) -> None:
    handler, asked = answering(status)
    async with a_peer(handler) as peer:
        with pytest.raises(ProblemError) as caught:
            await peer.request("GET", "/x")
    assert (caught.value.problem_code, len(asked)) == (ProblemCode.UNAVAILABLE, tries)


async def test_a_post_is_sent_once_unless_said_otherwise() -> None:
    handler, asked = answering(503, 200)
    async with a_peer(handler) as peer:
        with pytest.raises(ProblemError):
            await peer.request("POST", "/x")
        assert await peer.request("POST", "/x", retry=True) == b"fine"
    assert len(asked) == 2


@pytest.mark.parametrize(("status", "passed_on"), [(404, 404), (520, 520), (700, 503)])
async def test_the_peers_own_problem_is_passed_on_where_its_status_is_one(status: int, passed_on: int) -> None:
    async def handle(_: web.Request) -> web.Response:
        document = not_found("job").document().model_dump_json()
        return web.Response(status=status, text=document, content_type=MEDIA_TYPE)

    async with a_peer(handle) as peer:
        with pytest.raises(ProblemError) as caught:
            await peer.request("POST", "/x")
    assert caught.value.document().status == passed_on
    assert status != 404 or caught.value.problem_code == ProblemCode.NOT_FOUND


async def test_a_peer_that_does_not_answer_is_given_up() -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with a_peer(hang, timeout_s=0.1) as peer:
        with pytest.raises(ProblemError) as caught:
            await peer.request("GET", "/x", attempts=2)
    assert caught.value.status == 503


async def test_services_of_one_machine_are_reached_by_their_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def who(request: web.Request) -> web.Response:
        return web.Response(text=f"{request.method} {request.path_qs} of {request.host}")

    monkeypatch.setenv(SOCKETS, str(tmp_path))
    runner = web.AppRunner(app := web.Application(), shutdown_timeout=0.1)
    app.router.add_route("*", "/{path:.*}", who)
    await runner.setup()
    sites = [web.UnixSite(runner, tmp_path / f"{name}.sock") for name in ("carbon", "telemetry")]
    for site in sites:
        await site.start()
    async with new_session() as session:
        carbon, telemetry, nobody = (
            ServiceClient(session, f"unix://{name}", name) for name in ("carbon", "telemetry", "nobody")
        )
        assert await carbon.request("GET", "/v1/a b", params={"zone": "DE"}) == b"GET /v1/a%20b?zone=DE of carbon"
        assert (await telemetry.request("POST", "/v1/x")).startswith(b"POST /v1/x of ")
        assert await scraped(session, "unix://carbon/metrics", {}) == "GET /metrics of carbon"
        await runner.cleanup()
        for each in (carbon, nobody):  # it has ended; it was never there
            with pytest.raises(ProblemError, match="does not answer") as raised:
                await each.request("POST", "/v1/x")
            assert raised.value.status == 503
    assert place_of("unix://carbon") == "carbon"
