"""Gathering submissions: few requests, every answer to its own, nothing submitted twice."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.gather import Answer, Entry, Gatherer
from services.contracts.jobs import SubmissionAnswer, SubmissionAnswers, SubmissionRequest
from services.kit.credentials import Credential, roots_of
from services.kit.problems import ProblemError
from services.kit.tokens import Incoming
from tests.gateway.peer import a_peer
from tests.support.tokens import TOKEN, tokens

OF_ADMISSION = Incoming("admission", Credential.derived("admission", roots_of(TOKEN)).secrets)


def an_entry(body: str, key: str | None = None) -> Entry:
    return {"tenant_id": "t", "key_id": "k", "idempotency_key": key, "batch": False, "body": body}


@asynccontextmanager
async def a_gatherer(url: str, **options: Any) -> AsyncIterator[Gatherer]:
    settings = {"group_entries": 10, "group_bytes": 1_000, "groups_in_flight": 2, "timeout_s": 5} | options
    async with aiohttp.ClientSession() as session:
        yield Gatherer(session, url, tokens=tokens("admission"), **settings)


class FakeAdmission:
    """Answers each entry with its own body, and remembers the groups."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self.before_answer: Callable[[web.Request], Awaitable[None]] | None = None

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        caller = OF_ADMISSION.caller(request.headers["authorization"], request.method, request.path)
        assert (caller.service, caller.identity, request.path) == ("gateway", None, "/internal/submissions")
        asked = SubmissionRequest.model_validate_json(await request.read())  # what is sent is what was agreed
        self.groups.append([entry.body for entry in asked.entries])
        if self.before_answer:
            await self.before_answer(request)
        answers = [SubmissionAnswer(status=201, body=entry.body) for entry in asked.entries]
        return web.Response(body=SubmissionAnswers(answers=answers).model_dump_json())


async def _submit_many(gatherer: Gatherer, bodies: list[str]) -> list[Answer]:
    return await asyncio.gather(*(gatherer.submit(an_entry(body)) for body in bodies))


async def test_what_comes_together_travels_together() -> None:
    admission = FakeAdmission()
    async with a_peer(admission) as url, a_gatherer(url) as gatherer:
        bodies = [str(i) for i in range(35)]
        answers = await _submit_many(gatherer, bodies)
    assert [answer["body"] for answer in answers] == bodies
    assert sorted(len(group) for group in admission.groups) == [5, 10, 10, 10]


async def test_large_bodies_travel_in_smaller_groups() -> None:
    admission = FakeAdmission()
    async with a_peer(admission) as url, a_gatherer(url, group_bytes=100) as gatherer:
        await _submit_many(gatherer, ["x" * 60, "y" * 60, "z" * 500, "a" * 50, "b" * 50])
    assert [[body[0] for body in group] for group in admission.groups] == [["x"], ["y"], ["z"], ["a", "b"]]


async def test_only_so_many_requests_are_under_way() -> None:
    admission, under_way, most = FakeAdmission(), 0, 0

    async def count(_: web.Request) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(50):  # turns of the loop in which a third request could come
            await asyncio.sleep(0)
        under_way -= 1

    admission.before_answer = count
    async with a_peer(admission) as url, a_gatherer(url, group_entries=1) as gatherer:
        await _submit_many(gatherer, [str(i) for i in range(20)])
    assert (most, len(admission.groups)) == (2, 20)


async def test_an_admission_that_starts_late_is_waited_for() -> None:
    async def answer_later(gatherer: Gatherer) -> Answer:
        return await gatherer.submit(an_entry("patient"))

    admission = FakeAdmission()
    address = socket.socket()
    address.bind(("127.0.0.1", 0))  # it refuses connections until it listens, and nothing else gets it
    async with a_gatherer(f"http://127.0.0.1:{address.getsockname()[1]}") as gatherer:
        task = asyncio.create_task(answer_later(gatherer))
        await asyncio.wait({task}, timeout=0.3)
        runner = web.AppRunner(app := web.Application())
        app.router.add_post("/internal/submissions", admission.__call__)
        await runner.setup()
        await web.SockSite(runner, address).start()
        assert (await task)["body"] == "patient"
        await runner.cleanup()


async def test_what_may_have_been_received_is_sent_again_only_with_a_key() -> None:
    admission, broken = FakeAdmission(), 1

    async def break_once(request: web.Request) -> None:
        nonlocal broken
        if broken:
            broken -= 1
            assert request.transport
            request.transport.abort()

    admission.before_answer = break_once
    async with a_peer(admission) as url, a_gatherer(url) as gatherer:
        entries = [an_entry("keyed", "k1"), an_entry("bare"), an_entry("also keyed", "k2")]
        answers = await asyncio.gather(*(gatherer.submit(entry) for entry in entries), return_exceptions=True)
    assert isinstance(answers[1], ProblemError)
    assert answers[1].status == 503
    assert [answer["body"] for answer in answers if isinstance(answer, dict)] == ["keyed", "also keyed"]
    assert admission.groups == [["keyed", "bare", "also keyed"], ["keyed", "also keyed"]]


async def test_an_admission_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.gather.RETRY_EVERY_S", 0.001)
    async with a_gatherer("http://127.0.0.1:1") as gatherer:
        answers = await asyncio.gather(*(gatherer.submit(an_entry("x")) for _ in range(5)), return_exceptions=True)
    assert [answer.status for answer in answers if isinstance(answer, ProblemError)] == [503] * 5


@pytest.mark.parametrize("status", [401, 413, 500])
async def test_an_admission_that_refuses_the_group_is_unavailable(status: int) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text="no")

    async with a_peer(refuse) as url, a_gatherer(url) as gatherer:
        with pytest.raises(ProblemError) as caught:
            await gatherer.submit(an_entry("x", "key"))
        assert caught.value.status == 503


async def test_a_client_that_goes_spoils_nothing_for_others() -> None:
    admission, may_answer = FakeAdmission(), asyncio.Event()

    async def wait(_: web.Request) -> None:
        await may_answer.wait()

    admission.before_answer = wait
    async with a_peer(admission) as url, a_gatherer(url) as gatherer:
        tasks = [asyncio.create_task(gatherer.submit(an_entry(str(i)))) for i in range(3)]
        await asyncio.wait(tasks, timeout=0.1)
        tasks[1].cancel()
        may_answer.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [answer["body"] for answer in answers if isinstance(answer, dict)] == ["0", "2"]


async def test_what_a_client_that_has_gone_waited_for_is_not_sent() -> None:
    admission, may_answer = FakeAdmission(), asyncio.Event()

    async def wait(_: web.Request) -> None:
        await may_answer.wait()

    admission.before_answer = wait
    async with a_peer(admission) as url, a_gatherer(url, groups_in_flight=1) as gatherer:
        first = asyncio.create_task(gatherer.submit(an_entry("first")))
        await asyncio.wait({first}, timeout=0.1)
        waiting = [asyncio.create_task(gatherer.submit(an_entry(body, "key"))) for body in ("gone", "stays", "left")]
        await asyncio.sleep(0)
        waiting[0].cancel()
        waiting[2].cancel()
        await asyncio.sleep(0)
        may_answer.set()
        assert (await waiting[1])["body"] == "stays"
        await first
    assert admission.groups == [["first"], ["stays"]]


async def test_it_is_not_sent_again_for_who_has_gone_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.gather.RETRY_EVERY_S", 0.001)
    admission, is_broken, left = FakeAdmission(), True, asyncio.Event()

    async def break_once(request: web.Request) -> None:
        nonlocal is_broken
        if is_broken:
            is_broken = False
            waiting[0].cancel()
            await left.wait()
            assert request.transport
            request.transport.abort()

    admission.before_answer = break_once
    async with a_peer(admission) as url, a_gatherer(url) as gatherer:
        waiting = [asyncio.create_task(gatherer.submit(an_entry(body, body))) for body in ("gone", "stays")]
        waiting[0].add_done_callback(lambda _: left.set())
        assert (await waiting[1])["body"] == "stays"
    assert admission.groups == [["gone", "stays"], ["stays"]]
