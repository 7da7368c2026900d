"""Use cases on tenants, keys and the audit log."""

from __future__ import annotations

from typing import Any

from sqlalchemy import RowMapping, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.admission.keys import key_hash, new_secret
from services.contracts.identity import (
    ApiKey,
    AuditEntry,
    AuditList,
    Identity,
    KeyList,
    KeySpec,
    NewApiKey,
    ResolvedKey,
    Role,
    Tenant,
    TenantChange,
    TenantLimits,
    TenantList,
    TenantSpec,
)
from services.contracts.problems import FieldError, ProblemCode
from services.contracts.queries import PageQuery
from services.contracts.schema import NAME_PATTERN
from services.db.tables.admission import api_keys, audit_log, tenants
from services.kit.cursors import read_cursor, write_cursor
from services.kit.ids import new_id, utc_now
from services.kit.problems import ProblemError, not_found

KEY_ID = r"key_[0-9a-z]{26}"


class Access:
    """Keeps who may do what."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def resolve(self, key_sha256: bytes) -> ResolvedKey:
        """Return whose key it is.

        Raises:
            ProblemError: 404 for a key that never was, or was revoked.
        """
        query = (
            select(api_keys.c.id, api_keys.c.tenant_id, api_keys.c.role, tenants.c.limits)
            .join(tenants, tenants.c.id == api_keys.c.tenant_id)
            .where(api_keys.c.key_sha256 == key_sha256, api_keys.c.revoked_at.is_(None))
        )
        async with self._engine.connect() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise not_found("key")
        identity = Identity(tenant_id=row.tenant_id, role=Role(row.role), key_id=row.id)
        return ResolvedKey(identity=identity, limits=TenantLimits.model_validate(row.limits))

    async def create_tenant(self, caller: Identity, spec: TenantSpec) -> Tenant:
        """Make a tenant."""
        values = {"id": spec.id, "limits": spec.limits.model_dump()}
        query = insert(tenants).values(values).on_conflict_do_nothing().returning(tenants)
        async with self._engine.begin() as connection:
            row = (await connection.execute(query)).mappings().one_or_none()
            if row is None:
                raise ProblemError(
                    409,
                    ProblemCode.CONFLICT,
                    f"There is a tenant {spec.id} already.",
                    errors=[FieldError(pointer="/id", detail="Taken.")],
                )
            await _audit(connection, caller, "tenant.created", spec.id, limits=spec.limits.model_dump())
        return _tenant(row)

    async def change_tenant(self, caller: Identity, tenant_id: str, change: TenantChange) -> Tenant:
        """Change a tenant's limits; keys in the gateway's cache follow within its age."""
        async with self._engine.begin() as connection:
            query = select(tenants).where(tenants.c.id == tenant_id).with_for_update(key_share=True)
            row = (await connection.execute(query)).mappings().one_or_none()
            if row is None:
                raise not_found("tenant")
            limits = change.limits.applied_to(TenantLimits.model_validate(row["limits"])).model_dump()
            await connection.execute(update(tenants).where(tenants.c.id == tenant_id).values(limits=limits))
            await _audit(connection, caller, "tenant.changed", tenant_id, before=row["limits"], after=limits)
        return _tenant({**row, "limits": limits})

    async def tenant(self, tenant_id: str) -> Tenant:
        """Return a tenant."""
        async with self._engine.connect() as connection:
            row = (await connection.execute(select(tenants).where(tenants.c.id == tenant_id))).mappings().one_or_none()
        if row is None:
            raise not_found("tenant")
        return _tenant(row)

    async def tenants(self, page: PageQuery) -> TenantList:
        """Return one page of tenants, by id."""
        query = select(tenants).order_by(tenants.c.id).limit(page.limit + 1)
        if after := read_cursor(page.cursor, NAME_PATTERN):
            query = query.where(tenants.c.id > after)
        async with self._engine.connect() as connection:
            found = [_tenant(row) for row in (await connection.execute(query)).mappings()]
        more = len(found) > page.limit
        items = found[: page.limit]
        return TenantList(items=items, next_cursor=write_cursor(items[-1].id) if more else None)

    async def create_key(self, caller: Identity, spec: KeySpec) -> NewApiKey:
        """Make a key; only this answer holds its secret."""
        async with self._engine.begin() as connection:
            known = await connection.execute(select(tenants.c.id).where(tenants.c.id == spec.tenant_id))
            if known.one_or_none() is None:
                pointer = FieldError(pointer="/tenant_id", detail="There is no such tenant.")
                raise ProblemError(
                    422, ProblemCode.INVALID_REQUEST, f"There is no tenant {spec.tenant_id}.", errors=[pointer]
                )
            key, secret = await insert_key(connection, spec, new_secret())
            await _audit(connection, caller, "key.created", key.id, tenant=spec.tenant_id, role=spec.role)
        return NewApiKey(**key.model_dump(), secret=secret)

    async def revoke_key(self, caller: Identity, key_id: str) -> None:
        """Revoke a key; a key that is revoked already stays so."""
        async with self._engine.begin() as connection:
            query = select(api_keys.c.id, api_keys.c.role).where(
                (api_keys.c.id == key_id) | (api_keys.c.role == Role.ADMIN), api_keys.c.revoked_at.is_(None)
            )
            rows = (await connection.execute(query.order_by(api_keys.c.id).with_for_update())).all()
            if key_id not in {row.id for row in rows}:
                known = await connection.execute(select(api_keys.c.id).where(api_keys.c.id == key_id))
                if known.one_or_none() is None:
                    raise not_found("key")
                return
            if [row.id for row in rows if row.role == Role.ADMIN] == [key_id]:
                raise ProblemError(409, ProblemCode.CONFLICT, "This is the last admin key; make another one first.")
            await connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=utc_now()))
            await _audit(connection, caller, "key.revoked", key_id)

    async def keys(self, page: PageQuery) -> KeyList:
        """Return one page of keys, newest first, without their secrets."""
        query = select(api_keys).order_by(api_keys.c.id.desc()).limit(page.limit + 1)
        if before := read_cursor(page.cursor, KEY_ID):
            query = query.where(api_keys.c.id < before)
        async with self._engine.connect() as connection:
            found = [_key(row) for row in (await connection.execute(query)).mappings()]
        more = len(found) > page.limit
        items = found[: page.limit]
        return KeyList(items=items, next_cursor=write_cursor(items[-1].id) if more else None)

    async def audit(self, page: PageQuery) -> AuditList:
        """Return one page of the audit log, newest first."""
        query = select(audit_log).order_by(audit_log.c.sequence.desc()).limit(page.limit + 1)
        if before := read_cursor(page.cursor, r"[0-9]{1,18}"):
            query = query.where(audit_log.c.sequence < int(before))
        async with self._engine.connect() as connection:
            rows = (await connection.execute(query)).mappings().all()
        items = [
            AuditEntry(**{name: row[name] for name in ("at", "tenant_id", "key_id", "action", "target", "data")})
            for row in rows[: page.limit]
        ]
        more = len(rows) > page.limit
        return AuditList(items=items, next_cursor=write_cursor(str(rows[page.limit - 1]["sequence"])) if more else None)


async def insert_key(connection: AsyncConnection, spec: KeySpec, secret: str) -> tuple[ApiKey, str]:
    """Store a key by its hash; return it as listed, and its secret."""
    values = {
        "id": new_id("key"),
        "tenant_id": spec.tenant_id,
        "role": spec.role,
        "label": spec.label,
        "key_sha256": key_hash(secret),
    }
    row = (await connection.execute(insert(api_keys).values(values).returning(api_keys))).mappings().one()
    return _key(row), secret


async def _audit(connection: AsyncConnection, caller: Identity, action: str, target: str, **data: Any) -> None:
    await connection.execute(
        insert(audit_log).values(
            tenant_id=caller.tenant_id, key_id=caller.key_id, action=action, target=target, data=data
        )
    )


def _tenant(row: RowMapping | dict[str, Any]) -> Tenant:
    return Tenant(id=row["id"], limits=TenantLimits.model_validate(row["limits"]), created_at=row["created_at"])


def _key(row: RowMapping) -> ApiKey:
    return ApiKey(**{name: row[name] for name in ("id", "tenant_id", "role", "label", "created_at", "revoked_at")})
