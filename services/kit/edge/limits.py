"""Limits: a token bucket per tenant, or per address for callers without a key, and what is open at the same time."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Self

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
    whose: bytes
    policy: Header
    taken: int = 0

    @classmethod
    def full(cls, whose: bytes, rate: float, burst: int, now_s: float) -> Self:
        policy = b'"%s";q=%d;w=%d' % (whose, burst, max(1, math.ceil(burst / rate)))
        return cls(rate, burst, burst, now_s, whose, (b"ratelimit-policy", policy))

    def fill(self, now_s: float) -> None:
        self.tokens = min(self.burst, self.tokens + (now_s - self.at_s) * self.rate)
        self.at_s = now_s

    def take(self, who: str, now_s: float) -> list[Header]:
        """Count a request; return the headers of draft-ietf-httpapi-ratelimit-headers, which say how much is left.

        Raises:
            ProblemError: 429, with the time after which ``who`` may send requests again.
        """
        self.fill(now_s)
        if self.tokens < 1:
            wait_s = max(1, math.ceil((1 - self.tokens) / self.rate))
            detail = f"{who} may make {self.rate:g} requests per second; try again in {wait_s} s."
            headers = {"retry-after": str(wait_s), "ratelimit": f'"{self.whose.decode()}";r=0;t={wait_s}'}
            raise ProblemError(429, ProblemCode.RATE_LIMITED, detail, headers=headers)
        self.tokens -= 1
        self.taken += 1
        full_in_s = math.ceil((self.burst - self.tokens) / self.rate)
        return [self.policy, (b"ratelimit", b'"%s";r=%d;t=%d' % (self.whose, self.tokens, full_in_s))]


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
        """Count a request; return the headers that say how much is left. ``ProblemError``: 429 if that is nothing."""
        now_s = self._clock_s()
        bucket = self._buckets.get(tenant_id)
        if bucket is None or bucket.rate != limits.requests_per_s or bucket.burst != limits.burst:
            bucket = self._refit(tenant_id, limits.requests_per_s, limits.burst, now_s)
        return bucket.take(f"Tenant {tenant_id}", now_s)

    def draw(self, name: str, per_min: int, amount: int) -> tuple[float, float, float]:
        """Count ``amount`` of something that is limited per minute; a burst may be as much as a minute's.

        One amount larger than that is let through when a whole minute's is there, and paid off.

        Returns:
            How much is left, in how many seconds it is all there again, and, if this was refused and not counted, in
            how many seconds there will be enough; else 0.
        """
        bucket = self._of(name, per_min)
        wait_s = max(min(amount, per_min) - bucket.tokens, 0.0) / bucket.rate
        if not wait_s:
            bucket.tokens -= amount
            bucket.taken += amount
        return bucket.tokens, (per_min - bucket.tokens) / bucket.rate, wait_s

    def adjust(self, name: str, per_min: int, more: int) -> None:
        """Count ``more`` than was drawn, less if it is negative."""
        bucket = self._of(name, per_min)
        bucket.tokens = min(bucket.burst, bucket.tokens - more)
        bucket.taken += more

    def _of(self, name: str, per_min: int) -> _Bucket:
        """Return the bucket of something that is limited per minute, as full as it is now."""
        now_s, bucket = self._clock_s(), self._buckets.get(name)
        if bucket is None or bucket.burst != per_min:
            bucket = self._refit(name, per_min / 60, per_min, now_s)
        bucket.fill(now_s)
        return bucket

    def taken(self, within_s: float) -> dict[str, int]:
        """Return how many requests have been let through so far, by tenant.

        A tenant that has sent nothing within ``within_s`` is left out, and its count begins anew; it is forgotten once
        all of its limit is there again.
        """
        now_s, found = self._clock_s(), dict[str, int]()
        for tenant, bucket in [*self._buckets.items()]:
            if now_s - bucket.at_s <= within_s:
                if bucket.taken:
                    found[tenant] = bucket.taken
            elif bucket.tokens + (now_s - bucket.at_s) * bucket.rate >= bucket.burst:
                del self._buckets[tenant]
            else:
                bucket.taken = 0
        return found

    def charge(self, tenant_id: str, requests: int) -> None:
        """Count requests that other processes let through; any excess is paid off at the tenant's rate.

        Tokens that they counted too many of are negative.

        A tenant that has sent this process nothing yet still begins with a full burst.
        """
        bucket = self._buckets.get(tenant_id)
        if bucket is not None:
            bucket.fill(self._clock_s())
            bucket.tokens = min(bucket.burst, bucket.tokens - requests)

    def _refit(self, name: str, rate: float, burst: int, now_s: float) -> _Bucket:
        bucket = _Bucket.full(b"tenant", rate, burst, now_s)
        if (old := self._buckets.get(name)) is not None:
            bucket.tokens = min(burst, old.tokens + (now_s - old.at_s) * old.rate)
            bucket.taken = old.taken
        self._buckets[name] = bucket
        return bucket


class AddressLimiter:
    """Counts requests per client address; an IPv6 client is its network of 64 bits, which one host may own."""

    def __init__(self, requests_per_s: float, burst: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._requests_per_s, self._burst, self._clock_s = requests_per_s, burst, clock_s
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, address: str) -> list[Header]:
        """Count a request; return the headers that say how much is left. ``ProblemError``: 429 if that is nothing."""
        who, now_s = peer_network(address), self._clock_s()
        bucket = self._buckets.pop(who, None) or _Bucket.full(b"address", self._requests_per_s, self._burst, now_s)
        self._buckets[who] = bucket
        if len(self._buckets) > MOST_ADDRESSES:
            self._buckets.popitem(last=False)
        return bucket.take("An address without a key", now_s)


MOST_BUDGETS = 10_000  #: Budgets whose use is counted; that of the one silent longest begins anew
MOST_SHARED = 500  #: Of which others are told


class MonthCounts:
    """What is used of budgets for a month, by a name for both: ``[used, expected of what is in service]``."""

    def __init__(self) -> None:
        self._own: OrderedDict[str, list[int]] = OrderedDict()
        self.elsewhere: Mapping[str, tuple[int, int]] = {}  #: As other processes reported, together

    def of(self, name: str) -> list[int]:
        """Return this process's counts, to be changed in place."""
        found = self._own.setdefault(name, [0, 0])
        self._own.move_to_end(name)
        if len(self._own) > MOST_BUDGETS:
            self._own.popitem(last=False)
        return found

    def total(self, name: str) -> tuple[int, int]:
        """Return what all processes have counted."""
        (used, expected), others = self.of(name), self.elsewhere.get(name, (0, 0))
        return used + others[0], expected + others[1]

    def told(self) -> dict[str, tuple[int, int]]:
        """Return this process's counts for others, of the budgets that were used last."""
        return {name: (used, expected) for name, (used, expected) in islice(reversed(self._own.items()), MOST_SHARED)}


class ConcurrencyLimiter:
    """Counts what each tenant, or who else, has open at the same time in this process, such as streams or requests."""

    def __init__(self, most: int, what: str, retry_after_s: int = 5, whose: str = "Tenant") -> None:
        self._most, self._what, self._retry_after_s, self._whose = most, what, retry_after_s, whose
        self._open: dict[str, int] = {}
        self.elsewhere: Mapping[str, int] = {}  #: What other processes that share the limit reported as open, by tenant

    @property
    def open(self) -> dict[str, int]:
        return dict(self._open)

    def enter(self, tenant_id: str) -> None:
        """Count one more; ``leave`` ends it; ``ProblemError``: 429 if the tenant already has as many open as it may."""
        here = self._open.get(tenant_id, 0)
        count = here + self.elsewhere.get(tenant_id, 0) if self.elsewhere else here
        if count >= self._most:
            detail = f"{self._whose} {tenant_id} has {count} {self._what} open, which is the maximum."
            later = {"retry-after": str(self._retry_after_s)}
            raise ProblemError(429, ProblemCode.RATE_LIMITED, detail, headers=later)
        self._open[tenant_id] = here + 1

    def leave(self, tenant_id: str) -> None:
        self._open[tenant_id] -= 1
        if not self._open[tenant_id]:
            del self._open[tenant_id]

    @contextmanager
    def one_more(self, tenant_id: str) -> Generator[None]:
        """Count one more until the end of the block; errors as for ``enter``."""
        self.enter(tenant_id)
        try:
            yield
        finally:
            self.leave(tenant_id)
