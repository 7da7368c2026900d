"""How many more active jobs a tenant may have: exact, but without counting them at every submission."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import asyncpg

from services.contracts.codes import ProblemCode
from services.contracts.identity import TenantLimits
from services.kit.problems import ProblemError

# Tenants are locked until the commit, so that no other transaction, in this process or another, accepts jobs for them
# meanwhile. In order of id, because two commits with the same tenants must not deadlock.
LOCK = """
SELECT id, accepted_jobs, last_number, (limits->>'max_active_jobs')::bigint AS limit
FROM tenants WHERE id = ANY($1::text[]) ORDER BY id FOR NO KEY UPDATE
"""
COUNT = "SELECT count(*) FROM jobs WHERE tenant_id = $1 AND state NOT IN ('succeeded', 'failed', 'cancelled')"
RECOUNT_EVERY_S = 0.25


@dataclass(slots=True)
class Account:
    """What a tenant may still submit in this commit."""

    tenant_id: str
    limit: int
    room: int
    last_number: int
    taken: int = 0

    def take(self, jobs: int) -> ProblemError | None:
        """Reserve room for ``jobs``, or return why there is none."""
        if jobs > self.room:
            return ProblemError(
                403,
                ProblemCode.QUOTA_EXCEEDED,
                f"Tenant {self.tenant_id} may have {self.limit} active jobs and has room for {max(self.room, 0)} more.",
            )
        self.room -= jobs
        self.taken += jobs
        return None

    def number(self) -> int:
        """Assign and return the number of the next job or array."""
        self.last_number += 1
        return self.last_number


class _Count(NamedTuple):
    accepted: int
    active: int
    at_s: float


class Accounts:
    """Opens accounts, inside the transaction that uses them.

    Jobs become active only by being accepted, which ``tenants.accepted_jobs`` counts. So a tenant never has more active
    jobs than at the last count plus those accepted since, by any process. Only when that bound reaches the limit are
    they counted again, at most every ``RECOUNT_EVERY_S``: a tenant at its limit may wait that long for room that has
    become free, but never exceeds its limit.
    """

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}

    async def open(self, connection: asyncpg.Connection, wanted: Mapping[str, int]) -> dict[str, Account]:
        """Lock the tenants in ``wanted`` (id -> jobs asked for) and return the accounts of those that exist."""
        accounts: dict[str, Account] = {}
        for tenant_id, accepted, last_number, limit in await connection.fetch(LOCK, list(wanted)):
            limit = TenantLimits().max_active_jobs if limit is None else limit
            count = self._counts.get(tenant_id)
            if count is None or self._bound(count, accepted) + wanted[tenant_id] > limit:
                now_s = time.monotonic()
                if count is None or now_s - count.at_s > RECOUNT_EVERY_S:
                    count = _Count(accepted, int(await connection.fetchval(COUNT, tenant_id) or 0), now_s)
                    self._counts[tenant_id] = count
            accounts[tenant_id] = Account(tenant_id, limit, limit - self._bound(count, accepted), last_number)
        return accounts

    @staticmethod
    def _bound(count: _Count, accepted: int) -> int:
        return count.active + accepted - count.accepted
