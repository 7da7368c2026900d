"""What router processes share: limits of tenants by way of Redis, metrics by way of files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from services.contracts.identity import TenantLimits
from services.contracts.streams import ROUTER_LIMITS_HASH
from services.kit.edge.limits import RateLimiter
from services.kit.problems import ProblemError
from services.kit.redis import connect
from services.router.gate import Gate
from services.router.metrics import Gauge, Metrics
from services.router.settings import RouterSettings
from services.router.shared_limits import SharedLimits
from services.router.shared_metrics import ENDED, MetricsFolder
from tests.support.services import TOKEN

LIMITS = TenantLimits(requests_per_s=10, burst=20)
LABELS = ("llama", "SS", "200")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    found = connect(redis_url)
    await found.delete(ROUTER_LIMITS_HASH)
    yield found
    await found.aclose()


def a_gate(clock: Clock) -> Gate:
    gate = Gate(RouterSettings.model_validate({"service_token": TOKEN, "max_requests_per_tenant": 3}), keys=None)  # type: ignore[arg-type]
    gate.limiter = RateLimiter(clock)
    return gate


def taken(gate: Gate, times: int) -> int:
    passed = 0
    for _ in range(times):
        try:
            gate.limiter.take("t", LIMITS)
            passed += 1
        except ProblemError:
            break
    return passed


async def test_a_tenant_has_one_limit_at_all_processes_but_for_what_they_have_not_told_yet(redis: Redis) -> None:
    clock = Clock()
    gates = [a_gate(clock) for _ in range(3)]
    shared = [SharedLimits(redis, gate, f"r{at}", float(at)) for at, gate in enumerate(gates)]

    async def tell() -> None:
        for _ in range(2):
            for each in shared:
                await each.look(3)

    await tell()
    assert [taken(gate, 5) for gate in gates] == [5, 5, 5]
    await tell()
    assert [taken(gate, 100) for gate in gates] == [5, 5, 5]  # what was left of 20, by three that had not told yet
    await tell()
    assert [taken(gate, 100) for gate in gates] == [0, 0, 0]
    total = 0
    for _ in range(600):  # a minute, in which the mean rate holds
        clock.now_s += 0.1
        total += sum(taken(gate, 100) for gate in gates)
        await tell()
    assert 600 - 3 * LIMITS.burst <= total <= 600 + LIMITS.burst


async def test_what_is_open_at_others_counts_and_a_late_comer_charges_no_history(redis: Redis) -> None:
    clock = Clock()
    first, late = a_gate(clock), a_gate(clock)
    taken(first, 20)
    first.at_once.enter("t")
    first.at_once.enter("t")
    older, newer = SharedLimits(redis, first, "older", 1.0), SharedLimits(redis, late, "newer", 2.0)
    await older.look(2)
    assert taken(late, 1) == 1
    await newer.look(2)
    assert taken(late, 30) == 19
    late.at_once.enter("t")
    with pytest.raises(ProblemError, match="3 requests open"):
        late.at_once.enter("t")
    await newer.look(2)
    clock.now_s += 1
    await older.look(2)  # the newer one's 20, of which 10 are paid off
    assert taken(first, 20) == 0
    await newer.leave()
    assert await redis.hkeys(ROUTER_LIMITS_HASH) == ["older"]


def counted(folder: MetricsFolder) -> tuple[float, float, list[float]]:
    gauges = [Gauge("held", "", ("server",), {}), Gauge("up", "", ("server",), {}, is_summed=False)]
    total, found = folder.read(gauges)
    waits = sum(sum(amounts[:-1]) for _, amounts in total.wait.amounts())
    return total.requests.values.get(LABELS, 0.0), waits, [sum(gauge.values.values()) for gauge in found]


def test_metrics_of_processes_are_added_up_and_stay_when_one_ends(tmp_path: Path) -> None:
    folder = MetricsFolder(tmp_path / "metrics")
    folder.begin()
    for process, requests in (("a", 3), ("b", 4), ("c", 5)):
        metrics = Metrics()
        metrics.requests.add(LABELS, requests)
        metrics.wait.observe(LABELS[:2], 0.3)
        gauges = [Gauge("held", "", ("server",), {("s",): 2.0}), Gauge("up", "", ("server",), {("s",): 1.0})]
        folder.write(process, metrics, gauges)
    assert counted(folder) == (12, 3, [6, 1])

    before = (tmp_path / "metrics" / "a.json").read_bytes()
    folder.end("a")
    assert counted(folder) == (12, 3, [4, 1])
    (tmp_path / "metrics" / "a.json").write_bytes(before)  # as if the folder's owner had been killed meanwhile
    assert counted(folder) == (12, 3, [4, 1])
    folder.end("b")
    folder.end("b")
    assert counted(folder) == (12, 3, [2, 1])
    assert (tmp_path / "metrics" / ENDED).exists()
    folder.begin()
    assert counted(folder) == (0, 0, [0, 0])
