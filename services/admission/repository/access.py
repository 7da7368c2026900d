"""Tenants, users, keys and the audit log."""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, any_, exists, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.admission.repository import Repository
from services.contracts.identity import (
    ApiKey,
    AuditEntry,
    Identity,
    KeyLimits,
    KeySpec,
    KeyUse,
    ResolvedKey,
    Role,
    Tenant,
    TenantLimits,
    TenantSpec,
    User,
    UserSpec,
)
from services.contracts.queries import AuditQuery
from services.db import locks
from services.db.tables import api_keys, audit_log, tenants, users
from services.kit.ids import new_id, utc_now
from services.kit.readable import BY_NAME, Unread

_WORKING = (api_keys.c.revoked_at.is_(None), api_keys.c.expires_at.is_(None) | (api_keys.c.expires_at > func.now()))
_VALID = (*_WORKING, ~exists().where(users.c.id == api_keys.c.user_id, users.c.disabled_at.is_not(None)))
_KEYS = select(api_keys, users.c.name.label("user")).outerjoin(users, users.c.id == api_keys.c.user_id)
_NOT_NOTED = (api_keys.c.last_used_at.is_(None) | (api_keys.c.last_used_at < func.now() - timedelta(seconds=60))).label(
    "not_noted"
)
"""Whether the last use is to be written: at most once a minute."""


class AccessRepository(Repository):
    """Tenants, users, keys and the audit log."""

    async def resolve(self, key: bytes | str) -> ResolvedKey | None:
        """Return the identity of the key with this hash, unless it or its user no longer works; note its use.

        A key with this id is found whether it works or not, since lines of batches that it asked for may still be
        answered: then ``expires_at`` is past, and the limits are those of its newest successor, if there is one.
        """
        ends_at = func.least(api_keys.c.expires_at, api_keys.c.revoked_at, users.c.disabled_at)
        query = (
            select(
                api_keys.c.id,
                api_keys.c.tenant_id,
                api_keys.c.role,
                ends_at.label("expires_at"),
                (ends_at <= func.now()).label("is_over"),
                api_keys.c.user_id,
                api_keys.c.project,
                tenants.c.limits,
                api_keys.c.limits.label("key_limits"),
                api_keys.c.used,
                _NOT_NOTED,
            )
            .join(tenants, tenants.c.id == api_keys.c.tenant_id)
            .outerjoin(users, users.c.id == api_keys.c.user_id)
            .where(api_keys.c.key_sha256 == key if isinstance(key, bytes) else api_keys.c.id == key)
        )
        row = (await self._connection.execute(query)).one_or_none()
        if row is None or (row.is_over and isinstance(key, bytes)):
            return None
        asks = row
        if row.is_over:
            columns = select(api_keys.c.limits.label("key_limits"), api_keys.c.used)
            later = columns.where(any_(api_keys.c.replaced) == row.id).order_by(api_keys.c.created_at.desc())
            asks = (await self._connection.execute(later.limit(1))).one_or_none() or row
        elif row.not_noted:
            await self.change_key(row.id, last_used_at=func.now())
        identity = Identity.of(row, key_id=row.id)
        limits, own = TenantLimits.as_stored(row.limits), KeyLimits.as_stored(asks.key_limits)
        month = f"{utc_now():%Y-%m}"
        used = KeyUse(month=month, tokens=0, gco2=0, cost=0) if asks.used is None else KeyUse.as_stored(asks.used)
        excess = used.excess(own, month) if own.has_budget else None
        return ResolvedKey(identity=identity, limits=limits, expires_at=row.expires_at, key_limits=own, excess=excess)

    async def insert_tenant(self, spec: TenantSpec) -> Tenant | None:
        """Store a tenant; return None if one with its id already exists."""
        values = {"id": spec.id, "limits": spec.limits.model_dump(exclude_none=True)}
        query = insert(tenants).values(values).on_conflict_do_nothing().returning(tenants)
        return await self._one(query, Tenant.as_stored)

    async def tenant(self, tenant_id: str, *, lock: bool = False) -> Tenant | None:
        """Return a tenant; with ``lock``, no other transaction can change it until this one ends."""
        query = select(tenants).where(tenants.c.id == tenant_id)
        return await self._one(query.with_for_update(key_share=True) if lock else query, Tenant.as_stored)

    async def tenants(self, after_id: str | None, limit: int) -> list[Tenant | Unread]:
        """Return up to ``limit`` tenants in order of id, after ``after_id``."""
        query = select(tenants).order_by(tenants.c.id).limit(limit)
        if after_id is not None:
            query = query.where(tenants.c.id > after_id)
        return await self._listed(query, Tenant.as_stored, "tenant")

    async def set_limits(self, tenant_id: str, limits: TenantLimits) -> None:
        query = update(tenants).where(tenants.c.id == tenant_id).values(limits=limits.model_dump(exclude_none=True))
        await self._connection.execute(query)

    async def insert_user(self, tenant_id: str, spec: UserSpec) -> User | None:
        """Store a user; return None if the tenant already has one of that name."""
        values = {"id": new_id("user"), "tenant_id": tenant_id, **spec.model_dump()}
        query = insert(users).values(values).on_conflict_do_nothing().returning(users)
        return await self._one(query, User.as_stored)

    async def user(self, tenant_id: str, name: str, *, lock: bool = False) -> User | None:
        """Return a user; with ``lock``, no other transaction can change it until this one ends."""
        query = select(users).where(users.c.tenant_id == tenant_id, users.c.name == name)
        return await self._one(query.with_for_update() if lock else query, User.as_stored)

    async def user_of_id(self, user_id: str) -> User | None:
        return await self._one(select(users).where(users.c.id == user_id), User.as_stored)

    async def installation(self) -> str | None:
        """Return what names this installation: a digest of the id of its first key, as keys are never deleted."""
        first = select(api_keys.c.id).order_by(api_keys.c.created_at, api_keys.c.id).limit(1).scalar_subquery()
        return await self._value(select(func.md5(first)))

    async def users(self, tenant_id: str, after: str | None, limit: int) -> list[User | Unread]:
        """Return up to ``limit`` users of a tenant in order of name, after ``after``."""
        query = select(users).where(users.c.tenant_id == tenant_id).order_by(users.c.name).limit(limit)
        if after is not None:
            query = query.where(users.c.name > after)
        return await self._listed(query, User.as_stored, "user", BY_NAME)

    async def change_user(self, user_id: str, *, account: str | None, disabled_at: datetime | None) -> None:
        """Set a user's account, and since when the user has been disabled."""
        query = update(users).where(users.c.id == user_id).values(account=account, disabled_at=disabled_at)
        await self._connection.execute(query)

    async def has_unowned_admin_key(self, labels: Collection[str]) -> bool:
        """Return whether an admin key with one of these labels belongs to no user."""
        query = select(api_keys.c.id).where(*_unowned(labels)).limit(1)
        return await self._value(query) is not None

    async def own_admin_keys(self, labels: Collection[str], user_id: str) -> None:
        """Give the admin keys that have one of these labels and no owner to a user."""
        await self._connection.execute(update(api_keys).where(*_unowned(labels)).values(user_id=user_id))

    async def insert_key(
        self, spec: KeySpec, key_sha256: bytes, user_id: str | None = None, replaced: str | None = None
    ) -> ApiKey:
        """Store a key by its hash; the use of budgets by the key ``replaced`` counts as its own."""
        values: dict[str, Any] = {
            **spec.model_dump(include={"tenant_id", "role", "label", "expires_at", "project"}),
            **{"id": new_id("key"), "key_sha256": key_sha256, "user_id": user_id},
            "limits": spec.limits.model_dump(exclude_none=True),
        }
        if replaced is not None:
            old = select(api_keys).where(api_keys.c.id == replaced).subquery()
            values["replaced"] = select(func.array_append(old.c.replaced, old.c.id)).scalar_subquery()
            values["used"] = select(old.c.used).scalar_subquery()
        query = insert(api_keys).values(values).returning(api_keys)
        (made,) = await self._all(query, ApiKey.as_stored)
        return made.model_copy(update={"user": spec.user})

    async def admins(self) -> list[ApiKey]:
        """Return the valid admin keys, and lock them until the transaction ends."""
        is_valid = api_keys.c.role == Role.ADMIN, *_WORKING, users.c.disabled_at.is_(None)
        query = _KEYS.where(*is_valid).order_by(api_keys.c.id)
        return await self._all(query.with_for_update(of=api_keys), ApiKey.as_stored)

    async def key(self, key_id: str) -> ApiKey | None:
        """Return a key, revoked or not, and lock it until the transaction ends."""
        return await self._one(_KEYS.where(api_keys.c.id == key_id).with_for_update(of=api_keys), ApiKey.as_stored)

    async def change_key(self, key_id: str, **values: Any) -> None:
        await self._connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(**values))

    async def revoke_admin_keys(self, labels: Collection[str]) -> list[str]:
        """Revoke the admin keys that have one of these labels; return their ids."""
        query = (
            update(api_keys)
            .where(api_keys.c.role == Role.ADMIN, api_keys.c.label.in_(labels), api_keys.c.revoked_at.is_(None))
            .values(revoked_at=utc_now())
            .returning(api_keys.c.id)
        )
        return sorted((await self._connection.execute(query)).scalars())

    async def keys(self, before_id: str | None, limit: int) -> list[ApiKey | Unread]:
        """Return up to ``limit`` keys, newest first, before ``before_id``."""
        query = _KEYS.order_by(api_keys.c.id.desc()).limit(limit)
        if before_id is not None:
            query = query.where(api_keys.c.id < before_id)
        return await self._listed(query, ApiKey.as_stored, "key")

    async def audit(self, asked: AuditQuery, before: int | None, limit: int) -> list[tuple[int, AuditEntry] | Unread]:
        """Return up to ``limit`` of the entries asked for, newest first, before ``before``, with their places."""
        query = select(audit_log).order_by(audit_log.c.sequence.desc()).limit(limit)
        if before is not None:
            query = query.where(audit_log.c.sequence < before)
        if asked.since is not None:
            query = query.where(audit_log.c.at >= asked.since)
        if asked.until is not None:
            query = query.where(audit_log.c.at < asked.until)
        if asked.action is not None:
            query = query.where(audit_log.c.action.startswith(asked.action, autoescape=True))
        return await self._listed(
            query,
            lambda row: (row["sequence"], AuditEntry.as_stored(row)),
            "audit entry",
            lambda row: str(row["sequence"]),
        )

    async def lock_admin_keys(self) -> None:
        """Let one transaction at a time check which admin keys are valid and change that."""
        await self._connection.execute(select(func.pg_advisory_xact_lock(locks.ADMIN_KEYS)))

    async def has_admin_key(self) -> bool:
        """Return whether there is an admin key, revoked or not."""
        query = select(api_keys.c.id).where(api_keys.c.role == Role.ADMIN).limit(1)
        return await self._value(query) is not None


def _unowned(labels: Collection[str]) -> tuple[ColumnElement[bool], ...]:
    return (
        api_keys.c.role == Role.ADMIN,
        api_keys.c.label.in_(labels),
        api_keys.c.user_id.is_(None),
        api_keys.c.revoked_at.is_(None),
    )


async def write_audit(connection: AsyncConnection, caller: Identity, action: str, target: str, **data: Any) -> None:
    """Record an action of an operator or admin, in the transaction of the action itself."""
    await connection.execute(
        insert(audit_log).values(
            tenant_id=caller.tenant_id, key_id=caller.key_id, action=action, target=target, data=data
        )
    )
