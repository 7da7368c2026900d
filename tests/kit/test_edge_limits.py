"""Rate limits: one bucket per tenant, stated in headers."""

import pytest

from services.contracts.identity import TenantLimits
from services.kit.edge.limits import RateLimiter
from services.kit.problems import ProblemError


class Clock:
    """A clock that only the test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _taken(limiter: RateLimiter, limits: TenantLimits, times: int, tenant: str = "t") -> int:
    """Return how many of ``times`` requests are let through."""
    passed = 0
    for _ in range(times):
        try:
            limiter.take(tenant, limits)
            passed += 1
        except ProblemError as error:
            if error.status != 429:
                raise
    return passed


def test_a_burst_then_the_rate() -> None:
    clock = Clock()
    limiter, limits = RateLimiter(clock), TenantLimits(requests_per_s=10, burst=20)
    assert _taken(limiter, limits, 100) == 20
    clock.now_s += 0.5
    assert _taken(limiter, limits, 100) == 5
    clock.now_s += 3_600
    assert _taken(limiter, limits, 100) == 20


def test_tenants_do_not_share() -> None:
    limiter, limits = RateLimiter(Clock()), TenantLimits(requests_per_s=1, burst=1)
    assert [_taken(limiter, limits, 2, tenant) for tenant in ("a", "b")] == [1, 1]


def test_a_slow_tenant_is_told_when_to_come_back() -> None:
    limiter, limits = RateLimiter(Clock()), TenantLimits(requests_per_s=0.1, burst=1)
    limiter.take("t", limits)
    with pytest.raises(ProblemError) as caught:
        limiter.take("t", limits)
    assert caught.value.headers["retry-after"] == "10"


def test_what_is_left_is_told() -> None:
    limiter, limits = RateLimiter(Clock()), TenantLimits(requests_per_s=10, burst=20)
    assert dict(limiter.take("t", limits)) == {
        b"ratelimit-policy": b'"tenant";q=20;w=2',
        b"ratelimit": b'"tenant";r=19;t=1',
    }


def test_new_limits_hold_at_once() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    assert _taken(limiter, TenantLimits(requests_per_s=1, burst=5), 9) == 5
    assert _taken(limiter, TenantLimits(requests_per_s=1, burst=50), 9) == 0  # a larger bucket is not a full one
    clock.now_s += 60
    assert _taken(limiter, TenantLimits(requests_per_s=1, burst=50), 99) == 50
    assert _taken(limiter, TenantLimits(requests_per_s=100, burst=2), 9) == 0
    clock.now_s += 1
    assert _taken(limiter, TenantLimits(requests_per_s=100, burst=2), 9) == 2
