"""Who is asking: the roles, and the headers by which the gateway tells the services."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from services.contracts.schema import Instant, Int, Message, Name, Real, Text

TENANT_HEADER = "x-wattshift-tenant"
ROLE_HEADER = "x-wattshift-role"
KEY_HEADER = "x-wattshift-key"
REQUEST_ID_HEADER = "x-request-id"
IDEMPOTENCY_HEADER = "idempotency-key"


class Role(StrEnum):
    """What a key may do: a user acts for its tenant, an operator for the cluster, an admin also gives out keys."""

    USER = "user"
    OPERATOR = "operator"
    ADMIN = "admin"

    def includes(self, other: Role) -> bool:
        """Whether a key with this role may do whatever one with ``other`` may."""
        return _RANKS[self] >= _RANKS[other]


_RANKS = {Role.USER: 0, Role.OPERATOR: 1, Role.ADMIN: 2}


class Identity(Message):
    """The caller of a request, as the gateway established it."""

    tenant_id: str
    role: Role
    key_id: str

    @property
    def is_operator(self) -> bool:
        """Whether the caller sees and steers the whole cluster."""
        return self.role in (Role.OPERATOR, Role.ADMIN)


class TenantLimits(Message):
    """What a tenant may use."""

    max_active_jobs: Int = Field(default=100_000, ge=0, description="Jobs neither ended nor cancelled.")
    max_gpus: Int | None = Field(default=None, ge=0, description="GPUs held at once; null for no limit.")
    requests_per_s: Real = Field(
        default=2_000, gt=0, le=1_000_000, description="Sustained request rate at the gateway."
    )
    burst: Int = Field(
        default=4_000, ge=1, le=1_000_000, description="Requests the tenant may make at once after a pause."
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
    """The limits to change; those left out stay as they are, and `max_gpus: null` lifts that one."""

    max_active_jobs: Int | None = Field(default=None, ge=0)
    max_gpus: Int | None = Field(default=None, ge=0)
    requests_per_s: Real | None = Field(default=None, gt=0, le=1_000_000)
    burst: Int | None = Field(default=None, ge=1, le=1_000_000)

    def applied_to(self, limits: TenantLimits) -> TenantLimits:
        """Return `limits` with the changes."""
        given = self.model_dump(exclude_unset=True)
        changes = {name: value for name, value in given.items() if value is not None or name == "max_gpus"}
        return limits.model_copy(update=changes)


class TenantChange(Message):
    """A change of a tenant."""

    limits: TenantLimitsChange


class KeySpec(Message):
    """A new API key."""

    tenant_id: Name
    role: Role = Role.USER
    label: Text = Field(default="", max_length=100)


class ApiKey(Message):
    """An API key as listed: never the secret."""

    id: str
    tenant_id: str
    role: Role
    label: str
    created_at: Instant
    revoked_at: Instant | None = None


class KeyList(Message):
    """One page of keys, newest first; revoked ones are listed too."""

    items: list[ApiKey]
    next_cursor: str | None = None


class NewApiKey(ApiKey):
    """An API key as created: the only time its secret is told."""

    secret: str


class KeyLookup(Message):
    """The gateway's question: whose key is this? Only the hash travels."""

    key_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class ResolvedKey(Message):
    """The answer: an identity and the limits that go with it."""

    identity: Identity
    limits: TenantLimits


class AuditEntry(Message):
    """Something an operator or admin did."""

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
