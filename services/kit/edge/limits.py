"""Limits: a token bucket per tenant, or per address for callers without a key, and what is open at the same time."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from services.contracts.codes import ProblemCode
from services.contracts.identity import TenantLimits
from services.kit.edge.exchange import Header
from services.kit.networks import peer_network
from services.kit.problems import ProblemError


@dataclass(slots=True)
class _Bucket:
    rate: float
    burst: int
    tokens: float
    at_s: float
    policy: Header
    taken: int = 0


MOST_ADDRESSES = 10_000  #: Addresses remembered at once; the one that has been silent longest is forgotten first


class RateLimiter:
    """Counts requests per tenant, and what keys may use per minute, in this process.

    Changed limits take effect with the next request.
    Processes that share a limit exchange what they have ``taken``, and ``charge`` what the others have.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._buckets: dict[str, _Bucket] = {}

    def take(self, tenant_id: str, limits: TenantLimits) -> list[Header]:
        """Count a request; return the headers that say how much is left.

        The headers are those of draft-ietf-httpapi-ratelimit-headers.

        Raises:
            ProblemError: 429, with the time after which the tenant may send requests again.
        """
        now_s = self._clock_s()
        bucket = self._buckets.get(tenant_id)
        if bucket is None or bucket.rate != limits.requests_per_s or bucket.burst != limits.burst:
            bucket = self._buckets[tenant_id] = self._refit(bucket, limits, now_s)
        tokens = min(bucket.burst, bucket.tokens + (now_s - bucket.at_s) * bucket.rate)
        bucket.at_s = now_s
        if tokens < 1:
            bucket.tokens = tokens
            wait_s = max(1, math.ceil((1 - tokens) / bucket.rate))
            raise ProblemError(
                429,
                ProblemCode.RATE_LIMITED,
                f"Tenant {tenant_id} may make {bucket.rate:g} requests per second; try again in {wait_s} s.",
                headers={"retry-after": str(wait_s), "ratelimit": f'"tenant";r=0;t={wait_s}'},
            )
        bucket.tokens = tokens - 1
        bucket.taken += 1
        full_in_s = math.ceil((bucket.burst - bucket.tokens) / bucket.rate)
        return [bucket.policy, (b"ratelimit", b'"tenant";r=%d;t=%d' % (bucket.tokens, full_in_s))]

    def draw(self, name: str, per_min: int, amount: int) -> tuple[float, float, float]:
        """Count ``amount`` of something that is limited per minute; a burst may be as much as a minute's.

        One amount larger than that is let through when a whole minute's is there, and paid off.

        Returns:
            How much is left, in how many seconds it is all there again, and, if this was refused and not counted, in
            how many seconds there will be enough; else 0.
        """
        now_s, rate = self._clock_s(), per_min / 60
        bucket = self._buckets.get(name)
        if bucket is None or bucket.burst != per_min:
            limits = TenantLimits.model_construct(requests_per_s=rate, burst=per_min)
            bucket = self._buckets[name] = self._refit(bucket, limits, now_s)
        bucket.tokens = min(per_min, bucket.tokens + (now_s - bucket.at_s) * rate)
        bucket.at_s = now_s
        wait_s = max(min(amount, per_min) - bucket.tokens, 0.0) / rate
        if not wait_s:
            bucket.tokens -= amount
            bucket.taken += amount
        return bucket.tokens, (per_min - bucket.tokens) / rate, wait_s

    def adjust(self, name: str, more: int) -> None:
        """Count ``more`` than was drawn, less if it is negative."""
        bucket = self._buckets.get(name)
        if bucket is not None:
            bucket.tokens = min(bucket.burst, bucket.tokens - more)
            bucket.taken += more

    def taken(self, within_s: float) -> dict[str, int]:
        """Return how many requests have been let through so far, by tenant.

        A tenant that has sent nothing within ``within_s`` is left out, and its count begins anew.
        """
        oldest_s = self._clock_s() - within_s
        found: dict[str, int] = {}
        for tenant, bucket in self._buckets.items():
            if bucket.at_s < oldest_s:
                bucket.taken = 0
            elif bucket.taken:
                found[tenant] = bucket.taken
        return found

    def charge(self, tenant_id: str, requests: int) -> None:
        """Count requests that other processes let through; any excess is paid off at the tenant's rate.

        Tokens that they counted too many of are negative.

        A tenant that has sent this process nothing yet still begins with a full burst.
        """
        bucket = self._buckets.get(tenant_id)
        if bucket is None:
            return
        now_s = self._clock_s()
        left = min(bucket.burst, bucket.tokens + (now_s - bucket.at_s) * bucket.rate)
        bucket.tokens = min(bucket.burst, left - requests)
        bucket.at_s = now_s

    @staticmethod
    def _refit(old: _Bucket | None, limits: TenantLimits, now_s: float) -> _Bucket:
        rate, burst = limits.requests_per_s, limits.burst
        window_s = max(1, math.ceil(burst / rate))
        return _Bucket(
            rate=rate,
            burst=burst,
            tokens=burst if old is None else min(burst, old.tokens + (now_s - old.at_s) * old.rate),
            at_s=now_s,
            policy=(b"ratelimit-policy", b'"tenant";q=%d;w=%d' % (burst, window_s)),
            taken=0 if old is None else old.taken,
        )


class AddressLimiter:
    """Counts requests per client address; an IPv6 client is its network of 64 bits, which one host may own."""

    def __init__(self, requests_per_s: float, burst: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._requests_per_s, self._burst, self._clock_s = requests_per_s, burst, clock_s
        self._tokens: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._policy: Header = (
            b"ratelimit-policy",
            b'"address";q=%d;w=%d' % (burst, max(1, math.ceil(burst / requests_per_s))),
        )

    def take(self, address: str) -> list[Header]:
        """Count a request; return the headers that say how much is left.

        Raises:
            ProblemError: 429, with the time after which the address may send requests again.
        """
        who, now_s = peer_network(address), self._clock_s()
        left, at_s = self._tokens.pop(who, (float(self._burst), now_s))
        tokens = min(self._burst, left + (now_s - at_s) * self._requests_per_s)
        is_allowed = tokens >= 1
        self._tokens[who] = (tokens - 1 if is_allowed else tokens, now_s)
        if len(self._tokens) > MOST_ADDRESSES:
            self._tokens.popitem(last=False)
        if not is_allowed:
            wait_s = max(1, math.ceil((1 - tokens) / self._requests_per_s))
            raise ProblemError(
                429,
                ProblemCode.RATE_LIMITED,
                f"An address without a key may make {self._requests_per_s:g} requests per second; try again in "
                f"{wait_s} s.",
                headers={"retry-after": str(wait_s), "ratelimit": f'"address";r=0;t={wait_s}'},
            )
        full_in_s = math.ceil((self._burst - tokens + 1) / self._requests_per_s)
        return [self._policy, (b"ratelimit", b'"address";r=%d;t=%d' % (tokens - 1, full_in_s))]


class ConcurrencyLimiter:
    """Counts what each tenant has open at the same time in this process, such as streams or requests."""

    def __init__(self, most: int, what: str, retry_after_s: int = 5) -> None:
        self._most, self._what, self._retry_after_s = most, what, retry_after_s
        self._open: dict[str, int] = {}
        self.elsewhere: Mapping[str, int] = {}  #: What other processes that share the limit reported as open, by tenant

    @property
    def open(self) -> dict[str, int]:
        """What is open in this process, by tenant."""
        return dict(self._open)

    def enter(self, tenant_id: str) -> None:
        """Count one more; ``leave`` ends it; ``ProblemError``: 429 if the tenant already has as many open as it may."""
        here = self._open.get(tenant_id, 0)
        count = here + self.elsewhere.get(tenant_id, 0) if self.elsewhere else here
        if count >= self._most:
            raise ProblemError(
                429,
                ProblemCode.RATE_LIMITED,
                f"Tenant {tenant_id} has {count} {self._what} open, which is the maximum.",
                headers={"retry-after": str(self._retry_after_s)},
            )
        self._open[tenant_id] = here + 1

    def leave(self, tenant_id: str) -> None:
        """Count one less."""
        left = self._open[tenant_id] - 1
        if left:
            self._open[tenant_id] = left
        else:
            del self._open[tenant_id]

    @contextmanager
    def one_more(self, tenant_id: str) -> Generator[None]:
        """Count one more until the end of the block; errors as for ``enter``."""
        self.enter(tenant_id)
        try:
            yield
        finally:
            self.leave(tenant_id)
