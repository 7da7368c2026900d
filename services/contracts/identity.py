"""Callers: their tenants, users, roles, keys and limits."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from services.contracts.grid import Flex
from services.contracts.routing import AccuracyPct, ModelName
from services.contracts.schema import (
    Account,
    Flag,
    Instant,
    Int,
    Message,
    Name,
    Page,
    Positive,
    Real,
    Text,
    is_none,
    maybe,
    said,
)
from services.core.domain.canaries import share_at

REQUEST_ID_HEADER = "x-request-id"
IDEMPOTENCY_HEADER = "idempotency-key"


class Role(StrEnum):
    """What a key may do: a user acts for its tenant, an operator for the cluster; an admin also manages keys.

    A read-only key sees what a user sees and changes nothing. A grid key gives orders of the grid, and reaches nothing
    but those that it gave.
    """

    GRID = "grid"

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
        if needed is Role.GRID:
            return self is Role.GRID or self.is_operators
        if self is Role.READ_ONLY and needed is Role.USER:
            return method in ("GET", "HEAD")
        return self.includes(needed)


_RANKS = {Role.GRID: -2, Role.READ_ONLY: -1, Role.USER: 0, Role.OPERATOR: 1, Role.ADMIN: 2}


class Identity(Message):
    """The caller of a request, as authenticated by the gateway."""

    tenant_id: str
    role: Role
    key_id: str
    user_id: str | None = maybe("Whose key it is; null for a key of no user.")
    project: str | None = maybe("The only project that the caller reaches; null: all.")

    @property
    def is_operator(self) -> bool:
        """Whether the caller sees and steers the whole cluster."""
        return self.role.is_operators

    @property
    def only_tenant(self) -> str | None:
        """The only tenant whose things the caller may see; None: an operator sees those of all."""
        return None if self.is_operator else self.tenant_id

    def sees(self, tenant_id: str, project: str) -> bool:
        """Whether the caller may see what belongs to a project of a tenant."""
        return self.is_operator or (self.tenant_id == tenant_id and self.project in (None, project))


class TenantLimits(Message):
    """What a tenant may use."""

    max_active_jobs: Int = said("Maximum number of jobs that have not ended.", default=100_000, ge=0)
    guaranteed_gpus: Int = said(
        "GPUs that it is guaranteed: its jobs that wait get them, and jobs of others that borrow them and may be "
        "stopped give them back. Guarantees of more GPUs than there are, are all reduced in proportion.",
        default=0,
        ge=0,
    )
    max_gpus: Int | None = maybe("Maximum number of GPUs held at once; null for no limit.", ge=0)
    share_weight: Positive = said(
        "The tenant's weight in sharing the GPUs that are not guaranteed with others, under policies that share "
        "between tenants (`fair+` before a policy's name).",
        default=1.0,
    )
    flex: Flex | None = maybe("`flex` of jobs that do not name one, percent; null: 25.")
    requests_per_s: Positive = said("Sustained rate of requests at the gateway.", default=2_000)
    burst: Int = said("Requests that the tenant may make at once after a pause.", default=4_000, ge=1, le=1_000_000)


class TenantSpec(Message):
    """A new tenant."""

    id: Name
    limits: TenantLimits = TenantLimits()


class Tenant(TenantSpec):
    """A tenant."""

    created_at: Instant


class TenantList(Page[Tenant]):
    """One page of tenants, by id."""


class TenantLimitsChange(Message):
    """The limits to change. Those left out stay as they are; null removes `max_gpus` and `flex`."""

    max_active_jobs: Int | None = Field(default=None, ge=0)
    guaranteed_gpus: Int | None = Field(default=None, ge=0)
    max_gpus: Int | None = Field(default=None, ge=0)
    share_weight: Positive | None = None
    flex: Flex | None = None
    requests_per_s: Positive | None = None
    burst: Int | None = Field(default=None, ge=1, le=1_000_000)

    def applied_to(self, limits: TenantLimits) -> TenantLimits:
        """Return ``limits`` with the changes made."""
        given = self.model_dump(exclude_unset=True)
        changes = {name: value for name, value in given.items() if value is not None or name in ("max_gpus", "flex")}
        return limits.model_copy(update=changes)


class TenantChange(Message):
    """What to change about a tenant."""

    limits: TenantLimitsChange


class UserSpec(Message):
    """A new user of a tenant."""

    name: Name
    account: Account | None = maybe(
        "Account of the operating system that the user's jobs run as on nodes; null: its tenant's."
    )


class UserChange(Message):
    """What to change about a user; what is left out stays as it is."""

    account: Account | None = maybe("Null: its tenant's.")
    disabled: Flag = said("Whether the user's keys are refused.", default=False)


class User(UserSpec):
    """Somebody who submits jobs."""

    id: str
    tenant_id: str
    created_at: Instant
    disabled_at: Instant | None = maybe("Since when the user's keys are refused.")


class UserList(Page[User]):
    """One page of a tenant's users, by name."""


class OwnIdentity(Message):
    """The caller, by its key."""

    tenant_id: str
    role: Role
    key_id: str
    project: str | None = maybe("The only project that the key reaches; null: all.")
    user: str | None = maybe("Name of the user whose key it is; null for a key of no user.")
    account: str | None = maybe("Account that the caller's jobs run as on nodes; null: its tenant's.")
    installation: str | None = maybe("Which installation this is, whatever its address.")


class KeyLimits(Message):
    """What a key may do with models, by way of the router; null: not limited."""

    models: list[ModelName] | None = maybe("The only models that it may name, besides its aliases.", max_length=1_000)
    aliases: dict[ModelName, Annotated[dict[ModelName, Positive], Field(min_length=1, max_length=20)]] | None = maybe(
        "Names of its own, each with the models that answer and their shares of the requests. They come "
        "before models of the same name.",
        max_length=100,
    )
    requests_per_min: Int | None = Field(default=None, ge=1, le=10**9)
    tokens_per_min: Int | None = maybe("Of prompts and answers.", ge=1, le=10**12)
    month_tokens: Int | None = maybe("In a calendar month, in UTC.", ge=0, le=10**15)
    month_gco2: Real | None = maybe("In a calendar month, in gCO2.", ge=0, le=1e15)
    month_cost: Real | None = maybe("In a calendar month, by the prices of `ADMISSION_MODEL_PRICES`.", ge=0, le=1e15)
    least_accuracy_pct: AccuracyPct | None = maybe(
        "Of variants of a model, only those that are as accurate answer its requests."
    )
    priority: Int | None = maybe(
        "The most urgent (smallest) `priority` that its requests may state; null: none.", ge=-(2**31), le=2**31
    )

    def changed(self, change: KeyLimits) -> KeyLimits:
        """Return these limits with those that ``change`` states; null removes one."""
        return self.model_copy(update={name: getattr(change, name) for name in change.model_fields_set})

    def may_name(self, model: str) -> bool:
        """Whether a key may name a model that is no alias of its own."""
        return self.models is None or model in self.models

    def model_of(self, name: str, at: float, is_there: Callable[[str], bool]) -> str | None:
        """Return the model that answers to a name; None if the key may not name it.

        Of an alias's models that there are, it is the one whose share the point ``at`` lies in, 0 .. 1.
        """
        targets = (self.aliases or {}).get(name)
        if targets is None:
            return name if self.may_name(name) else None
        return share_at({model: weight for model, weight in targets.items() if is_there(model)}, at)

    @property
    def has_budget(self) -> bool:
        """Whether what it uses in a month is limited."""
        return (self.month_tokens, self.month_gco2, self.month_cost) != (None, None, None)


NO_KEY_LIMITS = KeyLimits()


class KeyUse(Message):
    """What a key with a budget has used in a month, those that it replaced included."""

    month: str
    tokens: int
    gco2: float
    cost: float

    def excess(self, limits: KeyLimits, month: str) -> str | None:
        """Say which budget is used up in this month; None if there is some left of each."""
        pairs = (
            (self.tokens, limits.month_tokens, " tokens"),
            (self.gco2, limits.month_gco2, " gCO2"),
            (self.cost, limits.month_cost, " in money"),
        )
        for used, most, unit in pairs:
            spent = used if self.month == month else 0
            if most is not None and spent >= most:
                return f"The budget of this key for {month} is {most:g}{unit}; {spent:.4g} are used."
        return None


class KeySpec(Message):
    """A new API key."""

    tenant_id: Name
    role: Role = Role.USER
    label: Text = Field(default="", max_length=100)
    user: Name | None = maybe("Name of the user of the tenant whose key it is.")
    project: Name | None = maybe(
        "The only project whose jobs, reports and budgets the key reaches; null: all of the tenant's."
    )
    expires_at: Instant | None = maybe("When the key stops working; null: never.")
    limits: KeyLimits = NO_KEY_LIMITS


class KeyChange(Message):
    """What to change about a key; what is left out stays as it is."""

    expires_at: Instant | None = maybe(
        "When the key stops working: a time in the past ends it now, null: once it is revoked."
    )
    limits: KeyLimits | None = maybe("The limits to change; those left out stay as they are, null removes one.")

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if "expires_at" not in self.model_fields_set and not (self.limits and self.limits.model_fields_set):
            raise ValueError("name what is to change: expires_at, or some of the limits")
        return self


class KeyRotation(Message):
    """How a key is replaced."""

    overlap_s: Real = said("How long the old key still works beside the new one.", default=0, ge=0, le=366 * 86_400)
    expires_at: Instant | None = maybe("When the new key stops working; null: never.")


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
    last_used_at: Instant | None = maybe("To within a minute, while requests are made with it; null: never used.")
    limits: KeyLimits = NO_KEY_LIMITS
    used: KeyUse | None = maybe("Counted while it has a budget for the month; null before the first count.")


class KeyList(Page[ApiKey]):
    """One page of keys, newest first, including revoked ones."""


class NewApiKey(ApiKey):
    """A new API key. Its secret is shown here and never again."""

    secret: str


class KeyLookup(Message):
    """Asks admission whose key has this hash, or this id. The key itself is never sent."""

    key_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$", exclude_if=is_none)
    key_id: str | None = Field(default=None, pattern=r"^[0-9A-Za-z_-]{1,64}$", exclude_if=is_none)

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.key_sha256 is None) == (self.key_id is None):
            raise ValueError("give either key_sha256 or key_id")
        return self


class ResolvedKey(Message):
    """The identity behind a key, and its tenant's limits and its own."""

    identity: Identity
    limits: TenantLimits
    expires_at: Instant | None = None
    # left out where they say nothing, as the router and the gateway of an older release refuse fields they do not know
    key_limits: KeyLimits = Field(default=NO_KEY_LIMITS, exclude_if=lambda limits: limits == NO_KEY_LIMITS)
    excess: str | None = maybe("Which budget of the key is used up, in a sentence.", exclude_if=is_none)


class AuditEntry(Message):
    """An action of an operator or admin."""

    at: Instant
    tenant_id: str
    key_id: str
    action: str = said("`key.created`, `tenant.changed`, `job.cancelled`, ...")
    target: str
    data: dict[str, Any] = Field(default_factory=dict[str, Any])


class AuditList(Page[AuditEntry]):
    """One page of the audit log, newest first."""
