"""Signing out ends the session itself: a copy of its cookie is worth nothing, at any gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from aiohttp import web
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from gateway.dashboard.sessions import AWAY_S, EndedSessions, Session
from services.contracts.streams import ended_session
from services.kit import redis_users
from services.kit.redis import connect
from tests.gateway.public import AWAY, a_gateway
from tests.gateway.test_dashboard import COOKIE, sign_in

VALID_S = 3_600


async def _answers(_: web.Request) -> web.Response:
    return web.json_response({})


@asynccontextmanager
async def two_gateways(redis_url: str) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient, str]]:
    """Yield two gateways of an installation, in both of which the same cookie is used, and its page's token."""
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(a_gateway(_answers, redis_url=redis_url)) for _ in range(2)]
        token = await sign_in(one)
        two.cookies.set(COOKIE, one.cookies[COOKIE])
        assert (await two.get("/v1/jobs")).status_code == 200
        yield one, two, token


async def test_a_copied_cookie_ends_with_the_session_at_every_gateway(redis_url: str) -> None:
    async with two_gateways(redis_url) as (one, two, token):
        copied = one.cookies[COOKIE]
        assert (await one.post("/sign-out", data={"csrf": token})).status_code == 303

        for gateway in (one, two):
            gateway.cookies.clear()
            for path in ("/v1/jobs", "/jobs"):
                assert (await gateway.get(path, headers={"cookie": f"{COOKIE}={copied}"})).status_code == 401
        await sign_in(one)  # with the same key, again
        assert (await one.get("/v1/jobs")).status_code == 200


async def test_a_sign_out_without_its_token_ends_nothing(redis_url: str) -> None:
    async with two_gateways(redis_url) as (one, two, _):
        assert (await one.post("/sign-out", data={"csrf": "another"})).status_code == 403

        assert (await two.get("/v1/jobs")).status_code == 200


async def test_while_valkey_is_away_a_session_ends_where_one_signs_out() -> None:
    async with a_gateway(_answers, redis_url=AWAY) as client:
        token = await sign_in(client)
        copied = client.cookies[COOKIE]
        assert (await client.post("/sign-out", data={"csrf": token})).status_code == 303

        assert (await client.get("/v1/jobs", headers={"cookie": f"{COOKIE}={copied}"})).status_code == 401


async def test_the_others_are_told_once_valkey_answers_again(redis: Redis) -> None:
    now_s = 100.0
    away = connect(AWAY)
    ended = EndedSessions(VALID_S, lambda: now_s)
    ended.redis = away
    session, stays = Session.begun("ws_key"), Session.begun("ws_key")
    await ended.end(session)
    assert await ended.has_ended(session)
    assert not await ended.has_ended(stays)
    await away.aclose()
    ended.redis = redis
    assert not await redis.exists(ended_session(session.id))

    now_s += AWAY_S
    await ended.tell()

    others = EndedSessions(VALID_S)
    others.redis = redis
    assert (await others.has_ended(session), await others.has_ended(stays)) == (True, False)
    assert VALID_S - 10 < await redis.ttl(ended_session(session.id)) <= VALID_S


async def test_the_gateways_own_user_may_do_that_and_cannot_undo_it(redis: Redis, redis_url: str) -> None:
    own = connect(redis_url, user=("gateway", redis_users.password("secret", "gateway")))
    ended = EndedSessions(VALID_S)
    ended.redis = own
    session = Session.begun("ws_key")
    await ended.end(session)

    assert await redis.exists(ended_session(session.id))
    assert await ended.has_ended(session)
    with pytest.raises(NoPermissionError):
        await own.delete(ended_session(session.id))
    await own.aclose()
