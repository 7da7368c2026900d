"""Callers: their tenants, users, roles, keys and limits."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from services.contracts.schema import Account, Flag, Instant, Int, Message, Name, Real, Text

REQUEST_ID_HEADER = "x-request-id"
IDEMPOTENCY_HEADER = "idempotency-key"


class Role(StrEnum):
    """What a key may do: a user acts for its tenant, an operator for the cluster; an admin also manages keys.

    A read-only key sees what a user sees and changes nothing.
    """

    READ_ONLY = "read_only"
    USER = "user"
    OPERATOR = "operator"
    ADMIN = "admin"

    @property
    def is_operators(self) -> bool:
        """Whether a key with this role sees and steers the whole cluster."""
        return self.includes(Role.OPERATOR)

    def includes(self, other: Role) -> bool:
        """Whether a key with this role may do whatever one with ``other`` may."""
        return _RANKS[self] >= _RANKS[other]

    def may(self, method: str, needed: Role) -> bool:
        """Whether a key with this role may send a request of this HTTP method to a route that needs ``needed``."""
        if self is Role.READ_ONLY and needed is Role.USER:
            return method in ("GET", "HEAD")
        return self.includes(needed)


_RANKS = {Role.READ_ONLY: -1, Role.USER: 0, Role.OPERATOR: 1, Role.ADMIN: 2}


class Identity(Message):
    """The caller of a request, as authenticated by the gateway."""

    tenant_id: str
    role: Role
    key_id: str
    user_id: str | None = Field(default=None, description="Whose key it is; null for a key of no user.")
    project: str | None = Field(default=None, description="The only project that the caller reaches; null: all.")

    @property
    def is_operator(self) -> bool:
        """Whether the caller sees and steers the whole cluster."""
        return self.role.is_operators

    def sees(self, tenant_id: str, project: str) -> bool:
        """Whether the caller may see what belongs to a project of a tenant."""
        return self.is_operator or (self.tenant_id == tenant_id and self.project in (None, project))


class TenantLimits(Message):
    """What a tenant may use."""

    max_active_jobs: Int = Field(default=100_000, ge=0, description="Maximum number of jobs that have not ended.")
    max_gpus: Int | None = Field(
        default=None, ge=0, description="Maximum number of GPUs held at once; null for no limit."
    )
    share_weight: Real = Field(
        default=1.0,
        gt=0,
        le=1_000_000,
        description="The tenant's weight in sharing the GPUs with others, under policies that share between "
        "tenants (`fair+` before a policy's name).",
    )
    requests_per_s: Real = Field(
        default=2_000, gt=0, le=1_000_000, description="Sustained rate of requests at the gateway."
    )
    burst: Int = Field(
        default=4_000, ge=1, le=1_000_000, description="Requests that the tenant may make at once after a pause."
    )


class TenantSpec(Message):
    """A new tenant."""

    id: Name
    limits: TenantLimits = TenantLimits()


class Tenant(TenantSpec):
    """A tenant."""

    created_at: Instant


class TenantList(Message):
    """One page of tenants, by id."""

    items: list[Tenant]
    next_cursor: str | None = None


class TenantLimitsChange(Message):
    """The limits to change. Those left out stay as they are; `max_gpus: null` removes that limit."""

    max_active_jobs: Int | None = Field(default=None, ge=0)
    max_gpus: Int | None = Field(default=None, ge=0)
    share_weight: Real | None = Field(default=None, gt=0, le=1_000_000)
    requests_per_s: Real | None = Field(default=None, gt=0, le=1_000_000)
    burst: Int | None = Field(default=None, ge=1, le=1_000_000)

    def applied_to(self, limits: TenantLimits) -> TenantLimits:
        """Return ``limits`` with the changes made."""
        given = self.model_dump(exclude_unset=True)
        changes = {name: value for name, value in given.items() if value is not None or name == "max_gpus"}
        return limits.model_copy(update=changes)


class TenantChange(Message):
    """What to change about a tenant."""

    limits: TenantLimitsChange


class UserSpec(Message):
    """A new user of a tenant."""

    name: Name
    account: Account | None = Field(
        default=None,
        description="Account of the operating system that the user's jobs run as on nodes; null: its tenant's.",
    )


class UserChange(Message):
    """What to change about a user; what is left out stays as it is."""

    account: Account | None = Field(default=None, description="Null: its tenant's.")
    disabled: Flag = Field(default=False, description="Whether the user's keys are refused.")


class User(UserSpec):
    """Somebody who submits jobs."""

    id: str
    tenant_id: str
    created_at: Instant
    disabled_at: Instant | None = Field(default=None, description="Since when the user's keys are refused.")


class UserList(Message):
    """One page of a tenant's users, by name."""

    items: list[User]
    next_cursor: str | None = None


class OwnIdentity(Message):
    """The caller, by its key."""

    tenant_id: str
    role: Role
    key_id: str
    project: str | None = Field(default=None, description="The only project that the key reaches; null: all.")
    user: str | None = Field(default=None, description="Name of the user whose key it is; null for a key of no user.")
    account: str | None = Field(
        default=None, description="Account that the caller's jobs run as on nodes; null: its tenant's."
    )


class KeySpec(Message):
    """A new API key."""

    tenant_id: Name
    role: Role = Role.USER
    label: Text = Field(default="", max_length=100)
    user: Name | None = Field(default=None, description="Name of the user of the tenant whose key it is.")
    project: Name | None = Field(
        default=None,
        description="The only project whose jobs, reports and budgets the key reaches; null: all of the tenant's.",
    )
    expires_at: Instant | None = Field(default=None, description="When the key stops working; null: never.")


class KeyChange(Message):
    """When a key stops working; a time in the past ends it now, null lets it work until it is revoked."""

    expires_at: Instant | None


class KeyRotation(Message):
    """How a key is replaced."""

    overlap_s: Real = Field(
        default=0, ge=0, le=366 * 86_400, description="How long the old key still works beside the new one."
    )
    expires_at: Instant | None = Field(default=None, description="When the new key stops working; null: never.")


class ApiKey(Message):
    """An API key as listed, without its secret."""

    id: str
    tenant_id: str
    role: Role
    label: str
    user: str | None = None
    project: str | None = None
    created_at: Instant
    revoked_at: Instant | None = None
    expires_at: Instant | None = None
    last_used_at: Instant | None = Field(
        default=None, description="To within a minute, while requests are made with it; null: never used."
    )


class KeyList(Message):
    """One page of keys, newest first, including revoked ones."""

    items: list[ApiKey]
    next_cursor: str | None = None


class NewApiKey(ApiKey):
    """A new API key. Its secret is shown here and never again."""

    secret: str


class KeyLookup(Message):
    """Asks admission whose key has this hash. The key itself is never sent."""

    key_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class ResolvedKey(Message):
    """The identity behind a key, and its tenant's limits."""

    identity: Identity
    limits: TenantLimits
    expires_at: Instant | None = None


class AuditEntry(Message):
    """An action of an operator or admin."""

    at: Instant
    tenant_id: str
    key_id: str
    action: str = Field(description="`key.created`, `tenant.changed`, `job.cancelled`, ...")
    target: str
    data: dict[str, Any] = Field(default_factory=dict[str, Any])


class AuditList(Message):
    """One page of the audit log, newest first."""

    items: list[AuditEntry]
    next_cursor: str | None = None
