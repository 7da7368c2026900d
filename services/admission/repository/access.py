"""Tenants, keys and the audit log."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import RowMapping, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.contracts.identity import (
    ApiKey,
    AuditEntry,
    Identity,
    KeySpec,
    ResolvedKey,
    Role,
    Tenant,
    TenantLimits,
    TenantSpec,
)
from services.contracts.queries import AuditQuery
from services.db import locks
from services.db.tables.admission import api_keys, audit_log, tenants
from services.kit.ids import new_id, utc_now

_VALID = (
    api_keys.c.revoked_at.is_(None),
    api_keys.c.expires_at.is_(None) | (api_keys.c.expires_at > func.now()),
)
_NOT_NOTED = (api_keys.c.last_used_at.is_(None) | (api_keys.c.last_used_at < func.now() - timedelta(seconds=60))).label(
    "not_noted"
)
"""Whether the last use is to be written: at most once a minute."""


@dataclass(frozen=True, slots=True)
class KeyRole:
    """A key that is valid, and its role."""

    key_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class AuditRow:
    """An entry of the audit log and its place in the order."""

    sequence: int
    entry: AuditEntry


class AccessRepository:
    """Queries on one connection, within the caller's transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def resolve(self, key_sha256: bytes) -> ResolvedKey | None:
        """Return whose key has this hash, unless it was revoked or has expired; note that it was used."""
        query = (
            select(
                api_keys.c.id,
                api_keys.c.tenant_id,
                api_keys.c.role,
                api_keys.c.expires_at,
                tenants.c.limits,
                _NOT_NOTED,
            )
            .join(tenants, tenants.c.id == api_keys.c.tenant_id)
            .where(api_keys.c.key_sha256 == key_sha256, *_VALID)
        )
        row = (await self._connection.execute(query)).one_or_none()
        if row is None:
            return None
        if row.not_noted:
            await self._connection.execute(
                update(api_keys).where(api_keys.c.id == row.id).values(last_used_at=func.now())
            )
        identity = Identity(tenant_id=row.tenant_id, role=Role(row.role), key_id=row.id)
        limits = TenantLimits.model_validate(row.limits)
        return ResolvedKey(identity=identity, limits=limits, expires_at=row.expires_at)

    async def insert_tenant(self, spec: TenantSpec) -> Tenant | None:
        """Store a tenant; return None if one with its id exists."""
        values = {"id": spec.id, "limits": spec.limits.model_dump()}
        query = insert(tenants).values(values).on_conflict_do_nothing().returning(tenants)
        row = (await self._connection.execute(query)).mappings().one_or_none()
        return None if row is None else _tenant(row)

    async def tenant(self, tenant_id: str, *, lock: bool = False) -> Tenant | None:
        """Return a tenant; with ``lock``, no other transaction can change it until this one ends."""
        query = select(tenants).where(tenants.c.id == tenant_id)
        if lock:
            query = query.with_for_update(key_share=True)
        row = (await self._connection.execute(query)).mappings().one_or_none()
        return None if row is None else _tenant(row)

    async def tenants(self, after_id: str | None, limit: int) -> list[Tenant]:
        """Return up to ``limit`` tenants by id, from after ``after_id``."""
        query = select(tenants).order_by(tenants.c.id).limit(limit)
        if after_id is not None:
            query = query.where(tenants.c.id > after_id)
        return [_tenant(row) for row in (await self._connection.execute(query)).mappings()]

    async def set_limits(self, tenant_id: str, limits: TenantLimits) -> None:
        """Replace a tenant's limits."""
        query = update(tenants).where(tenants.c.id == tenant_id).values(limits=limits.model_dump())
        await self._connection.execute(query)

    async def insert_key(self, spec: KeySpec, key_sha256: bytes) -> ApiKey:
        """Store a key by its hash."""
        values = {
            "id": new_id("key"),
            "tenant_id": spec.tenant_id,
            "role": spec.role,
            "label": spec.label,
            "key_sha256": key_sha256,
            "expires_at": spec.expires_at,
        }
        query = insert(api_keys).values(values).returning(api_keys)
        return _key((await self._connection.execute(query)).mappings().one())

    async def has_key(self, key_id: str) -> bool:
        """Return whether there is such a key, revoked or not."""
        query = select(api_keys.c.id).where(api_keys.c.id == key_id)
        return (await self._connection.execute(query)).one_or_none() is not None

    async def lock_key_and_admins(self, key_id: str) -> list[KeyRole]:
        """Return the key and all admin keys that are valid, and lock them until the transaction ends."""
        query = select(api_keys.c.id, api_keys.c.role).where(
            (api_keys.c.id == key_id) | (api_keys.c.role == Role.ADMIN), *_VALID
        )
        rows = await self._connection.execute(query.order_by(api_keys.c.id).with_for_update())
        return [KeyRole(row.id, Role(row.role)) for row in rows]

    async def key(self, key_id: str) -> ApiKey | None:
        """Return a key, revoked or not, and lock it until the transaction ends."""
        query = select(api_keys).where(api_keys.c.id == key_id).with_for_update()
        row = (await self._connection.execute(query)).mappings().one_or_none()
        return None if row is None else _key(row)

    async def set_expiry(self, key_id: str, expires_at: datetime | None) -> None:
        """Set when a key stops working; None: never."""
        await self._connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(expires_at=expires_at))

    async def lasting_admins(self) -> list[KeyRole]:
        """Return the valid admin keys that never expire, and lock them until the transaction ends."""
        query = select(api_keys.c.id, api_keys.c.role).where(
            api_keys.c.role == Role.ADMIN, api_keys.c.revoked_at.is_(None), api_keys.c.expires_at.is_(None)
        )
        rows = await self._connection.execute(query.order_by(api_keys.c.id).with_for_update())
        return [KeyRole(row.id, Role(row.role)) for row in rows]

    async def revoke_key(self, key_id: str) -> None:
        """Mark a key as revoked."""
        query = update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=utc_now())
        await self._connection.execute(query)

    async def revoke_admin_keys(self, labels: Collection[str]) -> list[str]:
        """Revoke the admin keys that have one of these labels; return their ids."""
        query = (
            update(api_keys)
            .where(api_keys.c.role == Role.ADMIN, api_keys.c.label.in_(labels), api_keys.c.revoked_at.is_(None))
            .values(revoked_at=utc_now())
            .returning(api_keys.c.id)
        )
        return sorted((await self._connection.execute(query)).scalars())

    async def keys(self, before_id: str | None, limit: int) -> list[ApiKey]:
        """Return up to ``limit`` keys, newest first, from before ``before_id``."""
        query = select(api_keys).order_by(api_keys.c.id.desc()).limit(limit)
        if before_id is not None:
            query = query.where(api_keys.c.id < before_id)
        return [_key(row) for row in (await self._connection.execute(query)).mappings()]

    async def audit(self, asked: AuditQuery, before: int | None, limit: int) -> list[AuditRow]:
        """Return up to ``limit`` of the entries that are asked for, newest first, from before ``before``."""
        query = select(audit_log).order_by(audit_log.c.sequence.desc()).limit(limit)
        if before is not None:
            query = query.where(audit_log.c.sequence < before)
        if asked.since is not None:
            query = query.where(audit_log.c.at >= asked.since)
        if asked.until is not None:
            query = query.where(audit_log.c.at < asked.until)
        if asked.action is not None:
            query = query.where(audit_log.c.action.startswith(asked.action, autoescape=True))
        return [AuditRow(row["sequence"], _entry(row)) for row in (await self._connection.execute(query)).mappings()]

    async def lock_first_start(self) -> None:
        """Let one process at a time look whether there is an admin key, until its transaction ends."""
        await self._connection.execute(select(func.pg_advisory_xact_lock(locks.FIRST_START)))

    async def has_admin_key(self) -> bool:
        """Return whether there is an admin key, revoked or not."""
        query = select(api_keys.c.id).where(api_keys.c.role == Role.ADMIN).limit(1)
        return (await self._connection.execute(query)).one_or_none() is not None


def _tenant(row: RowMapping) -> Tenant:
    return Tenant(id=row["id"], limits=TenantLimits.model_validate(row["limits"]), created_at=row["created_at"])


def _key(row: RowMapping) -> ApiKey:
    return ApiKey(**{name: row[name] for name in ApiKey.model_fields})


def _entry(row: RowMapping) -> AuditEntry:
    fields: dict[str, Any] = {name: row[name] for name in ("at", "tenant_id", "key_id", "action", "target", "data")}
    return AuditEntry(**fields)
