"""Limits that processes share by way of Valkey, with clocks that the tests set."""

from __future__ import annotations

import random

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from services.contracts.identity import TenantLimits
from services.kit.edge.limits import ConcurrencyLimiter, RateLimiter
from services.kit.edge.shared_limits import ALIVE_S, FORGOTTEN_S, SharedLimits
from services.kit.problems import ProblemError
from services.kit.redis import connect

LIMITS = TenantLimits(requests_per_s=10, burst=20)
KEY = "limits-of-tests"


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class One:
    """What one process counts, and shares."""

    def __init__(self, redis: Redis, clock: Clock, name: str, ahead_s: float = 0.0) -> None:
        self.limiter = RateLimiter(clock)
        self.at_once = ConcurrencyLimiter(3, "requests")
        clock.now_s += 0.001
        self.shared = SharedLimits(
            *(redis, KEY, self.limiter, self.at_once, name, clock() + ahead_s), lambda: clock() + ahead_s
        )

    def taken(self, times: int) -> int:
        """Return how many of so many requests are let through."""
        passed = 0
        for _ in range(times):
            try:
                self.limiter.take("t", LIMITS)
                passed += 1
            except ProblemError:
                break
        return passed


async def tell(*processes: One) -> None:
    for _ in range(2):
        for each in processes:
            await each.shared.look()


async def test_a_tenant_has_one_limit_at_all_processes_but_for_what_they_have_not_told_yet(redis: Redis) -> None:
    clock = Clock()
    all_three = [One(redis, clock, f"p{at}") for at in range(3)]
    start_s = clock.now_s

    await tell(*all_three)
    assert [each.taken(5) for each in all_three] == [5, 5, 5]
    await tell(*all_three)
    assert [each.taken(100) for each in all_three] == [5, 5, 5]  # what was left of 20, by three that had not told yet
    await tell(*all_three)
    assert [each.taken(100) for each in all_three] == [0, 0, 0]
    total = 0
    while clock.now_s < start_s + 60:  # a minute, in which the mean rate holds
        clock.now_s += 0.1
        total += sum(each.taken(100) for each in all_three)
        await tell(*all_three)
    assert 600 - 3 * LIMITS.burst <= total <= 600 + LIMITS.burst


async def test_what_is_open_at_others_counts_and_a_late_comer_charges_no_history(redis: Redis) -> None:
    clock = Clock()
    older = One(redis, clock, "older")
    older.taken(20)
    older.at_once.enter("t")
    older.at_once.enter("t")
    newer = One(redis, clock, "newer")
    await older.shared.look()
    assert newer.taken(1) == 1
    await newer.shared.look()
    assert newer.taken(30) == 19
    newer.at_once.enter("t")
    with pytest.raises(ProblemError, match="3 requests open"):
        newer.at_once.enter("t")
    await newer.shared.look()
    clock.now_s += 1
    await older.shared.look()  # the newer one's 20, of which 10 are paid off
    assert older.taken(20) == 0
    await newer.shared.leave()
    assert await redis.hkeys(KEY) == ["older"]  # pyright: ignore[reportGeneralTypeIssues]


async def test_a_killed_process_has_nothing_open_soon_and_is_forgotten(redis: Redis) -> None:
    clock = Clock()
    killed, left = One(redis, clock, "killed"), One(redis, clock, "left")
    for _ in range(3):
        killed.at_once.enter("t")
    await tell(killed, left)
    with pytest.raises(ProblemError, match="3 requests open"):
        left.at_once.enter("t")
    clock.now_s += ALIVE_S + 0.1
    await left.shared.look()
    left.at_once.enter("t")
    clock.now_s += FORGOTTEN_S
    await left.shared.look()
    assert await redis.hkeys(KEY) == ["left"]  # pyright: ignore[reportGeneralTypeIssues]


async def test_what_was_charged_is_not_charged_again_where_redis_lost_it(redis: Redis) -> None:
    clock = Clock()
    one, two = One(redis, clock, "one"), One(redis, clock, "two")
    one.taken(1)
    two.taken(19)
    await tell(one, two)
    assert one.taken(1) == 0
    clock.now_s += FORGOTTEN_S
    await redis.delete(KEY)
    await tell(one, two)
    assert one.taken(30) == 20


async def test_without_redis_the_limits_hold_for_each_process(redis: Redis) -> None:
    clock = Clock()
    one, two = One(redis, clock, "one"), One(redis, clock, "two")
    for _ in range(3):
        two.at_once.enter("t")
    await tell(two, one)
    away = connect("redis://127.0.0.1:1/0")
    one.shared._redis = two.shared._redis = away
    await tell(one, two)
    one.at_once.enter("t")
    assert (one.taken(30), two.taken(30)) == (20, 20)
    one.shared._redis = two.shared._redis = redis
    await tell(one, two)
    assert (one.taken(30), two.taken(30)) == (0, 0)
    clock.now_s += 2.1  # 21 requests, of which each owes 20
    assert one.taken(30) == 1
    await away.aclose()


async def test_one_without_requests_looks_seldom_until_it_has_one(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    quiet, busy = One(redis, clock, "quiet"), One(redis, clock, "busy")
    looks: list[float] = []
    look = quiet.shared._look
    monkeypatch.setattr(quiet.shared, "_look", lambda own: looks.append(clock.now_s) or look(own))
    quiet.taken(1)
    busy.taken(1)

    async def for_s(seconds: float) -> int:
        looks.clear()
        until_s = clock.now_s + seconds
        while clock.now_s < until_s:
            await tell(busy, quiet)
            clock.now_s += 0.25
        return len(looks)

    await for_s(2.5)
    assert await for_s(10) <= 6
    busy.at_once.enter("t")
    busy.taken(15)
    await busy.shared.look()
    assert quiet.taken(1) == 1
    await quiet.shared.look()  # at once, and charges what the other has let through
    assert quiet.at_once.elsewhere == {"t": 1}
    assert quiet.taken(20) <= 20 - 1 - 15
    quiet.at_once.enter("t")
    assert await for_s(10) == 80


async def test_one_without_requests_sees_at_once_what_is_open_no_longer(redis: Redis) -> None:
    clock = Clock()
    quiet, busy = One(redis, clock, "quiet"), One(redis, clock, "busy")
    await tell(quiet, busy)
    for _ in range(3):
        busy.at_once.enter("t")
    clock.now_s += 10
    await tell(busy, quiet)
    assert quiet.at_once.elsewhere == {"t": 3}
    for _ in range(3):
        busy.at_once.leave("t")
    for _ in range(2):
        clock.now_s += 0.25
        await busy.shared.look()
        await quiet.shared.look()
    quiet.at_once.enter("t")  # nothing is open


async def test_tokens_that_turn_out_fewer_than_expected_are_given_back_everywhere(redis: Redis) -> None:
    clock = Clock()
    one, two = One(redis, clock, "one"), One(redis, clock, "two")
    two.limiter.draw("k tokens", 1_000, 0)
    await tell(one, two)
    one.limiter.draw("k tokens", 1_000, 900)
    await tell(one, two)
    assert two.limiter.draw("k tokens", 1_000, 0)[0] == pytest.approx(100, abs=1)
    one.limiter.adjust("k tokens", 1_000, -850)
    await tell(one, two)
    assert two.limiter.draw("k tokens", 1_000, 0)[0] == pytest.approx(950, abs=1)


class Away:
    """A Valkey that answers nobody."""

    def pipeline(self, **_: object) -> None:
        raise RedisConnectionError


class Routers:
    """Processes that share a key's tokens per minute and a tenant's places, each on a machine with its own clock."""

    PER_MIN, MOST, LATE_S = 600, 4, 0.5  #: Tokens, requests at once, and the time of an exchange

    def __init__(self, redis: Redis, seed: int) -> None:
        self.redis, self.draw, self.clock = redis, random.Random(seed), Clock()
        self.made = 0
        self.grants: list[tuple[float, int]] = []  #: When tokens were granted, and how many were used of them
        self.more = 0  #: How many times a process could not know what others had granted
        self.all: list[tuple[One, list[tuple[int, int]]]] = [self.started() for _ in range(self.draw.choice((2, 2, 3)))]

    def started(self) -> tuple[One, list[tuple[int, int]]]:
        self.made += 1
        made = One(self.redis, self.clock, f"r{self.made}", self.draw.choice((0.0, -90.0, 5.0, 3_600.0)))
        made.at_once = made.shared._at_once = ConcurrencyLimiter(self.MOST, "requests")
        return made, []

    async def step(self) -> None:
        """Have requests come and go, a process be started anew, or Valkey lose what it has or be away."""
        draw = self.draw
        match draw.choices(("in", "out", "kill", "empty", "away", "back"), (50, 40, 1, 1, 1, 3))[0]:
            case "in":
                router, held = draw.choice(self.all)
                expected = draw.choice((1, 20, 150, 300))
                try:
                    router.at_once.enter("t")
                except ProblemError:
                    return
                _, _, wait_s = router.limiter.draw("k tokens", self.PER_MIN, expected)
                if wait_s:
                    router.at_once.leave("t")
                else:
                    held.append((len(self.grants), expected))
                    self.grants.append((self.clock.now_s, expected))
            case "out":
                router, held = draw.choice(self.all)
                if held:
                    at, expected = held.pop(draw.randrange(len(held)))
                    used = draw.randint(0, expected)
                    router.at_once.leave("t")
                    router.limiter.adjust("k tokens", self.PER_MIN, used - expected)
                    self.grants[at] = (self.grants[at][0], used)
            case "kill":
                self.all[draw.randrange(len(self.all))] = self.started()
                self.more += 1
            case "empty":
                await self.redis.delete(KEY)
                self.more += len(self.all)
            case "away":
                draw.choice(self.all)[0].shared._redis = Away()  # type: ignore[assignment]
                self.more += len(self.all)
            case _:
                for router, _ in self.all:
                    router.shared._redis = self.redis

    async def exchange(self, seconds: float) -> None:
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.clock.now_s += self.LATE_S / 2
            for router, _ in self.all:
                await router.shared.look()


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 400), marks=pytest.mark.slow)], ids=["few", "many"]
)
async def test_limits_hold_over_routers_whatever_their_clocks_say_and_whoever_goes(redis: Redis, seeds: range) -> None:
    for seed in seeds:
        await redis.delete(KEY)
        routers = Routers(redis, seed)
        for _ in range(150):
            await routers.step()
            await routers.exchange(routers.draw.choice((0, 0.25, 0.5)))
        rate, burst = routers.PER_MIN / 60, routers.PER_MIN
        for first, (start_s, _) in enumerate(routers.grants):
            used = 0
            for at_s, tokens in routers.grants[first:]:
                used += tokens
                most = burst + rate * (at_s - start_s)
                most += (len(routers.all) - 1 + routers.more) * (burst + rate * routers.LATE_S)
                assert used <= most, (seed, "more than one minute's beyond the limit")
        for router, _ in routers.all:
            router.shared._redis = redis
        await routers.exchange(5)
        for router, _ in routers.all:
            others = sum(len(held) for other, held in routers.all if other is not router)
            assert router.at_once.elsewhere.get("t", 0) == others, (seed, "others' requests are not counted")
        if not routers.more:
            for router, held in routers.all:
                for _, expected in held:
                    router.at_once.leave("t")
                    router.limiter.adjust("k tokens", routers.PER_MIN, -expected)
                held.clear()
            for _ in range(6):  # whatever was granted beyond the limit is paid off by then
                routers.clock.now_s += 40
                await routers.exchange(1)
            left = [router.limiter.draw("k tokens", routers.PER_MIN, 0)[0] for router, _ in routers.all]
            assert left == [routers.PER_MIN] * len(left), (seed, "tokens are not given back")
