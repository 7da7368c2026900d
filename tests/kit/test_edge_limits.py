"""Rate limits: one bucket per tenant, stated in headers."""

from math import isfinite

import pytest
from pydantic import ValidationError

from services.contracts.identity import TenantLimits, TenantLimitsChange
from services.kit.edge.limits import MOST_ADDRESSES, AddressLimiter, ConcurrencyLimiter, RateLimiter
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


@pytest.mark.parametrize("rate", [5e-324, 1e-320, 1e-300, 1e-9, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("contract", [TenantLimits, TenantLimitsChange])
def test_whatever_rate_a_tenant_may_have_its_requests_can_be_counted(
    rate: float, contract: type[TenantLimits | TenantLimitsChange]
) -> None:
    try:
        given = contract(requests_per_s=rate, share_weight=rate, burst=1_000_000)
    except ValidationError:
        assert rate < 1e-6
        return
    limits = given if isinstance(given, TenantLimits) else given.applied_to(TenantLimits())
    assert isfinite(1 / limits.share_weight)
    assert _taken(RateLimiter(Clock()), limits.model_copy(update={"burst": 3}), 5) == 3
    assert _taken(RateLimiter(Clock()), limits, 5) == 5


def test_a_burst_then_the_rate() -> None:
    clock = Clock()
    limiter, limits = RateLimiter(clock), TenantLimits(requests_per_s=10, burst=20)
    assert _taken(limiter, limits, 100) == 20
    clock.now_s += 0.5
    assert _taken(limiter, limits, 100) == 5
    clock.now_s += 3_600
    assert _taken(limiter, limits, 100) == 20


def test_what_other_processes_let_through_is_charged_and_paid_off() -> None:
    clock = Clock()
    limiter, limits = RateLimiter(clock), TenantLimits(requests_per_s=10, burst=20)
    limiter.charge("t", 15)  # before its first request here: it begins with a full burst
    assert _taken(limiter, limits, 5) == 5
    limiter.charge("t", 25)
    assert (_taken(limiter, limits, 5), limiter.taken(60)) == (0, {"t": 5})
    clock.now_s += 1.5
    assert _taken(limiter, limits, 20) == 5
    assert _taken(limiter, TenantLimits(requests_per_s=20, burst=40), 1) == 0  # a changed limit forgives nothing
    assert limiter.taken(60) == {"t": 10}
    clock.now_s += 61
    assert limiter.taken(60) == {}


def test_who_is_silent_is_forgotten_once_its_limit_is_full_again() -> None:
    clock = Clock()
    limiter, limits = RateLimiter(clock), TenantLimits(requests_per_s=0.1, burst=20)
    _taken(limiter, limits, 15, "gone")
    limiter.draw("key tokens", 60, 600)
    clock.now_s = 70.0
    assert (limiter.taken(60), set(limiter._buckets)) == ({}, {"gone", "key tokens"})
    clock.now_s = 300.0
    assert (limiter.taken(60), set(limiter._buckets)) == ({}, {"key tokens"})
    clock.now_s = 601.0
    assert (limiter.taken(60), limiter._buckets) == ({}, {})
    limiter.adjust("key tokens", 60, 90)  # of a request that took so long
    assert limiter.draw("key tokens", 60, 1)[2] == pytest.approx(31)


def test_a_tenant_whose_limit_changes_keeps_what_it_has_saved() -> None:
    clock = Clock()
    limiter = RateLimiter(clock)
    assert _taken(limiter, TenantLimits(requests_per_s=10, burst=20), 100) == 20
    clock.now_s += 1.0
    assert _taken(limiter, TenantLimits(requests_per_s=100, burst=200), 100) == 10


def test_what_is_open_elsewhere_counts_too() -> None:
    limiter = ConcurrencyLimiter(3, "requests")
    limiter.elsewhere = {"t": 2}
    limiter.enter("t")
    with pytest.raises(ProblemError, match="3 requests open"):
        limiter.enter("t")
    limiter.enter("u")
    assert limiter.open == {"t": 1, "u": 1}


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


def _passed(limiter: AddressLimiter, address: str, times: int) -> int:
    """Return how many of ``times`` requests are let through."""
    refused = 0
    for _ in range(times):
        try:
            limiter.take(address)
        except ProblemError as error:
            refused += error.status == 429
    return times - refused


def test_an_address_has_a_burst_then_the_rate() -> None:
    clock = Clock()
    limiter = AddressLimiter(2, 4, clock)
    assert [_passed(limiter, address, 9) for address in ("192.0.2.1", "192.0.2.2")] == [4, 4]
    clock.now_s += 1
    assert _passed(limiter, "192.0.2.1", 9) == 2
    assert dict(limiter.take("192.0.2.3")) == {
        b"ratelimit-policy": b'"address";q=4;w=2',
        b"ratelimit": b'"address";r=3;t=1',
    }


def test_an_ipv6_host_cannot_ask_from_each_address_of_its_network() -> None:
    limiter = AddressLimiter(2, 4, Clock())
    assert sum(_passed(limiter, f"2001:db8::{host:x}", 1) for host in range(1, 20)) == 4
    assert _passed(limiter, "2001:db8:0:1::1", 9) == 4


def test_addresses_are_forgotten_when_there_are_too_many() -> None:
    limiter = AddressLimiter(2, 1, Clock())
    for number in range(MOST_ADDRESSES + 1):
        limiter.take(f"host-{number}")
    assert _passed(limiter, "host-1", 1) == 0
    assert _passed(limiter, "host-0", 1) == 1
