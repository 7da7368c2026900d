"""Limits of tenants over several gateways: one limit, whatever becomes of a gateway or of Valkey.

The rate is so low that no request is paid off while a test runs: what is let through is counted exactly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from services.contracts.identity import TenantLimits
from services.contracts.routing import LimitsState
from services.contracts.streams import GATEWAY_LIMITS_HASH, HINTS_STREAM, ROUTER_LIMITS_HASH
from services.kit import redis_users
from services.kit.redis import connect
from tests.gateway.conftest import Front
from tests.gateway.public import a_gateway, authorization
from tests.support.control_plane import eventually
from tests.support.ports import Ports
from tests.support.servers import running, scratch_folder, tcp_valkey, tcp_valkey_url
from tests.support.services import Services

BURST = 12
LIMITS = TenantLimits(requests_per_s=0.0001, burst=BURST)
JOBS = "/v1/jobs"


async def _answers(_: web.Request) -> web.Response:
    return web.json_response({})


@asynccontextmanager
async def two_gateways(redis_url: str) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        one, two = [
            await stack.enter_async_context(a_gateway(_answers, limits=LIMITS, redis_url=redis_url)) for _ in range(2)
        ]
        yield one, two


async def passed(client: httpx.AsyncClient, times: int, headers: dict[str, str] | None = None) -> int:
    """Return how many of so many requests were let through; what was not has the right answer."""
    codes = [(await client.get(JOBS, headers=headers or authorization())).status_code for _ in range(times)]
    assert set(codes) <= {200, 429}
    return codes.count(200)


async def states(redis: Redis) -> dict[str, LimitsState]:
    found = await redis.hgetall(GATEWAY_LIMITS_HASH)  # pyright: ignore[reportGeneralTypeIssues]
    return {str(name): LimitsState.model_validate_json(document) for name, document in found.items()}


async def told(redis: Redis, gateways: int = 2) -> None:
    """Return once so many gateways have heard what all of them had let through by now.

    A gateway writes before it reads. Its first write from now on may have been made before, its second is up to date;
    once all have made that, its third one comes with what they have written, and with its fourth that is taken in.
    """
    for _ in range(4):
        before = {name: state.at_s for name, state in (await states(redis)).items()}

        async def have_written(before: dict[str, float] = before) -> bool:
            after = await states(redis)
            return sum(state.at_s > before.get(name, 0) for name, state in after.items()) >= gateways

        await eventually(have_written)


async def test_two_gateways_let_through_as_much_as_one(redis: Redis, redis_url: str) -> None:
    async with two_gateways(redis_url) as (one, two):
        await told(redis)
        assert (await passed(one, 3), await passed(two, 2)) == (3, 2)
        await told(redis)
        assert await passed(one, BURST) == BURST - 5
        await told(redis)
        assert await passed(two, BURST) == 0
    assert await states(redis) == {}, "they have left"


async def test_the_gateways_user_may_share_limits_and_nothing_else(redis: Redis, redis_url: str) -> None:
    own = redis_users.with_user(redis_url, "gateway", redis_users.password("secret", "gateway"))
    async with two_gateways(own):
        await told(redis)
    assert await states(redis) == {}, "they have left"
    as_gateway = connect(own)
    for asked in (
        as_gateway.hgetall(ROUTER_LIMITS_HASH),
        as_gateway.xadd(HINTS_STREAM, {"kind": "job"}),
        as_gateway.delete(GATEWAY_LIMITS_HASH),
        as_gateway.acl_list(),
    ):
        with pytest.raises(NoPermissionError):
            await asked  # pyright: ignore[reportGeneralTypeIssues]
    await as_gateway.aclose()


async def test_what_was_too_much_is_paid_off(redis: Redis, redis_url: str) -> None:
    """Two that had not told each other yet let through a burst each, which is the bound; both owe what was too much."""
    async with two_gateways(redis_url) as (one, two):
        await told(redis)
        let_through = await passed(one, BURST) + await passed(two, BURST)
        assert BURST <= let_through <= 2 * BURST
        await told(redis)
        refused = [await client.get(JOBS, headers=authorization()) for client in (one, two)]
    owed = let_through - BURST
    for answer in refused:
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) > (owed + 0.9) / LIMITS.requests_per_s


async def test_without_valkey_each_gateway_limits_alone_and_with_it_they_share_again() -> None:
    ports = Ports()
    with scratch_folder() as folder:
        port = ports.take(26_500)
        server = tcp_valkey(folder / "valkey", port)
        redis = connect(url := tcp_valkey_url(port))
        with running(server) as process:
            async with two_gateways(url) as (one, two):
                await told(redis)
                assert (await passed(one, 1), await passed(two, 1)) == (1, 1)
                await told(redis)
                process.kill()
                process.wait()
                assert await passed(one, BURST) == BURST - 2
                assert await passed(two, BURST) == BURST - 2
                with running(server):
                    await told(redis)
                    refused = await one.get(JOBS, headers=authorization())
        await redis.aclose()
    ports.release()
    assert int(refused.headers["retry-after"]) > (BURST - 2) / LIMITS.requests_per_s, "it owes what the other one took"


async def test_a_killed_gateway_takes_nothing_with_it(front: Front, redis: Redis) -> None:
    caller = await front.key_for("two-gateways", requests_per_s=LIMITS.requests_per_s, burst=BURST)
    second = Services(Path(front.services.folder), dict(front.services.environment))
    with second.started("gateway.app", ready_path="/healthz") as killed:
        async with httpx.AsyncClient(base_url=second.urls["GATEWAY"], timeout=30) as client:
            await told(redis)
            assert (await passed(client, 1, caller), await passed(front.client, 1, caller)) == (1, 1)
            assert await passed(client, 4, caller) == 4
            await told(redis)
            killed.kill()
            assert await passed(front.client, BURST, caller) == BURST - 6
        killed.start()
        await told(redis)
        async with httpx.AsyncClient(base_url=second.urls["GATEWAY"], timeout=30) as client:
            assert await passed(client, 2 * BURST, caller) == BURST, "one that was started counts as one more"
        assert await passed(front.client, 1, caller) == 0
    second.ports.release()
