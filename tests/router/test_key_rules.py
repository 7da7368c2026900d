"""Limits of keys: models and aliases, requests and tokens per minute, budgets, and the priority of a client."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio import Redis

from services.contracts.batches import BATCH_HEADER
from services.contracts.identity import Identity, KeyLimits, ResolvedKey, Role, TenantLimits
from services.core.domain.canaries import share_at
from services.kit.edge.limits import ConcurrencyLimiter, MonthCounts, RateLimiter
from services.kit.edge.shared_limits import ALIVE_S, SharedLimits
from services.router import gate
from tests.router.conftest import Stage, error_of
from tests.router.test_spare import CALLER
from tests.support.app_instances import INFER, an_inference
from tests.support.routers import MODEL, Running, a_routed_pool, a_routed_server, chat
from tests.support.tokens import headers_for

OTHER = "other-7b"


@pytest.fixture
async def limited(stage: Stage) -> Any:
    stage.plane.pools = [a_routed_pool(), a_routed_pool("small", models=[OTHER])]
    stage.plane.servers = [a_routed_server(stage.one), a_routed_server(stage.two, "instance_2", pool="small")]

    async def with_limits(running: Running, **limits: Any) -> Running:
        stage.plane.key_limits = KeyLimits.model_validate(limits)
        await running.adopted()
        return running

    return with_limits


def model_of(body: bytes) -> str:
    return json.loads(body)["model"]


async def test_a_key_names_its_own_models_and_aliases_and_sees_no_others(
    stage: Stage, router: Running, limited: Any
) -> None:
    await limited(router, models=[OTHER], aliases={"gpt-4o": {MODEL: 1}, "nowhere": {"gone": 1}})
    assert error_of(await router.ask()) == (404, "model_not_found")
    assert error_of(await router.ask(json=chat(model="nowhere"))) == (404, "model_not_found")
    assert (await router.ask(json=chat(model=OTHER))).status_code == 200
    answer = await router.ask(json=chat(model="gpt-4o"))
    assert (answer.json()["model"], answer.headers["x-wattshift-model"]) == ("gpt-4o", MODEL)
    assert [model_of(body) for body in stage.one.seen] == [MODEL]
    listed = (await router.http.get("/v1/models")).json()["data"]
    assert [row["id"] for row in listed] == [OTHER, "gpt-4o"]
    assert (await router.http.get("/v1/models/gpt-4o")).status_code == 200
    assert (await router.http.get(f"/v1/models/{MODEL}")).status_code == 404


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/v1/files", "/v1/batches/batch_1"])
async def test_a_key_that_is_limited_to_a_project_reaches_no_model_unless_it_names_some(
    stage: Stage, router: Running, limited: Any, path: str
) -> None:
    stage.plane.project = "birds"
    await limited(router)
    assert error_of(await router.http.get(path)) == (403, "forbidden")
    assert error_of(await router.ask()) == (403, "forbidden")
    assert (await router.ask(INFER, json=an_inference())).status_code == 403
    async with stage.router() as other:
        await limited(other, models=[MODEL])
        assert (await other.ask()).status_code == 200
        assert error_of(await other.ask(json=chat(model=OTHER))) == (404, "model_not_found")


async def test_no_fallback_leads_to_a_model_that_the_key_may_not_name(
    stage: Stage, router: Running, limited: Any
) -> None:
    stage.plane.pools[0] = a_routed_pool(fallback=[OTHER])
    stage.plane.servers = stage.plane.servers[1:]
    await limited(router)
    assert (await router.ask()).headers["x-wattshift-model"] == OTHER
    stage.plane.key_limits = KeyLimits(models=[MODEL])
    async with stage.router() as fresh:
        await fresh.adopted()
        assert error_of(await fresh.ask()) == (503, "no_server")


async def test_a_canary_gets_its_share_and_a_session_stays_where_it_is(
    stage: Stage, router: Running, limited: Any
) -> None:
    await limited(router, aliases={MODEL: {MODEL: 3, OTHER: 1}})
    for _ in range(20):
        assert (await router.ask()).json()["model"] == MODEL
    assert abs(len(stage.one.seen) - 15) <= 1
    before = len(stage.one.seen), len(stage.two.seen)
    for _ in range(8):
        await router.ask(headers={"x-session-id": "b"})
    assert sorted((len(stage.one.seen) - before[0], len(stage.two.seen) - before[1])) == [0, 8]


def test_shares_of_an_alias() -> None:
    found = Counter(share_at({"a": 95, "b": 5}, at / 1_000) for at in range(1_000))
    assert found == {"a": 950, "b": 50}
    assert share_at({}, 0.5) is None


def test_counts_of_keys_that_are_gone_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MOST_COUNTS", 3)
    rules, limits = gate.KeyRules(RateLimiter(), MonthCounts()), KeyLimits(aliases={"a": {MODEL: 1, OTHER: 1}})
    for key in ("one", "two", "one", "three", "four"):
        identity = Identity(tenant_id="t", role=Role.USER, key_id=key)
        known = ResolvedKey(identity=identity, limits=TenantLimits(), key_limits=limits)
        assert rules.model(known, "a", None, lambda _: True) in (MODEL, OTHER)
    assert rules._counts == {("one", "a"): 2, ("three", "a"): 1, ("four", "a"): 1}


async def test_requests_beyond_the_minute_of_a_key_get_429_with_openais_headers(router: Running, limited: Any) -> None:
    await limited(router, requests_per_min=2)
    first = await router.ask()
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30s"
    await router.ask()
    refused = await router.ask()
    assert error_of(refused) == (429, "rate_limit_exceeded")
    assert 28 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await router.http.get("/v1/models")).status_code == 200
    of_messages = await router.ask("/v1/messages")
    assert (of_messages.status_code, of_messages.json()["error"]["type"]) == (429, "rate_limit_error")


async def test_tokens_are_charged_as_expected_and_then_as_used(stage: Stage, router: Running, limited: Any) -> None:
    stage.one.sends = {"x-ratelimit-remaining-tokens": "7", "x-ratelimit-remaining-requests": "8"}
    await limited(router, tokens_per_min=1_000)
    stage.one.gate = asyncio.Event()
    first = asyncio.create_task(router.ask(json=chat(max_tokens=400)))
    await stage.one.until(lambda: stage.one.held == 1)
    limiter = router.router.gate.limiter
    reserved = limiter.taken(60)["key_acme tokens"]
    stage.one.gate.set()
    answer = await first
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) == 1_000 - reserved
    assert "x-ratelimit-remaining-requests" not in answer.headers, "the server's limits are not the key's"
    assert limiter.taken(60)["key_acme tokens"] == 16 < reserved, "11 of the prompt, 5 of the answer"
    stage.one.status = 500
    await router.ask()
    assert limiter.taken(60)["key_acme tokens"] == 16, "a failure used none"
    limiter.adjust("key_acme tokens", 1_000, 990)
    refused = await router.ask()
    assert error_of(refused) == (429, "rate_limit_exceeded")
    assert "tokens per minute" in refused.json()["error"]["message"]


async def test_what_is_used_up_is_refused_and_not_to_be_tried_again(stage: Stage, router: Running) -> None:
    stage.plane.excess = "The budget of this key for 2026-11 is 5 gCO2; 6 are used."
    refused = await router.ask()
    assert error_of(refused) == (429, "insufficient_quota")
    assert refused.json()["error"]["type"] == "insufficient_quota"
    assert refused.headers["x-should-retry"] == "false"
    assert stage.one.seen == []
    serving = headers_for("router", CALLER.model_copy(update={"key_id": "key_acme"}), issuer="serving")
    line = await router.ask(headers={BATCH_HEADER: "here", **serving})
    assert error_of(line) == (429, "insufficient_quota"), "batches are no way around a budget"


async def test_a_budget_of_tokens_is_not_exceeded_by_a_burst(stage: Stage, router: Running, limited: Any) -> None:
    """What routers report is counted a minute later: until then a process goes by what it has passed on itself."""
    await limited(router, month_tokens=40)
    stage.one.gate = asyncio.Event()
    first = asyncio.create_task(router.ask(json=chat(max_tokens=400)))
    await stage.one.until(lambda: stage.one.held == 1)
    waits = await router.ask(json=chat(max_tokens=400))
    assert (error_of(waits), waits.headers["retry-after"]) == ((429, "rate_limit_exceeded"), "1")
    stage.one.gate.set()
    assert (await first).status_code == 200
    answers = [await router.ask() for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429], "16 tokens each"
    assert error_of(answers[-1]) == (429, "insufficient_quota")
    assert [*router.router.gate.months.told().values()] == [(48, 0)]


async def test_a_budget_of_tokens_is_one_for_all_routers_and_outlives_one_that_is_killed(redis: Redis) -> None:
    """Each is told before the next request: what is refused, and as what, is as if there were one router."""
    key = ResolvedKey(identity=CALLER, limits=TenantLimits(), key_limits=KeyLimits(month_tokens=500))
    outcomes = Counter[str]()
    for seed in range(25):
        rng, now_s = random.Random(seed), [1_000.0]
        routers = list[tuple[gate.KeyRules, SharedLimits, ConcurrencyLimiter, list[Any]]]()
        for at in range(3):
            months, limiter, at_once = MonthCounts(), RateLimiter(), ConcurrencyLimiter(99, "requests")
            known = redis, f"m{seed}", limiter, at_once, f"r{at}", 1_000.0, partial(now_s.__getitem__, 0)
            routers.append((gate.KeyRules(limiter, months), SharedLimits(*known, months), at_once, []))
        used = 0
        for _ in range(60):
            now_s[0] += rng.choice((0.25, 1.0))
            if len(routers) > 1 and rng.random() < 0.02:
                del routers[rng.randrange(len(routers))]
                now_s[0] += ALIVE_S + 0.1
            for _ in range(2):
                for _, shared, *_ in routers:
                    await shared.look()
            rules, _, at_once, open_here = rng.choice(routers)
            expected = sum(each.taken_tokens for *_, inside in routers for each in inside)
            if open_here and rng.random() < 0.5:
                ended = open_here.pop()
                ended.used_tokens = rng.randint(0, 2 * ended.taken_tokens)
                used += ended.used_tokens
                rules.settle(ended)
                at_once.leave("t")
                continue
            asked: Any = SimpleNamespace(key=key, at_utc_s=0.0, taken_tokens=None, used_tokens=0)
            try:
                rules.take_tokens(asked, rng.randint(1, 60))
                open_here.append(asked)
                at_once.enter("t")
                outcome = "taken"
            except gate.DoorError as error:
                outcome = error.code
            wanted = gate.NO_QUOTA if used >= 500 else "rate_limit_exceeded" if used + expected >= 500 else "taken"
            assert outcome == wanted, (seed, used, expected)
            outcomes[outcome] += 1
    assert len(outcomes) == 3


async def test_lines_of_batches_follow_the_models_of_their_key_and_not_its_rates(
    stage: Stage, router: Running, limited: Any
) -> None:
    await limited(router, models=[OTHER], requests_per_min=1, tokens_per_min=1)
    of_acme, of_none = (CALLER.model_copy(update={"key_id": name}) for name in ("key_acme", "key_unknown"))
    for caller, model, status in (
        (of_acme, OTHER, 200),
        (of_acme, OTHER, 200),
        (of_acme, MODEL, 404),
        (of_none, MODEL, 404),
    ):
        headers = {BATCH_HEADER: "here", **headers_for("router", caller, issuer="serving")}
        assert (await router.ask(json=chat(model=model), headers=headers)).status_code == status


async def test_a_clients_priority_counts_only_as_far_as_its_key_may_state_one(stage: Stage, router: Running) -> None:
    await router.adopted()
    await router.ask(json=chat(priority=-5))
    async with stage.router() as other:
        stage.plane.key_limits = KeyLimits(priority=-3)
        await other.adopted()
        for priority in (-5, 2, "high"):
            await other.ask(json=chat(priority=priority))
    assert [json.loads(body)["priority"] for body in stage.one.seen] == [0, -3, 2, 0]


def test_what_is_limited_per_minute_is_drawn_refilled_and_paid_off() -> None:
    now_s = 0.0
    limiter = RateLimiter(lambda: now_s)
    assert limiter.draw("k tokens", 600, 500) == (100.0, 50.0, 0.0)
    assert limiter.draw("k tokens", 600, 200)[2] == pytest.approx(10.0)
    now_s = 50.0
    left, _, wait_s = limiter.draw("k tokens", 600, 6_000)  # more than a minute's, once that is there
    assert (left, wait_s) == (-5_400.0, 0.0)
    limiter.adjust("k tokens", 600, -5_900)
    assert limiter.draw("k tokens", 600, 1) == (499.0, pytest.approx(10.1), 0.0)
    limiter.charge("k tokens", -10_000)
    assert limiter.draw("k tokens", 600, 0)[0] == 600.0, "never more than a minute's"
